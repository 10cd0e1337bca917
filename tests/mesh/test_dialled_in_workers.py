"""A run whose only rollout workers dial in, over mutual TLS: one is killed and comes back, the other's link is cut."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from cut_link import CutLink
from ledger_audit import audit
from local_ports import free_port
from mesh_run import PACED, PACED_HOST, Run, environ
from meshrl.client.authority import Authority
from meshrl.client.trust import Role

pytestmark = [pytest.mark.mesh, pytest.mark.timeout(900)]
UP_S = 300.0
MORE = """
[orchestrator.services]
rollout = []

[orchestrator.exchange]
port = {port}
heartbeat_s = 1.0
lease_s = 120.0
workers = ["box-a", "box-b"]
"""


@pytest.fixture
def start_worker(tmp_path: Path, model_dir: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Starts a rollout worker by hand, as its user does on a host that nobody can reach."""
    started: list[subprocess.Popen[bytes]] = []

    def start(name: str, *flags: str) -> subprocess.Popen[bytes]:
        out = tmp_path / name
        command = (
            sys.executable, "-m", "meshrl.rollout.main", "--exchange.name", name, *PACED_HOST,
            "--model.name", str(model_dir), "--seq-len", "128", "--workers", "0", "--output-dir", str(out), *flags,
        )  # fmt: skip
        with (tmp_path / f"{name}_{len(started)}.txt").open("wb") as console:
            started.append(
                subprocess.Popen(
                    command, stdout=console, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=environ()
                )
            )
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait(60.0)


def test_workers_that_listen_nowhere_play_a_run_and_nothing_is_lost_or_booked_twice(
    start_run: Callable[..., Run],
    start_worker: Callable[..., subprocess.Popen[bytes]],
    tmp_path: Path,
) -> None:
    out, port = tmp_path / "out", free_port()
    authority = Authority.create(out / "credentials", "main")
    more = tmp_path / "exchange.toml"
    more.write_text(MORE.format(port=port))
    run = start_run("@", str(more), *PACED, output_dir=out)
    run.wait_for(lambda: "rollout workers may dial in" in run.log("orchestrator"), UP_S)
    with ExitStack() as stack:
        link = stack.enter_context(CutLink(f"127.0.0.1:{port}"))

        def worker(name: str, address: str) -> subprocess.Popen[bytes]:
            folder = tmp_path / f"credentials_{name}"
            authority.issue(folder, Role.ROLLOUT, name)
            return start_worker(
                name, "--exchange.address", address, "--tls.folder", str(folder),
                "--weights", f"127.0.0.1:{run.port('weights')}",
                "--client.api-key-file", str(out / "credentials" / "engine.key"),
            )  # fmt: skip

        dies = worker("box-a", f"127.0.0.1:{port}")
        worker("box-b", link.address)
        run.wait_for(lambda: len(run.steps()) >= 2, UP_S)
        dies.send_signal(signal.SIGKILL)
        run.wait_for(lambda: "the rollout service at exchange/box-a is away" in run.log("orchestrator"), UP_S)
        worker("box-a", f"127.0.0.1:{port}")
        step = len(run.steps())
        link.cut()
        run.wait_for(lambda: "the rollout service at exchange/box-b is away" in run.log("orchestrator"), UP_S)
        run.wait_for(lambda: run.log("orchestrator").count("worker 'box-a' dialled in") == 2, UP_S)
        link.mend()
        run.wait_for(lambda: "worker 'box-b' is back" in run.log("orchestrator"), UP_S)
        run.wait_for(lambda: len(run.steps()) >= step + 2, UP_S)
        run.process.send_signal(signal.SIGTERM)
        assert run.finish(UP_S) == 0, run.console.read_text()
    report = audit(out)
    assert report.violations == (), report.table()
    failed = {reason: count for (state, reason), count in report.counts.items() if state == "failed"}
    assert failed == {}, report.table()
    assert not os.path.exists(out / "configs" / "rollout.toml")  # rl started none
    assert not run.left_running()
