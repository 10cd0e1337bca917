"""Has this machine the GPUs, free ports and open files that the programs need, and is there a key for W&B?"""

from __future__ import annotations

import netrc
import os
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from meshrl.core.torch_environment import VISIBLE_GPUS
from meshrl.launch.compose import Part
from meshrl.launch.preflight.findings import Finding, Plan, error, warning
from meshrl.machine.fitness import open_files
from meshrl.machine.ports import why_not_free
from meshrl.orchestrator.config import OrchestratorConfig
from meshrl.weights.config import WeightsConfig

WANDB_URL = "https://api.wandb.ai"


def check_ports(plan: Plan) -> Iterator[Finding]:
    """Configured ports must be free, and given once."""
    if plan.folder_in_use:
        return
    owners: dict[tuple[str, int], str] = {}
    for part, name, host, port in ((each, *server) for each in plan.parts for server in _ports(each)):
        if not port or port in plan.chosen_ports:
            continue
        key = f"{part.name}.{name} {port}"
        is_elsewhere = host in plan.elsewhere
        place = (host if is_elsewhere else "here", port)  # all addresses of this machine are one place
        if place in owners:
            yield error(f"{key} is given to {owners[place]} as well; give each program a port of its own")
            continue
        owners[place] = part.name
        if is_elsewhere:
            continue
        problem = why_not_free(host, port)
        if problem is not None:
            yield error(f"{key} cannot be used at {host} ({problem}); stop what listens there, or leave it out")


def _ports(part: Part) -> Iterator[tuple[str, str, int | None]]:
    """Key, host and port of each server that listens at a configured one."""
    server = getattr(part.config, "server", None)
    if server is not None:
        yield "server.port", server.host, server.port
    if isinstance(part.config, WeightsConfig):
        yield "enrollment_port", part.config.server.host, part.config.enrollment_port
    if isinstance(part.config, OrchestratorConfig) and part.config.exchange is not None:
        yield "exchange.port", part.config.exchange.host, part.config.exchange.port


def check_gpus(plan: Plan) -> Iterator[Finding]:
    """Listed GPUs on a machine without any; where there are some, `place` compares."""
    if plan.gpus or plan.config.deployment.type == "multi_node":
        return
    for key in ("inference_gpu_ids", "trainer_gpu_ids"):
        listed = getattr(plan.config, key)
        if listed:
            yield error(
                f"{key} lists {', '.join(map(str, listed))} but no GPU is visible here; leave it out to run on the CPU,"
                f" or look at nvidia-smi and {VISIBLE_GPUS}"
            )


def check_open_files(plan: Plan) -> Iterator[Finding]:
    looked = open_files()
    if looked.state != "ok":
        yield (error if looked.state == "fail" else warning)(f"{looked.found}; {looked.remedy}")


def check_wandb(plan: Plan) -> Iterator[Finding]:
    wandb = plan.config.orchestrator.wandb
    if wandb is None or wandb.offline or os.environ.get("WANDB_MODE", "online") in ("offline", "disabled", "dryrun"):
        return
    host = urlsplit(os.environ.get("WANDB_BASE_URL", WANDB_URL)).hostname or ""
    if not os.environ.get("WANDB_API_KEY") and not _in_netrc(host):
        yield warning(
            f"wandb is on, but there is no key for {host}: its metrics will be missing; run 'wandb login', set"
            " WANDB_API_KEY, or set wandb.offline"
        )


def _in_netrc(host: str) -> bool:
    path = Path(os.environ.get("NETRC", Path.home() / ".netrc"))
    try:
        return netrc.netrc(str(path)).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):  # none, or one that nobody can read
        return False
