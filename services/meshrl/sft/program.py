"""One rank of `sft`: fine-tunes, and leaves a Hugging Face folder."""

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
from meshrl.core.paths import Layout
from meshrl.core.private_folders import short_socket_paths
from meshrl.core.program import draining_signals, exit_code_of, leave, raise_open_file_limit
from meshrl.core.telemetry.monitor import Monitor
from meshrl.core.telemetry.sinks import open_monitor
from meshrl.models.load import ModelError
from meshrl.sft.config import SFTConfig
from meshrl.sft.data.batches import DataProgress
from meshrl.sft.data.check import DataCheck, check_data
from meshrl.sft.data.conversations import DataError
from meshrl.sft.data.feed import Feed
from meshrl.sft.data.rendering import load_sft_tokenizer
from meshrl.sft.extras import Extras
from meshrl.sft.loop import FINAL, SFTLoop
from meshrl.training.bench.run import bench_program
from meshrl.training.checkpoints.checkpointer import CheckpointError
from meshrl.training.learner import StepError, UpdateError
from meshrl.training.parallel.lifeline import Lifeline
from meshrl.training.parallel.rank_group import RankGroup
from meshrl.training.start import join_group, load_run, open_checkpoints


def run_rank(config: SFTConfig, rank: int) -> None:
    disable_progress_bar()  # a log has no use for it
    if config.bench is not None:
        bench = config.data.shape_of(config.bench, ranks=int(os.environ.get("WORLD_SIZE", "1")))
        bench_program(config, bench, objective=_objective, seq_len=config.data.seq_len)
        return
    code = 0
    try:
        raise_open_file_limit()
        if rank == 0:
            dump_toml(config, Layout(config.output_dir).config("sft"))
        try:
            parallel = join_group(config, os.environ, row_tokens=config.data.row_tokens)
        except ValueError as error:
            raise ModelError(str(error)) from error
        lifeline = Lifeline.tie(parallel, os.environ)
        signals: list[str] = []
        for signum in draining_signals():  # only now: a rank that waits for others ends at once
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


def _objective() -> Objective:
    return Objective(loss=cross_entropy_loss)


def train(config: SFTConfig, signals: Sequence[str], parallel: RankGroup) -> None:
    """`signals` end it early. Raises ModelError, DataError, CheckpointError, StepError or UpdateError."""
    layout = Layout(config.output_dir)
    tokenizer = load_sft_tokenizer(config.text)
    checks: list[DataCheck] = []
    if parallel.plan.leads:
        checks = check_data(config.text, config.data, show=config.show_rows, validated=config.validated)
        for line in (line for check in checks for line in check.lines()):
            logger.info("{}", line)
        for doubt in config.doubts():
            logger.warning("{}", doubt)
    try:
        learner, run, _ = load_run(
            config,
            parallel,
            _objective(),
            row_tokens=config.data.row_tokens,
            seq_len=config.data.seq_len,
        )
    except (ValueError, torch.OutOfMemoryError) as error:  # what other settings mend
        raise ModelError(str(error)) from error
    checkpointer = open_checkpoints(config, learner, run, tokenizer)
    if parallel.plan.leads:
        (layout.weights / FINAL).unlink(missing_ok=True)  # until the run ends: what it names may be set aside or pruned
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
