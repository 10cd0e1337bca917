"""One rank of the trainer: rank 0 serves TrainerService, trains and publishes; the others carry out its commands."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch
from loguru import logger
from opentelemetry import trace
from transformers.utils.logging import disable_progress_bar

from meshrl.client import WeightSyncClient
from meshrl.client.trust import Role
from meshrl.core.config import ConfigError
from meshrl.core.credentials.identity import as_member
from meshrl.core.heap import freeze_loaded
from meshrl.core.paths import Layout
from meshrl.core.program import exit_code_of, leave, run_traced, say_ready
from meshrl.core.rpc.serve import GrpcServer
from meshrl.core.telemetry.start import start_of
from meshrl.core.telemetry.waits import waits_of
from meshrl.core.waiting import StoppedError, stop_or_first, unless_stopped
from meshrl.trainer.build import build_parts, min_shared_prefix, replayed_shape
from meshrl.trainer.config import TrainerConfig
from meshrl.trainer.loop import Joining, TrainerLoop
from meshrl.trainer.loss_config import CONSTANTS
from meshrl.trainer.objectives import build_objective
from meshrl.trainer.opening import RunOpener
from meshrl.trainer.publishing.build import PublishOptions, decide
from meshrl.trainer.publishing.publisher import next_epoch
from meshrl.trainer.ranks.commands import CommandSender
from meshrl.trainer.ranks.rank_runs import RunMaker
from meshrl.trainer.ranks.thread import TrainingThread
from meshrl.trainer.ranks.worker import RankWorker
from meshrl.trainer.runs.discovery import Discovery
from meshrl.trainer.runs.hooks import RunHooks, RunHooksConfig
from meshrl.trainer.runs.host import RunHost
from meshrl.trainer.runs.quotas import Quotas
from meshrl.trainer.runs.steps import StepBook
from meshrl.trainer.runs.table import RunTable
from meshrl.trainer.service import TrainerServicer, max_message_bytes
from meshrl.training.bench.run import bench_program
from meshrl.training.checkpoints.checkpointer import CheckpointError
from meshrl.training.learner import Learner, UpdateError
from meshrl.training.memory_estimate import available_bytes
from meshrl.v1.trainer_pb2_grpc import add_TrainerServiceServicer_to_server
from meshrl.wire.types import TrainerInfo

SERVICE = "meshrl.v1.TrainerService"
DRAIN_GRACE_S = 5.0
MAX_ADAPTER_RANK = 1024  # no limit but memory; a rank as large as a layer is no adapter


def run_rank(config: TrainerConfig, rank: int) -> None:
    disable_progress_bar()  # a log has no use for it
    if config.bench is not None:
        objective = partial(build_objective, config.loss)
        bench_program(config, config.bench, objective=objective, seq_len=config.seq_len)
        return
    if rank == 0:
        leave(run_traced("trainer", config, as_member(Role.PUBLISHER, serve)))
    code = 0
    try:
        parts = build_parts(config, os.environ)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun sends it to all ranks: rank 0 says when to stop
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        RankWorker(  # until rank 0 sends StopCommand
            parts.learner,
            parts.own,
            maker=run_maker(parts.learner, config.model.name, config.output_dir, config.run_hooks),
            publish_dtype=parts.compute_dtype,
            release=parts.release,
        ).run()
        parts.leave()
    except Exception as error:  # noqa: BLE001  # last stop of the process, and the group ends with it
        code = exit_code_of(error, told=(CheckpointError, UpdateError), defect="this rank failed")
    leave(code)


async def serve(config: TrainerConfig, stop: asyncio.Event, tracer: trace.Tracer) -> int:
    """Rank 0: trains until `stop` is set, a client drains the trainer, or an error ends it; returns the exit code."""
    with suppress(StoppedError):  # before there was anything to drain
        thread, waits = TrainingThread(), waits_of(tracer)
        loading = f"its model {config.model.name} to be loaded"
        with waits.waiting("start", loading), start_of(tracer).phase("model"):  # and its kernels
            parts = await unless_stopped(stop, thread.call(lambda: build_parts(config, os.environ)))
        epoch = await asyncio.to_thread(next_epoch, config.output_dir / "trainer_epoch")
        book = StepBook(
            run_id=config.run_id,
            epoch=epoch,
            start_step=parts.own.state.step_done,
            durable_step=parts.own.state.step_done,  # above 0 only when it came from a checkpoint
            max_queued=config.max_queued_batches,
            max_steps=config.max_steps,
            history_events=config.history_events,
            checkpoints=Layout(config.output_dir).checkpoints,
        )
        takes_runs = config.max_concurrent_runs > 1
        table = RunTable(book, held=True, complete=not takes_runs)
        learner, plan = parts.learner, parts.parallel.plan
        replayed = replayed_shape(config.enable_router_replay, learner.policy)
        info = TrainerInfo(
            world_size=plan.world_size,
            dp_size=plan.dp_size,
            seq_len=config.seq_len,
            pad_multiple=1,
            objective=config.loss.type,
            model=config.model.name,
            runs=(),
            max_runs=1 + config.max_concurrent_runs if takes_runs else 1,
            max_adapter_rank=MAX_ADAPTER_RANK if takes_runs else None,
            default_adapter=config.own_run.spec.adapter if takes_runs else None,
            max_queued_batches=config.max_queued_batches,
            vocab_size=int(learner.model.config.get_text_config().vocab_size),
            max_message_bytes=(largest := max_message_bytes(config.seq_len, replayed)),
            min_shared_prefix=min_shared_prefix(config.share_prefixes, learner.policy),
            router_replay=replayed,
            losses=tuple(name for name in CONSTANTS if name != "custom"),
        )
        server = GrpcServer(config.server, max_message_bytes=largest, tracer=tracer)
        quotas = await asyncio.to_thread(Quotas, config.output_dir / "runs" / "quotas.json")
        takes_prefixes = learner.policy.prefix_reason is None
        servicer = TrainerServicer(table, info, takes_prefixes=takes_prefixes, on_drained=stop.set, quotas=quotas)
        server.add(SERVICE, add_TrainerServiceServicer_to_server, servicer)
        address = f"{config.server.host}:{await server.start()}"
        waits.serves = (address,)
        async with WeightSyncClient(config.weight_broadcast.address) as hub:
            options = PublishOptions(
                model=config.model,
                broadcast=config.weight_broadcast,
                output_dir=config.output_dir,
                hub_deadline_s=config.hub_deadline_s,
                publish_deadline_s=config.publish_deadline_s,
            )
            commands, loop = CommandSender(parts.parallel), asyncio.get_running_loop()
            decided = asyncio.run_coroutine_threadsafe(decide(options, parts, hub, epoch, waits), loop)
            opener = RunOpener(parts, options, commands, hub, tracer, waits, max_failed_steps=config.max_failed_steps)
            settings = config.own_run
            with start_of(tracer).phase("engines"):
                opened = await unless_stopped(
                    stop, thread.call(lambda: opener.open_own(decided, table.own, settings, os.environ))
                )
            quantum = config.seq_len * plan.dp_size if takes_runs else None
            training_loop = TrainerLoop(
                table,
                opened.training,
                commands,
                quantum_tokens=quantum,
                joining=joining(config.join_rows, config.seq_len, learner.device),
                waits=waits,
                on_end=parts.leave,
            )
            maker, discovering = run_maker(learner, config.model.name, config.output_dir, config.run_hooks), None
            if takes_runs:
                servicer.host = RunHost(
                    table,
                    training_loop,
                    maker,
                    commands,
                    parts.own,
                    settings,
                    max_runs=config.max_concurrent_runs,
                    room_bytes=room_for_adapters(config.max_adapters_gib, learner.device),
                    history_events=config.history_events,
                    open_run=opener.open,
                )
            trained = thread.call(training_loop.run)
            try:
                with start_of(tracer).phase("version"):
                    await unless_stopped(stop, opened.first())
                freeze_loaded()
                table.own.open()
                if servicer.host is not None:
                    await servicer.host.bring_back()
                    table.complete = True
                    if config.discover_runs:
                        discovery = Discovery(servicer.host, maker.hooks, config.output_dir)
                        discovering = asyncio.create_task(discovery.follow())
                server.set_serving()
                say_ready(tracer)
                logger.info(
                    "trainer: run {!r} at version {} (epoch {}) on {} rank(s) ({}), serving TrainerService at {}",
                    config.run_id, parts.own.state.step_done, epoch, plan.world_size, plan.layout, address,
                )  # fmt: skip
                return await _until_drained(table, server, trained, stop, deadline_s=config.drain_deadline_s)
            finally:
                table.close()
                await server.drain(DRAIN_GRACE_S)
                await asyncio.wait({trained}, timeout=DRAIN_GRACE_S)  # which sends the other ranks StopCommand
                if discovering is not None:
                    discovering.cancel()
                if servicer.host is not None:
                    await servicer.host.close()
                await opened.close()
    return 0


def run_maker(learner: Learner, base_name: str, output_dir: Path, hooks: RunHooksConfig) -> RunMaker:
    """Raises ConfigError for hooks that cannot be called."""
    try:
        loaded = RunHooks(hooks)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return RunMaker(learner, output_dir, base_name=base_name, hooks=loaded)


def joining(join_rows: str, seq_len: int, device: torch.device) -> Joining | None:
    """By `trainer.join_rows`."""
    if join_rows == "never" or (join_rows == "auto" and device.type != "cuda"):
        return None
    return Joining(below=seq_len // 4 if join_rows == "auto" else seq_len, room=seq_len)


def room_for_adapters(max_gib: float | None, device: torch.device) -> int | None:
    """Bytes of a rank that added runs may take: `max_gib`, or half of the free memory; None if unknown."""
    if max_gib is not None:
        return int(max_gib * 2**30)
    free = available_bytes(device)
    return None if free is None else free // 2


async def _until_drained(
    table: RunTable,
    server: GrpcServer,
    trained: asyncio.Future[None],
    stop: asyncio.Event,
    *,
    deadline_s: float,
) -> int:
    await stop_or_first(stop, trained)
    server.set_not_serving()
    code = 0
    try:
        async with asyncio.timeout(deadline_s):
            await asyncio.gather(*(queue.drain() for queue in table))
    except TimeoutError:  # the orchestrator will see these steps unfinished and submit them to the next trainer
        logger.error("batches still queued after {} s (drain_deadline_s) are given up", deadline_s)
        code = 1
    table.close()
    try:
        async with asyncio.timeout(deadline_s):
            await trained
    except TimeoutError:
        logger.error("the step at hand did not end within {} s (drain_deadline_s)", deadline_s)
        return 1
    except Exception as error:  # noqa: BLE001  # whatever ended the training thread is the program's exit code
        told = (CheckpointError, UpdateError)
        return exit_code_of(error, told=told, doing="training ended: ", defect=f"training ended: {error}")
    logger.info("trainer: finished at version {}", table.own.book.info().version)
    return code
