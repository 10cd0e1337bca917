"""What vLLM's workers do for weight versions: stage, receive, apply. `worker_extension_cls` mixes it into the worker.

Every method is called between two steps of the engine and returns soon; long work runs on a thread. All names begin
with `meshrl_`, since the class shares its namespace with the worker's own.
"""

from __future__ import annotations

import gc
import pickle
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from loguru import logger
from numpy.typing import NDArray

from meshrl.core.config.shared import ModelConfig
from meshrl.core.orphans import end_with_parent
from meshrl.inference.sizing import GIB
from meshrl.inference.vllm.adapters import AdapterParts, AdapterRest, Part
from meshrl.inference.vllm.file_reader import Named, PortionReader
from meshrl.inference.vllm.jobs import Job, JobOutcome
from meshrl.inference.vllm.layers.routers import register
from meshrl.inference.vllm.shadow import ParameterShadow, Weights, WorkerShadow, build_shadow, tested_shadow
from meshrl.models.folder import as_in_files, renamed_in_layers
from meshrl.models.load import ModelError, empty_model
from meshrl.versions.collective.broadcasting import Receiver
from meshrl.versions.placement import PartDigests, PlacementTracer, WeightPlacement
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.types import JoinGroup, Manifest, VersionKind
from meshrl.wire.values import JsonObject

if TYPE_CHECKING:
    from vllm.v1.worker.worker_base import WorkerBase

APPLY_WAIT_S = 30.0
PATCH_THREADS = 8  # that decompress a delta

WorkerPhase = tuple[str, float, float]
"""Of a worker's start: its name, its begin and its end, of time.time()."""

register()  # before the model is built: vLLM imports this module first


