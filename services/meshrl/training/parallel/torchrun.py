"""Starts the ranks of a training program on this machine: torchrun's agent, with an orderly end.

The plain `torchrun` command fails when it is asked to end, and gives its workers 30 s. Here SIGTERM, SIGINT and SIGHUP
reach rank 0 as SIGTERM, which drains and stops the others, and the exit code is theirs. A SIGHUP that was ignored at
the start, as under `nohup`, stays so.
"""

from __future__ import annotations

import os
import signal
import sys
import uuid
from collections import deque
from collections.abc import Mapping, MutableMapping, Sequence
from contextlib import suppress
from pathlib import Path

import torch.distributed.elastic.rendezvous.registry as rendezvous
from loguru import logger
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.rendezvous import RendezvousParameters

from meshrl.core.paths import Layout
from meshrl.core.program import draining_signals
from meshrl.core.telemetry.log_folder import log_place
from meshrl.core.telemetry.logs import stdout_goes_beside
from meshrl.training.parallel.deployment import DeploymentConfig
from meshrl.training.parallel.lifeline import AGENT_PID, LOST_PEER

LAST_LINES = 15
EXIT_BARRIER_S = 30.0


def run_ranks(
    module: str, role: str, deployment: DeploymentConfig, layout: Layout, environment: MutableMapping[str, str]
) -> int:
    """Runs `module` with this program's arguments as ranks; returns the exit code.

    Their output is in <output_dir>/logs/<role>/torchrun/<rdzv>/attempt_0/<rank>/ of the newest start. Rank 0's is shown
    here too, or its errors alone when this program's output already goes to its log.
    """
    show = Std.ERR if stdout_goes_beside(log_place(layout, f"{role}.log")) else Std.ALL
    log_dir = log_place(layout, role, "torchrun")
    agent = RankAgent(module, sys.argv[1:], ranks=deployment.num_train_gpus, log_dir=log_dir, show=show, role=role)
    return agent.run_ranks(environment)


class RankAgent(LocalElasticAgent):
    """One group of ranks on this machine, without restarts."""

    def __init__(
        self, module: str, arguments: Sequence[str], *, ranks: int, log_dir: Path, show: Std = Std.ALL, role: str
    ) -> None:
        log_dir.mkdir(parents=True, exist_ok=True)
        self._role = role
        self._logs = log_dir
        self._pids: Mapping[int, int] = {}  # by rank
        self._undrained: list[int] = []  # the pid of rank 0 until it is told to drain
        self._draining = False
        self._run_id = uuid.uuid4().hex[:8]
        parameters = RendezvousParameters(
            backend="c10d",
            endpoint="localhost:0",  # a free port, so that groups side by side never meet
            run_id=self._run_id,
            min_nodes=1,
            max_nodes=1,
            local_addr="localhost",
        )
        spec = WorkerSpec(
            role=role,
            local_world_size=ranks,
            entrypoint=sys.executable,
            args=("-u", "-m", module, *arguments),
            rdzv_handler=rendezvous.get_rendezvous_handler(parameters),
            max_restarts=0,
            local_addr="localhost",
        )
        logs = DefaultLogsSpecs(log_dir=str(log_dir), redirects=Std.ALL, tee={0: show})
        super().__init__(spec, logs, exit_barrier_timeout=EXIT_BARRIER_S)

    def run_ranks(self, environment: MutableMapping[str, str]) -> int:
        """Returns the exit code. `environment` is this process's, and theirs."""
        environment["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGQUIT"  # the others are handled here
        environment.setdefault("OMP_NUM_THREADS", "1")
        environment[AGENT_PID] = str(os.getpid())
        for signum in draining_signals():
            signal.signal(signum, self._on_signal)
        try:
            result = self.run()
        finally:
            self._rdzv_handler.shutdown()
        return self._exit_code(result)

    def _on_signal(self, signum: int, frame: object) -> None:
        if self._draining and signum == signal.SIGHUP:  # a closed terminal sends it twice
            return
        if self._draining:
            logger.warning("second {}: leaving at once", signal.Signals(signum).name)
            for pid in self._pids.values():
                _send(pid, signal.SIGKILL)
            os._exit(128 + signum)
        self._draining = True
        self._drain()
        name = signal.Signals(signum).name
        logger.info(
            "{}: rank 0 gets SIGTERM, on which it drains; a second SIGTERM or SIGINT ends all ranks at once", name
        )

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, int]:
        pids: dict[int, int] = super()._start_workers(worker_group)
        self._pids = pids  # a signal before has waited: to leave would orphan the ranks, and torch's log threads
        self._undrained.append(pids[0])
        if self._draining:
            self._drain()
        return pids

    def _drain(self) -> None:
        with suppress(IndexError):  # not started, or told: a signal may come at any line here
            _send(self._undrained.pop(), signal.SIGTERM)

    def _exit_code(self, result: RunResult) -> int:
        if not result.is_failed():
            return 0
        first = sorted(result.failures.items(), key=lambda item: (item[1].exitcode == LOST_PEER, item[1].timestamp))
        rank, failure = first[0]
        code = int(failure.exitcode)
        if self._draining and code in (-signal.SIGTERM, LOST_PEER):  # rank 0 had not begun to work, and left
            return 0
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        lines = "".join(f"\n    {line}" for line in self._last_lines(rank))
        logger.error("rank {} of {} {}, and the group with it; its log: {}{}", rank, self._role, how, self._logs, lines)
        return code if code > 0 else 1

    def _last_lines(self, rank: int) -> list[str]:
        lines: deque[str] = deque(maxlen=LAST_LINES)
        for stream in ("stdout", "stderr"):
            for path in self._logs.glob(f"{self._run_id}_*/attempt_0/{rank}/{stream}.log"):
                lines.extend(path.read_text(errors="replace").splitlines()[-LAST_LINES:])
        return list(lines)


def _send(pid: int, signum: signal.Signals) -> None:
    try:
        os.kill(pid, signum)
    except ProcessLookupError:  # it ended meanwhile
        return
