"""Spreads a run over a job's nodes: trainers on the first, engines on the next, the rest on the first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel

from meshrl.core.config import ConfigError
from meshrl.core.config.shared import ServerConfig
from meshrl.core.paths import Layout
from meshrl.core.telemetry.log_folder import log_place
from meshrl.core.telemetry.logs import LAUNCHER_LOGS
from meshrl.launch.config import RLConfig
from meshrl.launch.config.sections import RunDeploymentConfig
from meshrl.launch.gpus import Placement, divide
from meshrl.launch.nodes.job import STEP, JobNode
from meshrl.launch.supervise import Program

Section = TypeVar("Section", bound=BaseModel)

END_BY_USR1 = """
child=
trap '[ -z "$child" ] || kill -TERM "$child"' USR1
trap : TERM
(trap '' USR1; exec "$@") & child=$!
while :; do wait "$child"; code=$?; kill -0 "$child" 2>/dev/null || exit "$code"; done
"""
"""Drains a program on USR1, which srun hands on; on TERM srun kills its step at once."""

AS_RANK = 'export RANK=$((FIRST_RANK + SLURM_PROCID)) LOCAL_RANK=$SLURM_LOCALID; exec "$@"'


@dataclass(frozen=True, kw_only=True)
class Spread:
    trainers: Sequence[JobNode]
    engines: Sequence[JobNode]
    ranks_per_node: int
    placement: Placement

    @property
    def head(self) -> JobNode:
        return self.trainers[0]


def spread_over(config: RLConfig, nodes: Sequence[JobNode]) -> tuple[RLConfig, Spread]:
    """Raises ConfigError for sizes that do not fit the nodes."""
    given = config.deployment
    trainers, hosts = nodes[: given.num_train_nodes], nodes[given.num_train_nodes :]
    for key in ("trainer_gpu_ids", "inference_gpu_ids", "num_engines"):
        if getattr(config, key) is not None:
            raise ConfigError(
                f"{key} is for one node; deployment.gpus_per_node says what multi_node uses: leave it out"
            )
    apart = [node.name for node in trainers if not node.shares_output]
    if apart and config.trainer.ckpt is not None:
        raise ConfigError(
            f"ckpt is on, but {', '.join(apart)} does not see output_dir {str(config.output_dir)!r} of"
            f" {trainers[0].name}, so that a checkpoint would lie in pieces on several nodes; put output_dir on storage"
            " that the trainer's nodes share, or leave ckpt out"
        )
    if len(trainers) > 1 and config.restarts_of("trainer"):
        raise ConfigError(
            "a trainer on several nodes is not restarted within its job, which is requeued instead; set"
            " trainer_restarts to 0"
        )
    each = 0
    if config.inference is not None:
        each = _engines_per_node(config.inference.gpus_per_engine(), given.gpus_per_node)
    engines = [node for node in hosts for _ in range(each)]
    spread = Spread(
        trainers=trainers,
        engines=engines,
        ranks_per_node=max(1, given.gpus_per_node),
        placement=Placement(
            engines=divide([*map(str, range(given.gpus_per_node))] or None, each) * len(hosts),
            hosts=tuple(node.address for node in engines),
        ),
    )
    model = config.trainer.model
    if given.nodes_per_fsdp_group is not None:
        model = _with(model, dp_replicate=given.num_train_nodes // given.nodes_per_fsdp_group)
    changed = _with(
        config,
        num_engines=len(engines) or None,
        trainer=_with(config.trainer, server=_at(spread.head, config.trainer.server, given), model=model),
        weights=_with(config.weights, server=_at(spread.head, config.weights.server, given)),
        rollout=_with(config.rollout, server=_at(spread.head, config.rollout.server, given)),
    )
    if config.inference is not None and given.insecure:
        server = _with(config.inference.server, insecure=True)
        changed = _with(changed, inference=_with(config.inference, server=server))
    return changed, spread


def _at(node: JobNode, server: ServerConfig, given: RunDeploymentConfig) -> ServerConfig:
    return _with(server, host=node.address, insecure=given.insecure or server.insecure)


def on_nodes(
    programs: Sequence[Program], spread: Spread, layout: Layout, free_port: Callable[[str], int]
) -> list[Program]:
    """As steps of the job; one for each node of a trainer."""
    started: list[Program] = []
    engines = iter(spread.engines)
    numbers: dict[str, int] = {}
    for program in programs:
        if program.name == "trainer":
            started += _trainers(program, spread, layout, free_port(spread.head.address))
        elif program.name.partition("_")[0] == "inference":
            node = next(engines)
            number = list(dict.fromkeys(each.name for each in spread.engines)).index(node.name)
            numbers[node.name] = place = numbers.get(node.name, 0) + 1
            log = log_place(layout, "inference", f"node_{number}{'' if place == 1 else f'_{place}'}.log")
            started.append(_step(program, node, log=log))
        else:
            started.append(_step(program, spread.head, log=program.log))
    return started


def link_logs(layout: Layout) -> None:
    """logs/trainer.log and logs/inference.log are those of the first node."""
    for name in ("trainer", "inference"):
        log_place(layout, f"{name}.log").symlink_to(f"{name}/node_0.log")


def _trainers(program: Program, spread: Spread, layout: Layout, master_port: int) -> list[Program]:
    ranks = spread.ranks_per_node
    group = {
        "MASTER_ADDR": spread.head.address,
        "MASTER_PORT": str(master_port),
        "WORLD_SIZE": str(ranks * len(spread.trainers)),
        "LOCAL_WORLD_SIZE": str(ranks),
    }
    return [
        replace(
            _step(
                replace(program, environ={**program.environ, **group, "FIRST_RANK": str(number * ranks)}),
                node,
                log=log_place(layout, "trainer", f"node_{number}.log"),
                tasks=ranks,
                before=("sh", "-c", AS_RANK, "rank"),
            ),
            name="trainer" if number == 0 else f"trainer_node_{number}",
        )
        for number, node in enumerate(spread.trainers)
    ]


def _step(program: Program, node: JobNode, *, log: Path, tasks: int = 1, before: Sequence[str] = ()) -> Program:
    where = (f"--ntasks={tasks}", f"--nodelist={node.name}")
    return replace(
        program,
        command=[*STEP, *where, "sh", "-c", END_BY_USR1, "node", *before, *program.command],
        log=log,
        environ={**program.environ, LAUNCHER_LOGS: "1"},
        ends_on_usr1=True,
    )


def _engines_per_node(each: int, gpus: int) -> int:
    if not gpus:
        return 1
    if each > gpus or gpus % each:
        raise ConfigError(
            f"an engine takes {each} GPU(s), and a node has deployment.gpus_per_node = {gpus}, of which they must be a"
            " divisor; change inference.tensor_parallel_size or inference.data_parallel_size, or submit one engine over"
            " several nodes with `inference` and give its address in orchestrator.client.base_url"
        )
    return gpus // each


def _with(section: Section, **values: object) -> Section:
    """Remembers which keys were given."""
    return section.model_copy(update=values)
