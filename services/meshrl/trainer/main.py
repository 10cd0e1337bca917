"""The `trainer` program: a model and its learner, the service in front of it and the hub behind it, start to drain."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from collections.abc import Coroutine, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from loguru import logger
from opentelemetry import trace
from transformers import PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from meshrl.algorithms.losses import Loss, aipo_loss, dppo_kl_loss
from meshrl.client import WeightSyncClient
from meshrl.core.config import ConfigError, load_config
from meshrl.core.logs import setup_logging
from meshrl.core.paths import Layout
from meshrl.core.serve import GrpcServer, run
from meshrl.core.telemetry import setup_tracing
from meshrl.models.load import ModelError, load_model, load_tokenizer, resolve_dtype
from meshrl.models.state import snapshot
from meshrl.trainer.config import LossConfig, TrainerConfig
from meshrl.trainer.desk import TrainerDesk
from meshrl.trainer.loop import TrainLoop
from meshrl.trainer.publisher import Publisher, next_epoch
from meshrl.trainer.service import TrainerFacts, TrainerServicer
from meshrl.trainer.spans import StepSpans
from meshrl.trainer.steps import StepBook
from meshrl.training.checkpoint import Checkpointer, CheckpointError
from meshrl.training.learner import Learner
from meshrl.training.parallel import ParallelContext
from meshrl.v1.trainer_pb2_grpc import add_TrainerServiceServicer_to_server
from meshrl.wire.errors import MeshError
from meshrl.wire.types import Transport

SERVICE = "meshrl.v1.TrainerService"
DRAIN_GRACE_S = 5.0
BYTES_PER_TOKEN = 64  # of a micro-batch message, with room for the ids and traces of its samples


@dataclass(frozen=True, kw_only=True)
class TrainerParts:
    """What the training thread works with."""

    learner: Learner
    checkpointer: Checkpointer
    compute_dtype: torch.dtype
    parallel: ParallelContext


def build_loss(config: LossConfig) -> Loss:
    """The configured loss as a function of its inputs."""
    losses: Mapping[str, Loss] = {
        "default": partial(
            dppo_kl_loss,
            mask_low=config.dppo_mask_low,
            mask_high=config.dppo_mask_high,
            adv_tau=config.adv_tau,
            kl_tau=config.kl_tau,
        ),
        "aipo": partial(aipo_loss, delta=config.delta),
    }
    return losses[config.type]


def build_parts(config: TrainerConfig, environment: Mapping[str, str]) -> TrainerParts:
    """Loads the model and, when asked to resume, its checkpoint. Raises ConfigError."""
    if config.torch_threads is not None:
        torch.set_num_threads(config.torch_threads)
    torch.manual_seed(config.seed)
    try:
        parallel = ParallelContext.from_environment(environment)
        compute_dtype = resolve_dtype(config.model)
        learner = Learner(
            load_model(config.model, dtype=torch.float32),  # master weights; small updates drown in bfloat16
            loss=build_loss(config.loss),
            optim=config.optim,
            scheduler=config.scheduler,
            max_steps=config.max_steps,
            compute_dtype=compute_dtype,
            max_logits_bytes=config.max_logits_mib * 2**20,
            parallel=parallel,
        )
        checkpointer = Checkpointer(learner, config.output_dir, tokenizer=_tokenizer(config))
        if config.ckpt is not None and config.ckpt.resume_step is not None:
            logger.info("resumed from the checkpoint of step {}", checkpointer.restore(config.ckpt.resume_step))
    except (ModelError, CheckpointError, ValueError) as error:  # what a changed configuration mends
        raise ConfigError(str(error)) from error
    return TrainerParts(learner=learner, checkpointer=checkpointer, compute_dtype=compute_dtype, parallel=parallel)


def _tokenizer(config: TrainerConfig) -> PreTrainedTokenizerBase | None:
    """The tokenizer, which only snapshots need: without one they hold the model alone."""
    try:
        return load_tokenizer(config.model)
    except ModelError as error:
        logger.warning("weight snapshots will come without a tokenizer: {}", error)
        return None


async def serve(config: TrainerConfig, stop: asyncio.Event, tracer: trace.Tracer) -> int:
    """Trains until `stop` is set, a client drains the trainer, or the trainer cannot go on; returns the exit code."""
    parts = await asyncio.to_thread(build_parts, config, os.environ)
    learner = parts.learner
    epoch = await asyncio.to_thread(next_epoch, config.output_dir / "trainer_epoch")
    desk = TrainerDesk(
        StepBook(
            run_id=config.run_id,
            epoch=epoch,
            start_step=learner.step_done,
            max_queued=config.max_queued_batches,
            max_steps=config.max_steps,
            history_events=config.history_events,
        )
    )
    max_message_bytes = max(4 * 2**20, config.seq_len * BYTES_PER_TOKEN)
    server = GrpcServer(config.server, max_message_bytes=max_message_bytes, tracer=tracer)
    servicer = TrainerServicer(desk, facts(config, parts), on_drained=stop.set)
    server.add(SERVICE, add_TrainerServiceServicer_to_server, servicer)
    port = await server.start()
    async with WeightSyncClient(config.weight_broadcast.address) as hub:
        publisher = Publisher(
            hub,
            run_id=config.run_id,
            epoch=epoch,
            transport=Transport(config.weight_broadcast.type),
            broadcast_dir=broadcast_dir(config),
            chunk_bytes=config.weight_broadcast.chunk_bytes,
        )
        initial = snapshot(learner.model, parts.compute_dtype)
        try:
            if not await _before(stop, _publish_when_hub_is_up(publisher, learner.step_done, initial, config)):
                return 0
            training = start_training(config, parts, desk, publisher, tracer)
            server.set_serving()
            logger.info(
                "trainer: run {!r} at version {} (epoch {}), serving TrainerService at {}:{}",
                config.run_id, learner.step_done, epoch, config.server.host, port,
            )  # fmt: skip
            return await _until_drained(config, desk, server, training, stop)
        finally:
            desk.close()
            await server.drain(DRAIN_GRACE_S)


def start_training(
    config: TrainerConfig, parts: TrainerParts, desk: TrainerDesk, publisher: Publisher, tracer: trace.Tracer
) -> asyncio.Future[None]:
    """Starts the training thread; the future ends with it, with the error that ended it."""
    loop = asyncio.get_running_loop()

    def publish(version: int, weights: Mapping[str, torch.Tensor], traceparent: str) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(publisher.publish(version, weights, traceparent), loop)

    train_loop = TrainLoop(
        parts.learner,
        desk,
        publish,
        parts.checkpointer,
        StepSpans(tracer),
        publish_dtype=parts.compute_dtype,
        ckpt=config.ckpt,
        publish_deadline_s=config.publish_deadline_s,
    )
    ended: Future[None] = Future()

    def work() -> None:
        try:
            if config.torch_threads is not None:
                torch.set_num_threads(config.torch_threads)  # OpenMP keeps the number per thread
            train_loop.run()
        except BaseException as error:  # noqa: BLE001  # the event loop raises it where it waits for this thread
            ended.set_exception(error)
        else:
            ended.set_result(None)

    # A daemon: a step that hangs in a kernel must not keep a process alive that was told to end.
    threading.Thread(target=work, name="training", daemon=True).start()
    return asyncio.wrap_future(ended, loop=loop)


async def _until_drained(
    config: TrainerConfig, desk: TrainerDesk, server: GrpcServer, training: asyncio.Future[None], stop: asyncio.Event
) -> int:
    """Waits for an end, then finishes what is queued, writes the last checkpoint and lets watchers hear of it."""
    stopping = asyncio.create_task(stop.wait())
    ends: set[asyncio.Future[Any]] = {stopping, training}
    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    server.set_not_serving()
    code = 0
    try:
        async with asyncio.timeout(config.drain_deadline_s):
            await desk.drain()
    except TimeoutError:  # the orchestrator will see these steps unfinished and submit them to the next trainer
        logger.error("batches still queued after {} s (drain_deadline_s) are given up", config.drain_deadline_s)
        code = 1
    desk.close()
    try:
        async with asyncio.timeout(config.drain_deadline_s):
            await training
    except TimeoutError:
        logger.error("the step at hand did not end within {} s (drain_deadline_s)", config.drain_deadline_s)
        return 1
    except Exception as error:  # noqa: BLE001  # whatever ended the training thread is the program's exit code
        logger.opt(exception=error).error("training ended: {}", error)
        return 1
    logger.info("trainer: finished at version {}", desk.book.info().version)
    return code


async def _publish_when_hub_is_up(
    publisher: Publisher, version: int, weights: Mapping[str, torch.Tensor], config: TrainerConfig
) -> None:
    """Publishes the version the trainer starts with. Programs start in any order, so a hub that is away may come."""
    deadline = time.monotonic() + config.hub_deadline_s
    while True:
        try:
            await publisher.publish(version, weights)
        except MeshError as error:
            if not error.retryable or time.monotonic() > deadline:
                raise
            logger.warning("no hub at {} yet: {}", config.weight_broadcast.address, error)
            await asyncio.sleep(1.0)
        else:
            return


async def _before(stop: asyncio.Event, work: Coroutine[Any, Any, None]) -> bool:
    """Runs `work` unless `stop` comes first; says whether it was done."""
    stopping = asyncio.create_task(stop.wait())
    working = asyncio.create_task(work)
    try:
        await asyncio.wait({stopping, working}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
        return working.done()
    finally:
        stopping.cancel()
        working.cancel()


def facts(config: TrainerConfig, parts: TrainerParts) -> TrainerFacts:
    """What GetTrainer says and batches are held against."""
    return TrainerFacts(
        world_size=parts.parallel.world_size,
        dp_size=parts.parallel.dp_size,
        seq_len=config.seq_len,
        vocab_size=int(parts.learner.model.config.get_text_config().vocab_size),
        objective=config.loss.type,
        model=config.model.name,
        max_queued_batches=config.max_queued_batches,
        max_concurrent_runs=config.max_concurrent_runs,
    )


def broadcast_dir(config: TrainerConfig) -> Path:
    """Folder for the files of versions."""
    configured = config.weight_broadcast.broadcast_dir
    return Path(configured) if configured else Layout(config.output_dir).broadcasts


def main() -> None:
    """Console script `trainer`."""
    config = load_config(TrainerConfig, prog="trainer")
    layout = Layout(config.output_dir)
    setup_logging("trainer", config.log.level, layout.log("trainer"), json_logging=config.log.json_logging)
    disable_progress_bar()  # a log has no use for it
    tracing = setup_tracing("trainer", layout.traces)
    code = run(lambda stop: serve(config, stop, tracing))
    tracing.close()
    sys.exit(code)


if __name__ == "__main__":
    main()


if __name__ == "__main__":
    main()
