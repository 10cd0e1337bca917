"""Checkpoints of a run: shards to resume from and a Hugging Face snapshot to serve.

    <output_dir>/checkpoints/step_N/trainer/   model, optimizer, progress and random state of every rank
    <output_dir>/weights/step_N/               Hugging Face folder (with lora_adapters/ beside the merged weights)

Every rank writes its tensors in torch's distributed checkpoint format, for any number of ranks to read. A folder under
its final name is whole on disk. All ranks call each method, in the same order.
"""

from __future__ import annotations

import json
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from loguru import logger
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from transformers import PreTrainedTokenizerBase

from meshrl.core.config.shared import ModelConfig
from meshrl.core.durable import flush, flush_tree
from meshrl.core.paths import Layout
from meshrl.models.lora import adapter_config, adapter_state, save_adapter
from meshrl.models.state import gather_state
from meshrl.training.checkpoints import files, train_state
from meshrl.training.checkpoints.files import CheckpointContents, CheckpointError, FileMark
from meshrl.training.checkpoints.random_state import random_state, restore_random_state, seed_rank
from meshrl.training.checkpoints.saving_ranks import SavingRanks, reason
from meshrl.training.checkpoints.weights_folder import WeightsWriter
from meshrl.training.config import CheckpointConfig
from meshrl.training.learner import Learner
from meshrl.training.run_state import RunState
from meshrl.wire.saved_steps import pinned_steps, step_folder, steps_in

__all__ = ["CheckpointError", "Checkpointer", "TrainingProgress"]

PART = "trainer"  # the folder of a step's checkpoint; other programs have others beside it
SAVE_DEADLINE_S = 3600.0  # of a save in the background

SnapshotWriter = Callable[[Path, Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]], None]
"""Fills a folder with weights and adapters, by name. Raises OSError."""


