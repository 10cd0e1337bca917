"""One rank of `sft`: reads the data, fine-tunes with the other ranks, and leaves a Hugging Face folder."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence

import torch
from loguru import logger
from transformers.utils.logging import disable_progress_bar

from meshrl.algorithms.losses import cross_entropy_loss
from meshrl.algorithms.objective import Objective
from meshrl.core.config import dump_toml
from meshrl.core.config.shared import log_extras_of
from meshrl.core.orphans import Lifeline
from meshrl.core.paths import Layout
from meshrl.core.private_folders import short_socket_paths
from meshrl.core.program import exit_code_of, leave, raise_open_file_limit
from meshrl.core.telemetry.monitor import Monitor
from meshrl.core.telemetry.sinks import open_monitor
from meshrl.models.load import ModelError, resolve_device, resolve_dtype
from meshrl.sft.config import SFTConfig
from meshrl.sft.data.batches import DataProgress
from meshrl.sft.data.check import DataCheck, check_data
from meshrl.sft.data.conversations import DataError
from meshrl.sft.data.feed import Feed
from meshrl.sft.data.rendering import load_sft_tokenizer
from meshrl.sft.extras import Extras
from meshrl.sft.loop import SFTLoop
from meshrl.training.auto_settings import choose_layout, resolve_auto
from meshrl.training.build import build_learner
from meshrl.training.checkpoints.checkpointer import Checkpointer, CheckpointError
from meshrl.training.checkpoints.weights_folder import separate_adapters
from meshrl.training.learner import Learner, StepError, UpdateError
from meshrl.training.memory_estimate import check_fits, check_has_device
from meshrl.training.parallel.rank_group import RankGroup
from meshrl.training.run_state import RunState


def run_rank(config: SFTConfig, rank: int) -> None:
    disable_progress_bar()  # a log has no use for it
    code = 0
    try:
        raise_open_file_limit()
        if rank == 0:
            dump_toml(config, Layout(config.output_dir).config("sft"))
        device = resolve_device(config.model.device)
        check_has_device(device, os.environ)
        try:
            row_tokens = config.data.seq_len * config.data.micro_batch_size
            layout = choose_layout(config.model, os.environ, seq_len=row_tokens)
            parallel = RankGroup.start(os.environ, device=device, **layout)
        except ValueError as error:
            raise ModelError(str(error)) from error
        lifeline = Lifeline.tie(parallel, os.environ)
        signals: list[str] = []
        for signum in (signal.SIGTERM, signal.SIGINT):  # only now: a rank that waits for others ends at once
            signal.signal(signum, lambda number, _: signals.append(signal.Signals(number).name))
        with short_socket_paths():  # for the processes that tokenize
            train(config, signals, parallel)
        parallel.barrier()
        lifeline.release()
        parallel.close()
    except Exception as error:  # noqa: BLE001  # last stop of the process, and the group ends with it
        told = (ModelError, DataError, CheckpointError, StepError, UpdateError)
        code = exit_code_of(error, told=told, defect="sft failed")
    leave(code)


def train(config: SFTConfig, signals: Sequence[str], parallel: RankGroup) -> None:
    """The program between joining the group and leaving it, on every rank. It ends early, with its weights saved, after
    the step in which a signal's name comes into `signals`.

    Raises ModelError, DataError, CheckpointError, StepError or UpdateError.
    """
    layout = Layout(config.output_dir)
    torch.manual_seed(config.seed)
    if config.torch_threads is not None:
        torch.set_num_threads(config.torch_threads)
    tokenizer = load_sft_tokenizer(config.text)
    checks: list[DataCheck] = []
    if parallel.plan.leads:
        checks = check_data(config.text, config.data, show=config.show_rows, validated=config.validated)
        for line in (line for check in checks for line in check.lines()):
            logger.info("{}", line)
    learner, run = _build(config, parallel)
    checkpointer = Checkpointer(
        learner,
        run,
        config.output_dir,
        tokenizer=tokenizer,
        seed=config.seed,
        snapshot_dtype=resolve_dtype(config.model),
        base=config.model,
        adapters_of=separate_adapters(config.ckpt, config.model),
    )
    if config.ckpt is not None and config.ckpt.resume_step is not None:
        logger.info("resumed from step {}", checkpointer.restore(config.ckpt.resume_step))
    saved = checkpointer.progress.data
    unused = frozenset[str]().union(*(check.unused for check in checks))
    feed = Feed(
        config.text,
        config.data,
        parallel,
        vocab_size=int(learner.model.config.get_text_config().vocab_size),
        validated=config.validated,
        unused=unused,
    )
    monitor = Monitor([])
    if parallel.plan.leads:
        monitor = open_monitor(layout, config.log, config.wandb, config.model_dump(mode="json"))
    try:
        feed.start(DataProgress.from_json(saved) if saved else None, steps_done=run.step_done)
        log_extras = log_extras_of(config.wandb, config.log)
        loop = SFTLoop(
            learner,
            run,
            feed,
            monitor,
            checkpointer,
            max_steps=config.max_steps,
            ckpt=config.ckpt,
            validation_interval=config.val.interval if config.val else None,
            extras=None if log_extras is None else Extras(log_extras, tokenizer, config.data.name),
        )
        folder = loop.run(signals)
        logger.success("weights after step {} are in {}", run.step_done, folder)
    finally:
        feed.close()
        monitor.close()


def _build(config: SFTConfig, parallel: RankGroup) -> tuple[Learner, RunState]:
    try:
        check_fits(config.model, config.optim, parallel)
        model, logits_bytes = resolve_auto(
            config.model,
            config.optim,
            parallel,
            seq_len=config.data.seq_len * config.data.micro_batch_size,
            max_logits_mib=config.max_logits_mib,
        )
        learner = build_learner(
            model, parallel=parallel, seed=config.seed, seq_len=config.data.seq_len, max_logits_bytes=logits_bytes
        )
        run = RunState.of(
            learner.model,
            objective=Objective(loss=cross_entropy_loss, name="cross_entropy"),
            optim=config.optim,
            scheduler=config.scheduler,
            max_steps=config.max_steps,
            optim_cpu_offload=model.optim_cpu_offload,
        )
    except (ValueError, torch.OutOfMemoryError) as error:  # what other settings mend
        raise ModelError(str(error)) from error
    return learner, run