class WeightsExtension:
    """Paths and plain values in, and pickled manifests; plain values out.

    As JSON a manifest of 400 tensors takes 4 ms at either end. Only this worker's own engine calls, over vLLM's channel
    to its workers, which pickles all that it carries.
    """

    _meshrl_shadow: WorkerShadow | None = None  # `gpu_worker` builds it before vLLM measures its room
    _meshrl_phases: Sequence[WorkerPhase] = ()

    def meshrl_open(self, ends: str) -> dict[str, Any]:
        """Builds the shadow; once, before requests come. Returns a description and `WorkerPhase`s, or {"reason",
        "message"}.

        An engine of adapters has none: its weights never change. `ends`: the `JobEnds.address` for the ends of jobs.
        """
        end_with_parent()  # else a worker outlives its killed engine by 17 s, with the model in the GPU's memory
        self._meshrl_ends = ends
        self._meshrl_job: Job | None = None
        self._meshrl_receiver: Receiver | None = None
        self._meshrl_staged: int | None = None
        self._meshrl_loading: dict[int, AdapterParts] = {}
        self._meshrl_dropped: dict[int, AdapterRest] = {}
        self._meshrl_placement: WeightPlacement | None = None
        self._meshrl_tracer: PlacementTracer | None = None
        self._meshrl_loaded: WorkerShadow | None = None  # what vLLM has loaded a version into
        self._meshrl_missing: set[str] | None = None  # tensors of a version that is copied, until they come
        self._meshrl_found: PartDigests = {}
        worker = self._meshrl_worker
        if self._meshrl_device().type == "cpu":
            # vLLM's attention in bfloat16 uses AMX where the processor has it. Without the kernel's leave for this
            # process the first request would end it with SIGILL.
            torch.cpu._init_amx()
        free = f", {self.meshrl_free_bytes() / GIB:.2f} GiB are free" if self._meshrl_device().type == "cuda" else ""
        device = f"{worker.device}{free}"
        if worker.vllm_config.lora_config is not None:
            return {"shadow": "adapters", "device": device, "phases": self._meshrl_phases}
        try:
            self._meshrl_shadow, self._meshrl_in_place = tested_shadow(worker, self._meshrl_first_shadow())
            config = worker.vllm_config.model_config
            model = ModelConfig(name=config.model, trust_remote_code=config.trust_remote_code, device="cpu")
            outline = empty_model(model, dtype=config.dtype)
        except (RuntimeError, ValueError, ModelError) as error:  # torch's and vLLM's own, too
            text = f"vLLM cannot take weight versions of this model: {error}"
            return {"reason": Reason.NOT_SUPPORTED.name, "message": text}
        self._meshrl_outline = outline if renamed_in_layers(outline) else None
        self._meshrl_reader = PortionReader(self._meshrl_device())
        shadow = type(self._meshrl_shadow).__name__
        return {"shadow": shadow, "device": device, "phases": self._meshrl_phases}

    def meshrl_open_adapter(self, number: int, folder: str) -> bool:
        """Begins to load an adapter under this number, which no other has."""
        manager = self._meshrl_worker.model_runner.lora_manager
        self._meshrl_loading[number] = AdapterParts(manager, number, Path(folder), self._meshrl_device())
        return True

    def meshrl_load_adapter(self, number: int, part: Part, last: bool) -> float:
        """vLLM has it with the last part. Returns the seconds it took."""
        began_s = time.perf_counter()
        self._meshrl_loading[number].load(part, last=last)
        if last:
            del self._meshrl_loading[number]
        return time.perf_counter() - began_s

    def meshrl_drop_adapter(self, number: int) -> int:
        """Forgets an adapter that was opened, or that vLLM has; returns how many of its layers are left for further
        calls."""
        if (loading := self._meshrl_loading.pop(number, None)) is not None:
            loading.close()
        if number not in self._meshrl_dropped:
            self._meshrl_dropped[number] = AdapterRest(self._meshrl_worker.model_runner.lora_manager, number)
        left = self._meshrl_dropped[number].free()
        if not left:
            del self._meshrl_dropped[number]
        return left

    def meshrl_stage(self, version: int, files: Sequence[str]) -> None:
        shadow = self._meshrl_ready_shadow()

        def work() -> None:
            add = self._meshrl_begin(shadow)
            for path in files:
                for tensors in self._meshrl_reader.portions(Path(path)):
                    add(tensors)
            self._meshrl_finish(shadow, version)
            logger.debug("version {} is staged; {:.2f} GiB are free", version, self.meshrl_free_bytes() / GIB)

        self._meshrl_start(work, f"staging version {version}")

    def meshrl_receive(self, pickled: bytes, stall_s: float) -> None:
        manifest: Manifest = pickle.loads(pickled)
        receiver, shadow = self._meshrl_receiver, self._meshrl_ready_shadow()

        def work() -> None:
            if receiver is None:
                raise MeshError(Reason.GROUP_BROKEN, "this worker is in no group")
            if manifest.kind is VersionKind.DELTA:
                delta = receiver.receive_delta(manifest, stall_s=stall_s)
                self._meshrl_patched(manifest, delta, shadow, onto_staged=False)
                return
            if not isinstance(shadow, ParameterShadow) or not receiver.knows_parts:
                if receiver.is_scattered:  # the shadow was built anew since, where there was no room for parameters
                    receiver.abort()
                    text = "this worker has no parameters of its own for parts of a version"
                    raise MeshError(Reason.GROUP_BROKEN, text)
                times = receiver.receive(manifest, self._meshrl_begin(shadow), stall_s=stall_s)
                self._meshrl_finish(shadow, manifest.version)
                logger.debug("version {} came through the group: {}", manifest.version, times)
                return
            if self._meshrl_loaded is not shadow:  # what vLLM has filled without a version's tensors is in none
                shadow.begin_as_live()
                self._meshrl_loaded = shadow
            times, self._meshrl_found = receiver.receive_held(manifest, shadow.parameters, stall_s=stall_s)
            self._meshrl_staged = manifest.version
            logger.debug("version {} came through the group: {}", manifest.version, times)

        self._meshrl_start(work, f"receiving version {manifest.version}")

    def meshrl_patch(self, pickled: bytes, delta: str, onto_staged: bool) -> None:
        """Starts the work of `Engine.patch`."""
        manifest: Manifest = pickle.loads(pickled)
        shadow = self._meshrl_ready_shadow()

        def work() -> None:
            self._meshrl_patched(manifest, np.fromfile(delta, dtype=np.uint8), shadow, onto_staged=onto_staged)

        self._meshrl_start(work, f"patching version {manifest.version}")

    def _meshrl_patched(
        self, manifest: Manifest, delta: NDArray[np.uint8], shadow: WorkerShadow, *, onto_staged: bool
    ) -> None:
        placement = self._meshrl_placement
        if placement is None or not isinstance(shadow, ParameterShadow):
            raise MeshError(Reason.NOT_SUPPORTED, "where a version's weights lie in vLLM's own was not seen")
        if not onto_staged:
            shadow.begin_as_live()
        parameters = shadow.parameters
        try:
            placement.patch(manifest, delta, parameters, PATCH_THREADS)
            self._meshrl_found = placement.digests(parameters)
        except RuntimeError as error:  # torch's, such as for a full device: versions then come another way
            raise MeshError(Reason.NOT_SUPPORTED, f"a delta is not applied here: {error}") from error
        self._meshrl_staged = manifest.version

    def meshrl_outcome(self) -> JobOutcome | None:
        """None while the last job runs; `parts` are those that a patch, or a scattered version, has made."""
        job = self._meshrl_job
        if job is None:
            return {"seconds": 0.0}
        return None if job.outcome is None else {**job.outcome, "parts": self._meshrl_found}

    def meshrl_apply(self, version: int) -> float:
        if self._meshrl_job is not None:
            # The engine asks only one of its data-parallel parts whether it is done.
            self._meshrl_job.join(APPLY_WAIT_S)
        if self._meshrl_staged != version or self._meshrl_shadow is None:
            raise RuntimeError(f"version {version} is not staged here, but {self._meshrl_staged}")
        began_s = time.perf_counter()
        self._meshrl_staged = None
        self._meshrl_shadow.apply()
        if self._meshrl_device().type == "cuda":
            torch.cuda.synchronize(self._meshrl_device())
        return time.perf_counter() - began_s

    def meshrl_sleep(self) -> int:
        """Drops the shadow, which vLLM's sleep does not know of and the next version builds anew; returns the bytes of
        the device that were free before."""
        free_bytes, job = self.meshrl_free_bytes(), self._meshrl_job
        if job is not None and not job.join(APPLY_WAIT_S):
            raise RuntimeError("the weight job before does not end")
        self._meshrl_shadow = self._meshrl_staged = self._meshrl_job = self._meshrl_loaded = None
        gc.collect()
        if self._meshrl_device().type == "cuda":
            torch.cuda.empty_cache()
        return free_bytes

    def meshrl_free_bytes(self) -> int:
        device = self._meshrl_device()
        return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else 0

    def meshrl_join(self, group: JsonObject) -> None:
        """Starts to join a group, in which the engine's workers follow each other."""
        self.meshrl_leave()
        worker = self._meshrl_worker
        parallel = worker.vllm_config.parallel_config
        index, joined = parallel.data_parallel_index * parallel.world_size + worker.rank, JoinGroup(**group)

        def work() -> None:
            self._meshrl_receiver = Receiver.join(
                joined, index=index, device=self._meshrl_device(), placement=self._meshrl_offered
            )

        self._meshrl_start(work, f"joining group {joined.generation}")

    def meshrl_leave(self) -> None:
        receiver, self._meshrl_receiver = self._meshrl_receiver, None
        if receiver is not None:
            receiver.abort()
            if self._meshrl_job is not None:
                self._meshrl_job.join(5.0)
            receiver.close()

    def _meshrl_begin(self, shadow: WorkerShadow) -> Callable[[Named], None]:
        """vLLM loads the first version in full, which shows where weights lie: later ones are copied there."""
        placement, tracer = self._meshrl_placement, None
        if isinstance(shadow, ParameterShadow):
            if placement is not None and self._meshrl_loaded is shadow:
                missing = self._meshrl_missing = set(placement.tensors)
                parameters = shadow.parameters

                def copy(tensors: Named) -> None:
                    placement.fill(tensors, parameters)
                    missing.difference_update(name for name, _ in tensors)

                return copy
            if placement is None:
                tracer = PlacementTracer(shadow.parameters)
        self._meshrl_missing, self._meshrl_tracer = None, tracer
        shadow.begin()

        def load(tensors: Named) -> None:
            with nullcontext() if tracer is None else tracer.sources(tensors):
                shadow.add(self._meshrl_known(tensors))

        return load

    def _meshrl_finish(self, shadow: WorkerShadow, version: int) -> None:
        if self._meshrl_missing is None:
            shadow.finish()
            self._meshrl_loaded = shadow
            if (tracer := self._meshrl_tracer) is not None:
                self._meshrl_placement, self._meshrl_tracer = tracer.placement(), None
                if tracer.obstacle:
                    logger.info("this worker takes versions in full, and no deltas: {}", tracer.obstacle)
                self._meshrl_offer()
        elif self._meshrl_missing:
            raise ValueError(f"{len(self._meshrl_missing)} tensors did not come, first {min(self._meshrl_missing)!r}")
        self._meshrl_staged = version

    @property
    def _meshrl_offered(self) -> WeightPlacement | None:
        """Of data-parallel copies the engine would see the digests of one: each of their workers checks a version."""
        copies = self._meshrl_worker.vllm_config.parallel_config.data_parallel_size
        return self._meshrl_placement if copies == 1 else None

    def _meshrl_offer(self) -> None:
        if self._meshrl_receiver is not None and self._meshrl_offered is not None:
            try:
                self._meshrl_receiver.offer(self._meshrl_offered)
            except RuntimeError as error:  # the store is gone, and its group with it; the version here is whole
                logger.info("the trainer's store takes no offer, and versions come in full: {}", error)

    def _meshrl_known(self, tensors: Weights) -> Weights:
        """A version's tensors by names that vLLM's model loads: those of files, if these differ in layers."""
        return tensors if self._meshrl_outline is None else as_in_files(self._meshrl_outline, dict(tensors)).items()

    def _meshrl_first_shadow(self) -> WorkerShadow:
        built, self._meshrl_shadow = self._meshrl_shadow, None
        return built or build_shadow(self)

    def _meshrl_ready_shadow(self) -> WorkerShadow:
        """Built here and not on the job's thread: building one sets defaults of the whole process."""
        if self._meshrl_shadow is None:
            self._meshrl_shadow = build_shadow(self, in_place=self._meshrl_in_place)
        return self._meshrl_shadow

    def _meshrl_start(self, work: Callable[[], None], doing: str) -> None:
        def alone() -> None:
            self._meshrl_staged, self._meshrl_found = None, {}  # what the job before staged is overwritten from here on
            work()

        self._meshrl_staged = None
        self._meshrl_job = Job(
            alone, self._meshrl_device(), after=self._meshrl_job, doing=doing, ends=self._meshrl_ends
        )

    def _meshrl_device(self) -> torch.device:
        return torch.device(self._meshrl_worker.device)

    @property
    def _meshrl_worker(self) -> WorkerBase:
        worker: WorkerBase = self
        return worker