@dataclass(kw_only=True)
class TrainingProgress:
    tokens: int = 0
    samples: int = 0
    data: Mapping[str, object] = field(default_factory=dict)
    """Where the data goes on, as JSON; empty if the loop's data is not saved."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _Job:
    step: int
    weights: Mapping[str, torch.Tensor] | None  # by Hugging Face name, on rank 0 only; elsewhere empty
    adapters: Mapping[str, torch.Tensor]  # the same of those that are written on their own
    tensors: Mapping[str, torch.Tensor] | None
    random_state: Mapping[str, torch.Tensor]
    progress: TrainingProgress


class Checkpointer:
    """The checkpoints of one run. Called between steps, from the training thread."""

    def __init__(
        self,
        learner: Learner,
        run: RunState,
        output_dir: Path,
        *,
        tokenizer: PreTrainedTokenizerBase | None,
        seed: int = 0,
        snapshot_dtype: torch.dtype | None = None,
        base: ModelConfig | None = None,
        adapters_of: str | None = None,
        merges: bool = True,
    ) -> None:
        """`snapshot_dtype` is that of the Hugging Face folders, None the one that the weights are trained in.

        Snapshots keep of `base`, the loaded model, what training leaves alone. `adapters_of` names the model under the
        adapters, which are then written on their own as well; without `merges` snapshots are these alone. Deletes
        leftovers of a killed process. Collective. Raises CheckpointError for a model of which no snapshot can be
        written.
        """
        self.progress = TrainingProgress()
        self._learner = learner
        self._run = run
        layout = Layout(output_dir)
        self._checkpoints, self._weights = layout.checkpoints, layout.weights
        self._seed = seed
        self._snapshot_dtype = snapshot_dtype
        self._adapters, self._merges = adapters_of is not None, merges
        self._own: set[Path] = set()  # folders of this run; what an earlier run left at the same step is replaced
        self._on_branch = False  # checkpoints of later steps are none of this run's past
        self._saving: Future[None] | None = None
        self._group = SavingRanks.beside(learner.parallel, timeout_s=SAVE_DEADLINE_S)

        def writer() -> SnapshotWriter | None:
            if not self._group.plan.leads:
                return None
            if not merges:
                assert adapters_of is not None, "snapshots without merged weights are of adapters"
                config = adapter_config(learner.model, adapters_of)
                return lambda folder, state, adapters: save_adapter(folder, adapters, config)
            return WeightsWriter(
                learner.model,
                dtype=snapshot_dtype or learner.model.dtype,
                tokenizer=tokenizer,
                base=base,
                base_name=adapters_of,
            ).write

        self._write_snapshot = self._group.together("write the outline of a snapshot", writer)
        # For good, since saves on a thread must not touch the process's filters: no process group is as it should be.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        if self._group.plan.leads:
            files.sweep(self._checkpoints, PART)
            files.sweep(self._weights, None)

    # --- saving -----------------------------------------------------------------------------------

    def save(
        self,
        *,
        weights_only: bool = False,
        in_background: bool = False,
        on_durable: Callable[[int, Path], None] = lambda step, folder: None,
    ) -> Path:
        """Writes the state after the last step and returns its folder; waits first for the save under way.

        `in_background` copies the state to the host's memory and writes it on a thread. `on_durable` gets the step and
        its folder once they are on disk, on that thread. The same step again is a no-op. Another run's folder there is
        replaced. Raises CheckpointError, on all ranks, when one of them cannot write; of a save in the background the
        next `check`, `wait_for_save` or save raises it.
        """
        self.wait_for_save()
        with self._run.optimizer.state_open():
            job = self._job(weights_only=weights_only)
            if not in_background:
                self._write(job)
            elif job.tensors is not None:
                stager = BlockingAsyncStager(cache_staged_state_dict=False)
                job = replace(job, tensors=stager.stage(dict(job.tensors)))
        folder = self._weights_folder(job.step) if weights_only else self._folder(job.step)
        if not in_background:
            on_durable(job.step, folder)
            return folder
        saving: Future[None] = Future()

        def work() -> None:
            try:
                self._write(job)
                on_durable(job.step, folder)
            except BaseException as error:  # noqa: BLE001  # whoever waits for the save raises it
                saving.set_exception(error)
            else:
                saving.set_result(None)

        self._saving = saving
        threading.Thread(target=work, name="checkpoint", daemon=True).start()
        return folder

    def save_as(
        self, config: CheckpointConfig, on_durable: Callable[[int, Path], None] = lambda step, folder: None
    ) -> None:
        """Saves as configured, then prunes."""

        def written(step: int, folder: Path) -> None:
            on_durable(step, folder)
            self.prune(config)

        self.save(weights_only=config.weights_only, in_background=config.save_async, on_durable=written)

    def check(self) -> None:
        """Raises the failure of a save in the background; does not wait."""
        if self._saving is not None and self._saving.done():
            self.wait_for_save()

    def wait_for_save(self) -> None:
        """Waits for the save under way. Raises CheckpointError when it failed, or is not done in time."""
        saving, self._saving = self._saving, None
        if saving is not None:
            try:
                saving.result(SAVE_DEADLINE_S)
            except TimeoutError as error:
                raise CheckpointError(
                    f"the checkpoint that is being written in the background is not on disk after {SAVE_DEADLINE_S:g} "
                    "s; is the disk too slow, or gone?"
                ) from error

    def prune(self, config: CheckpointConfig) -> None:
        """Deletes checkpoints and snapshots beyond `keep_last`, but not the newest, multiples of `keep_interval` and
        pinned steps.

        Other programs' parts of a step go with this one's. The next save retries what cannot be deleted.
        """
        if not self._group.plan.leads:
            return
        try:
            surplus = partial(
                files.surplus,
                keep_last=config.keep_last,
                keep_interval=config.keep_interval,
                pinned=pinned_steps(self._weights),
            )
            saved = self._resumable()
            doomed = surplus(saved)
            for step in doomed:
                files.remove(self._folder(step))  # first: without it nobody resumes from the step
                files.remove(step_folder(self._checkpoints, step))
            snapshots = [step for step in steps_in(self._weights) if step <= self._run.step_done]
            for step in surplus(snapshots) - (set(saved) - doomed):
                files.remove(self._weights_folder(step))
        except OSError as error:  # what is new is on disk
            logger.warning("old checkpoints could not be deleted: {}", error)

    # --- restoring --------------------------------------------------------------------------------

    def restore(self, step: int) -> int:
        """Loads model, optimizer, progress and random state; -1 takes the newest checkpoint. Returns the step.

        With another number of ranks random states start anew. Checkpoints and snapshots of later steps are set aside,
        since the run goes another way from here. Raises CheckpointError, on all ranks, when there is none to resume
        from, or it is damaged or of another model.
        """
        step, manifest = self._found(step)
        self._read(self._folder(step), manifest, with_optimizer=True)
        self._own |= {self._folder(step), self._weights_folder(step)}
        self._group.together("set aside later checkpoints", lambda: self._leave_other_branch(step))
        return step

    def start_from(self, checkpoints: Path, step: int, *, with_optimizer: bool) -> None:
        """Goes on from another run's checkpoint, below `checkpoints`, and saves that as this run's first.

        Without `with_optimizer` its weights alone, for step 0. Raises CheckpointError as `restore` and `save`.
        """
        folder = step_folder(checkpoints, step) / PART
        manifest = self._group.together("read the checkpoint", lambda: CheckpointContents.read(folder, step=step))
        self._read(folder, manifest, with_optimizer=with_optimizer)
        self.save()

    def _read(self, folder: Path, manifest: CheckpointContents, *, with_optimizer: bool) -> None:
        self._learner.take_up(self._run)
        group = self._group
        names = group.plan.share(sorted(manifest.files))
        self._group.together("read", lambda: files.verify(folder, [(name, manifest.files[name]) for name in names]))
        optimizer = train_state.optimizer_kind(self._run)
        if with_optimizer and manifest.optimizer != optimizer:
            raise CheckpointError(
                f"{folder} was trained with the optimizer {manifest.optimizer}, this run has {optimizer}; set "
                "optim.type as it was"
            )
        reader, control = FileSystemReader(folder), self._group.control
        with self._run.optimizer.state_open():
            tensors = train_state.tensors_to_fill(
                self._learner.model, self._run, reader.read_metadata(), folder, with_optimizer=with_optimizer
            )
            try:
                state_dict_loader.load(tensors, storage_reader=reader, process_group=control, no_dist=not control)
            except CheckpointException as error:  # a BaseException, as torch has it
                raise files.damaged(folder, reason(error)) from error
            train_state.take_over(self._learner.model, self._run, tensors)
        self._run.drop_gradient()  # of the weights before
        if not with_optimizer:
            return
        seed_rank(self._seed, manifest.step, group.plan)
        if manifest.ranks == group.plan.world_size:
            restore_random_state(load_file(folder / _random_file(group.plan.rank)), self._learner.device)
        self._run.step_done = manifest.step
        self.progress = TrainingProgress(tokens=manifest.tokens, samples=manifest.samples, data=manifest.data)

    def has_checkpoint(self) -> bool:
        """Whether there is one to resume from. Collective."""
        found = bytes([bool(self._resumable())]) if self._group.plan.leads else None
        return self._group.broadcast(found) == b"\1"

    def _found(self, step: int) -> tuple[int, CheckpointContents]:
        def find() -> bytes | None:
            if not self._group.plan.leads:
                return None
            resumable = self._resumable()
            found = resumable[-1] if step == -1 and resumable else step
            if found not in resumable:
                wanted = "the newest step" if step == -1 else f"step {step}"
                there = f"steps {resumable}; set ckpt.resume_step to one of them" if resumable else "no checkpoint"
                raise CheckpointError(
                    f"cannot resume from {wanted}: {self._checkpoints} holds {there}; without ckpt.resume_step the run"
                    " starts afresh"
                )
            return str(found).encode()

        step = int(self._group.broadcast(self._group.together("find the checkpoint", find)))
        return step, self._group.together(
            "read the checkpoint", lambda: CheckpointContents.read(self._folder(step), step=step)
        )

    # --- writing, on the training thread or beside it -----------------------------------------------

    def _job(self, *, weights_only: bool) -> _Job:
        step = self._run.step_done
        self._learner.take_up(self._run)
        if not self._on_branch:
            self._group.together("set aside later checkpoints", lambda: self._leave_other_branch(step))
        wanted = [self._weights_folder(step)] + ([] if weights_only else [self._folder(step)])
        needed = bytes(folder not in self._own or not folder.is_dir() for folder in wanted)
        needed = self._group.broadcast(needed if self._group.plan.leads else None)
        model, first = self._learner.model, self._group.plan.leads
        weights: Mapping[str, torch.Tensor] | None = None
        adapters: Mapping[str, torch.Tensor] = {}
        if needed[0]:
            weights = gather_state(model, self._snapshot_dtype, keep=first) if self._merges else {}
            adapters = adapter_state(model, keep=first) if self._adapters else {}
        return _Job(
            step=step,
            weights=weights,
            adapters=adapters,
            tensors=train_state.run_tensors(model, self._run) if needed[1:] == b"\1" else None,
            random_state=random_state(self._learner.device),
            progress=replace(self.progress),
        )

    def _write(self, job: _Job) -> None:
        weights = None if job.weights is None else self._weights_folder(job.step)
        shards = None if job.tensors is None else self._folder(job.step)
        parts = [folder for folder in (weights, shards) if folder is not None]
        try:
            self._group.together("start a checkpoint", lambda: self._first(files.make_partial, parts))
            if shards is not None and job.tensors is not None:
                partial = shards.with_name(shards.name + files.PARTIAL)
                self._write_shards(job, dict(job.tensors), partial)
            if weights is not None:
                self._group.together("write the weights", lambda: self._write_weights(weights, job))
            self._group.together("finish a checkpoint", lambda: self._first(files.reveal, parts))
        except BaseException:  # whatever it was, nothing half written stays
            self._first(files.discard_partial, parts)
            raise
        self._own |= set(parts)

    def _write_shards(self, job: _Job, tensors: dict[str, torch.Tensor], partial: Path) -> None:
        group, plan = self._group, self._group.plan
        own_random = partial / _random_file(plan.rank)

        def write() -> None:
            writer = FileSystemWriter(partial)
            state_dict_saver.save(
                tensors, storage_writer=writer, process_group=group.control, no_dist=not group.control
            )

        def write_random_state() -> dict[str, dict[str, int]]:
            save_file(dict(job.random_state), own_random)
            flush(own_random)
            written = [own_random, *partial.glob(f"__{plan.rank}_*"), *([partial / ".metadata"] if plan.leads else [])]
            return {path.name: vars(files.mark(path)) for path in written}

        self._group.together("write its shards", write)
        marks = self._group.together("write its random state", write_random_state)
        parts = group.gather(np.frombuffer(json.dumps(marks).encode(), dtype=np.uint8)) or []
        manifest = CheckpointContents(
            step=job.step,
            ranks=plan.world_size,
            model=type(self._learner.model).__name__,
            optimizer=train_state.optimizer_kind(self._run),
            **vars(job.progress),
            files={name: FileMark(**mark) for part in parts for name, mark in json.loads(part.tobytes()).items()},
        )

        self._group.together("write the manifest", lambda: self._first(manifest.write, [partial]))

    def _write_weights(self, folder: Path, job: _Job) -> None:
        if self._write_snapshot is None or job.weights is None:  # rank 0 has both
            return
        partial = folder.with_name(folder.name + files.PARTIAL)
        self._write_snapshot(partial, job.weights, job.adapters)
        flush_tree(partial)

    def _first(self, action: Callable[[Path], object], folders: Sequence[Path]) -> None:
        for folder in folders if self._group.plan.leads else ():
            action(folder)

    # --- folders ------------------------------------------------------------------------------------

    def _leave_other_branch(self, step: int) -> None:
        self._on_branch = True
        if not self._group.plan.leads:
            return
        saved = (self._checkpoints, self._folder, self._resumable())
        snapshots = (self._weights, self._weights_folder, steps_in(self._weights))
        for root, written, steps in (saved, snapshots):
            for later in steps:
                if later > step and written(later) not in self._own:
                    folder = step_folder(root, later)
                    logger.warning("{} is not of this run's past: kept as {}", folder, files.supersede(folder))

    def _resumable(self) -> list[int]:
        return steps_in(self._checkpoints, PART)

    def _folder(self, step: int) -> Path:
        return step_folder(self._checkpoints, step) / PART

    def _weights_folder(self, step: int) -> Path:
        return step_folder(self._weights, step)


def _random_file(rank: int) -> str:
    return f"random_{rank:05d}.safetensors"
