"""The `orchestrator` program: connects to the services, opens ledger and metrics, runs the loop, and ends cleanly."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path

from loguru import logger
from opentelemetry.trace import Tracer

from meshrl.cli.run_folder import RunFolder
from meshrl.client.trust import Role
from meshrl.core.config import ConfigError, dump_toml, load_config
from meshrl.core.config.shared import PrimeMonitorConfig, TlsConfig, WandbConfig
from meshrl.core.credentials.identity import as_member
from meshrl.core.paths import Layout
from meshrl.core.program import run_program, say_ready
from meshrl.core.rpc.serve import GrpcServer
from meshrl.core.telemetry.exposition import RecordMetrics, registry_of
from meshrl.core.telemetry.monitor import Sink
from meshrl.core.telemetry.prime import PrimeSink
from meshrl.core.telemetry.sinks import WebhookSink, open_monitor
from meshrl.core.telemetry.waits import waits_of
from meshrl.core.waiting import StoppedError, unless_stopped
from meshrl.orchestrator.bench.alone import OwnCost, standing_in
from meshrl.orchestrator.bench.summary import report_bench
from meshrl.orchestrator.build import build_loop
from meshrl.orchestrator.config import OrchestratorConfig, TrainEnvConfig, TrainEnvsConfig
from meshrl.orchestrator.exchange.service import RolloutExchange
from meshrl.orchestrator.ledger.open_run import open_journal
from meshrl.orchestrator.peers.connect import Mesh, Services, connect, wait_for_services
from meshrl.orchestrator.work.recipes import build_recipes, least_rollouts
from meshrl.prime_rl import PrimeRLKeys
from meshrl.sampling.retry import RunError
from meshrl.wire.values import JsonObject

HEALTH_NAME = "meshrl.Orchestrator"


def main() -> None:
    config = load_config(
        OrchestratorConfig, prog="orchestrator", spellings=PrimeRLKeys(OrchestratorConfig, "orchestrator")
    )
    start(config)


def start(config: OrchestratorConfig) -> None:
    """Runs the program, in the mesh that the configuration names. A run that is found by its folder has its name."""
    if config.mesh is not None:
        try:
            config = in_mesh(config.model_dump(exclude_unset=True), RunFolder(config.mesh))
            dump_toml(config, Layout(config.output_dir).config("orchestrator"))  # its folder is looked at as a run's
        except (ConfigError, OSError) as error:
            sys.stderr.write(f"orchestrator: {error}\n")
            sys.exit(2)
    if config.is_found:
        config = config.model_copy(update={"run_id": config.output_dir.resolve().name, "run": None})
    run_program("orchestrator", config, as_member(Role.ORCHESTRATOR, orchestrate))


def in_mesh(given: JsonObject, mesh: RunFolder) -> OrchestratorConfig:
    """These keys, completed from a running mesh. Raises ConfigError if none runs there."""
    values, services = dict(given), dict(given.get("services", {}))
    for name in ("rollout", "trainer", "weights"):
        found = mesh.addresses(name)
        if name not in services and not found:
            raise ConfigError(f"orchestrator.mesh {str(mesh.path)!r} names no address of `{name}`; name a run's folder")
        services.setdefault(name, list(found) if name == "rollout" else found[0] if found else "")
    values["services"] = services
    values.setdefault("output_dir", Layout(mesh.path).run_folder(given.get("run_id", "")))
    token = mesh.path / "credentials" / f"{Role.ORCHESTRATOR}.token"
    if TlsConfig.model_validate(given.get("tls", {})) == TlsConfig() and token.exists():
        values["tls"] = {"token": token}
    return OrchestratorConfig.model_validate(values)


async def orchestrate(config: OrchestratorConfig, stop: asyncio.Event, tracer: Tracer) -> int:
    """Trains until the last step or until `stop` is set; returns 0, or 1 when the run could not go on. Raises
    ConfigError when there is nothing to train on."""
    if config.bench and not config.services.model_fields_set:  # `rl --bench` names all of them
        train = config.train if config.train.env else TrainEnvsConfig(env=[TrainEnvConfig(id="made-up")])
        names = {env.resolved_name for env in (*train.env, *(config.eval.env if config.eval is not None else ()))}
        async with standing_in(names, seq_len=config.seq_len, max_tokens=config.sampling.max_tokens) as found:
            alone = config.model_copy(update={"services": found, "train": train})
            return await orchestrate(alone, stop, tracer)
    if not config.train.env:
        raise ConfigError(
            "orchestrator.train.env must name at least one environment, got none;"
            " add [[train.env]] with id = '<taskset>' to its TOML file ([[orchestrator.train.env]] for rl)"
        )
    try:
        async with AsyncExitStack() as ending:
            if config.server is not None:
                server = GrpcServer(config.server)
                server.add(HEALTH_NAME, lambda servicer, server: None, None)  # it serves health alone
                ending.push_async_callback(server.drain, grace_s=0.0)
                logger.info(f"health of the orchestrator on port {await server.start()}")
                server.set_serving()
            services = connect(
                config.services,
                unreachable_s=config.deadlines.unreachable_s,
                exchange=config.exchange,
                teachers=config.teacher_services,
            )
            ending.push_async_callback(services.close)
            if config.exchange is not None:
                exchange = RolloutExchange(config.exchange, services.rollouts)
                ending.push_async_callback(exchange.close)
                await exchange.start()
            mesh = await unless_stopped(stop, wait_for_services(config, services, waits_of(tracer)))
            await _train(config, services, mesh, tracer, stop)
    except StoppedError:
        return 0
    except RunError as error:  # said once, without a traceback: the message tells what to change
        logger.error(str(error))
        return 1
    return 0


async def _train(
    config: OrchestratorConfig, services: Services, mesh: Mesh, tracer: Tracer, stop: asyncio.Event
) -> None:
    layout, recipes = Layout(config.output_dir), build_recipes(config.algos, config.advantage, seq_len=config.seq_len)
    async with AsyncExitStack() as ending:  # a disk that takes no ledger may still take what waits for metrics.jsonl
        journal = await asyncio.to_thread(
            open_journal,
            layout,
            mesh.trainer,
            mesh.run,
            session=config.session,
            least_rollouts=least_rollouts(recipes),
            checkpoints=config.checkpoint_interval is not None,
            saves_last=config.checkpoint_at_end,
            last_step=config.last_step,
        )
        ending.push_async_callback(asyncio.to_thread, journal.close)
        ending.callback(lambda: logger.info(f"rollouts: {journal.ledger.balance()}"))
        shown = RecordMetrics()
        registry_of(tracer).register(shown)
        described = {
            "base_model": mesh.trainer.model,
            "max_steps": config.max_steps or 0,
            "batch_size": config.batch_size,
            "rollouts_per_example": config.group_size,
            "environments": [{"id": env.id} for env in config.train.env],
            "run_config": config.model_dump(mode="json", exclude_none=True),
        }
        more = [
            shown,
            *_webhooks(config.alerts.webhook_var, config.output_dir),
            *await asyncio.to_thread(_prime_sinks, config.prime_monitor, config.wandb, described),
        ]
        monitor = await asyncio.to_thread(
            open_monitor, layout, config.log, config.wandb, config.model_dump(mode="json"), more
        )
        ending.push_async_callback(asyncio.to_thread, monitor.close)
        loop = build_loop(config, services, mesh, recipes=recipes, journal=journal, monitor=monitor, tracer=tracer)
        say_ready(tracer)
        cost = OwnCost()
        try:
            async with services.watching():
                await unless_stopped(stop, loop.train())
            logger.success(f"trained up to step {loop.run.plan.next_step - 1}")
            if config.run is not None and config.run.delete:
                await services.trainer.delete_run(config.run_id, keep_checkpoints=True)
        except StoppedError:
            logger.info(f"stopped before step {loop.run.plan.next_step} was complete")
        journal.end()  # not after an error: whoever is started next goes on with what is open
        if config.bench:
            report_bench(layout.output_dir / "bench", loop.finisher.reporter.records)
            logger.info(cost.summary(int(sum(record["batch/rollouts"] for record in loop.finisher.reporter.records))))


def _webhooks(variable: str | None, output_dir: Path) -> list[Sink]:
    if variable is None:
        return []
    url = os.environ.get(variable, "")
    if not url.startswith(("https://", "http://")):
        raise ConfigError(
            f"orchestrator.alerts.webhook_var is {variable!r}, but this environment variable holds no http(s):// URL;"
            " set it, or leave the key out"
        )
    return [WebhookSink(url, output_dir)]


def _prime_sinks(prime: PrimeMonitorConfig | None, wandb: WandbConfig | None, run: Mapping[str, object]) -> list[Sink]:
    if prime is None:
        return []
    named = wandb.name if wandb is not None and prime.run_name is None else None
    return [PrimeSink(prime, {**run, **({"name": named} if named else {})})]


if __name__ == "__main__":
    main()
