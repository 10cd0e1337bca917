"""This process's SLURM job: its nodes, their addresses, and ports that are free there."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypedDict

from meshrl.core.config import ConfigError
from meshrl.core.paths import Layout
from meshrl.core.rpc.serve import is_loopback

ASK_DEADLINE_S = 60.0
PROBE_DEADLINE_S = 300.0  # a first import of Python from a cold network disk takes its time
PORTS_PER_NODE = 48
STEP = ("srun", "--overlap", "--nodes=1", "--kill-on-bad-exit=1", "--cpu-bind=quiet,none", "--export=ALL")
"""A step on one node that shares the job's cores, memory and GPUs with its other steps."""


class NodeLostError(Exception):
    """SLURM failed; a job of several nodes may be requeued."""


@dataclass(frozen=True, kw_only=True)
class JobNode:
    name: str
    address: str
    """For the other nodes."""

    shares_output: bool = True
    """The first node's output folder."""


class _ProbeAnswer(TypedDict):
    node: str
    ports: list[int]
    token: str | None


@dataclass(kw_only=True)
class NodePorts:
    """By address, each given once."""

    free: Mapping[str, list[int]] = field(default_factory=dict)
    given: set[int] = field(default_factory=set)

    def __call__(self, address: str) -> int:
        if not self.free.get(address):
            raise ConfigError(f"no port is left at {address} of the {PORTS_PER_NODE} that were asked for")
        self.given.add(port := self.free[address].pop())
        return port


def nodes_of_job(environ: Mapping[str, str], count: int) -> list[str]:
    """Their names, this one first. Raises ConfigError outside of a job or in a small one, and NodeLostError."""
    listed = environ.get("SLURM_JOB_NODELIST")
    if listed is None or "SLURM_JOB_ID" not in environ:
        raise ConfigError(
            "deployment.type is 'multi_node', but this is no SLURM job; add [slurm] to submit one, or start the"
            " programs on each node as docs/deployment.md says"
        )
    names = _ask("scontrol", "show", "hostnames", listed).split()
    if len(names) < count:
        raise ConfigError(
            f"deployment: num_train_nodes and num_infer_nodes ask for {count} nodes, but job"
            f" {environ['SLURM_JOB_ID']} has {len(names)}; lower them, or submit with --nodes={count}"
        )
    own = environ.get("SLURMD_NODENAME", names[0])
    return sorted(names, key=lambda name: name != own)[:count]


def probe_nodes(names: Sequence[str], layout: Layout) -> tuple[list[JobNode], NodePorts]:
    """Raises ConfigError and NodeLostError."""
    layout.configs.mkdir(parents=True, exist_ok=True)
    token, file = uuid.uuid4().hex, layout.configs.absolute() / ".token"
    file.write_text(token)
    try:
        answer = on_each(names, "meshrl.launch.nodes.probe", str(file), str(PORTS_PER_NODE))
        lines: list[_ProbeAnswer] = [json.loads(line) for line in answer.splitlines()]
        said = {line["node"]: line for line in lines}
        missing = [name for name in names if name not in said]
        if missing:
            raise ConfigError(f"nodes {', '.join(missing)} of the job did not say which ports are free there")
    finally:
        file.unlink(missing_ok=True)
    addresses = _addresses(names)
    ports = NodePorts(free={address: [] for address in addresses.values()})
    for name in names:
        known = ports.free[addresses[name]]  # of another node at the same address, on a machine that plays several
        known += [port for port in said[name]["ports"] if port not in known]
    nodes = [JobNode(name=name, address=addresses[name], shares_output=said[name]["token"] == token) for name in names]
    return nodes, ports


def copy_to_nodes(nodes: Iterable[JobNode], paths: Sequence[Path]) -> None:
    """To those that do not see this one's output folder. Raises NodeLostError."""
    for node in nodes:
        for path in paths if not node.shares_output else ():
            write = 'umask 077 && mkdir -p "$(dirname "$1")" && cat >"$1"'
            _ask(*STEP, "--ntasks=1", f"--nodelist={node.name}", "sh", "-c", write, "sh", str(path.absolute()),
                 stdin=path.read_text())  # fmt: skip


def on_each(names: Sequence[str], module: str, *arguments: str, stdin: str | None = None) -> str:
    """All output of a module that runs once on each node. Raises ConfigError and NodeLostError."""
    count = str(len(names))
    return _ask(
        "srun", "--overlap", f"--nodes={count}", f"--ntasks={count}", "--ntasks-per-node=1", "--export=ALL",
        f"--nodelist={','.join(names)}", sys.executable, "-m", module, *arguments, stdin=stdin,
        deadline_s=PROBE_DEADLINE_S,
    )  # fmt: skip


def _addresses(names: Sequence[str]) -> dict[str, str]:
    answer = _ask("scontrol", "show", "node", ",".join(names))
    given = dict(re.findall(r"NodeName=(\S+)[\s\S]*?NodeAddr=(\S+)", answer))
    found = {}
    for name in names:
        try:
            found[name] = socket.getaddrinfo(given.get(name, name), None, type=socket.SOCK_STREAM)[0][4][0]
        except OSError as error:
            raise ConfigError(f"node {name} has no address here ({error}); see NodeAddr in slurm.conf") from error
    own, others = names[0], [str(found[name]) for name in names[1:]]
    if others and is_loopback(str(found[own])) and not is_loopback(others[0]):
        # /etc/hosts often gives a machine's own name a loopback address: take that on the way to another node.
        with socket.socket(socket.AF_INET6 if ":" in others[0] else socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((others[0], 9))  # which sends nothing
            found[own] = probe.getsockname()[0]
    return {name: str(address) for name, address in found.items()}


def _ask(*command: str, stdin: str | None = None, deadline_s: float = ASK_DEADLINE_S) -> str:
    try:
        done = subprocess.run(
            command, input=stdin or "", capture_output=True, text=True, timeout=deadline_s, check=False
        )
    except FileNotFoundError:
        raise ConfigError(f"there is no {command[0]} on this node; SLURM's commands must be on the PATH") from None
    except subprocess.TimeoutExpired:
        raise NodeLostError(f"{command[0]} did not answer within {deadline_s:g} s; a node may be gone") from None
    if done.returncode:
        raise NodeLostError(f"{' '.join(command[:3])} failed: {done.stderr.strip() or f'exit code {done.returncode}'}")
    return done.stdout
