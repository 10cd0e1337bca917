"""`meshrl conformance --service exchange`: our worker keeps every rule, and workers that break one are named by it."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from local_ports import free_port
from meshrl.rollout.config import ExchangeLinkConfig
from meshrl.rollout.exchange.spool import ResultSpool
from meshrl.rollout.exchange.worker import ExchangeWorker
from meshrl.wire.errors import MeshError, Reason
from meshrl_conformance.command import examine_worker

pytestmark = pytest.mark.timeout(600)
DEADLINE_S = 60.0


@asynccontextmanager
async def dialling(kind: type[ExchangeWorker], runner: Any, address: str, folder: Path) -> AsyncIterator[None]:
    """A worker that dials `address` until the end of the block."""
    config = ExchangeLinkConfig(address=address)
    worker = kind(config, runner, ResultSpool(folder / "spool.sqlite"), name="box", max_queued=64)
    running = asyncio.create_task(worker.run())
    try:
        yield
    finally:
        running.cancel()
        await asyncio.wait({running})


class PlaysAgain(ExchangeWorker):
    """It forgets that it has had a call."""

    def _start(self, start: Any) -> None:
        self._outbox.drop(start.call_id)
        super()._start(start)


class SpendsMore(ExchangeWorker):
    """It takes one credit more than it was given."""

    def _resume(self, stream: Any, lease: Any) -> None:
        super()._resume(stream, lease)
        stream.credit += 1


class KeepsAll(ExchangeWorker):
    """It goes on with calls that nobody needs."""

    def _drop(self, call_id: str) -> None:
        pass


class SaysOnlyThatItFailed(ExchangeWorker):
    """It has one reason for everything."""

    def _end(self, call_id: str, error: MeshError | None) -> None:
        super()._end(call_id, error and MeshError(Reason.INTERNAL, error.message))


BREAKS: dict[type[ExchangeWorker], tuple[str, str]] = {
    PlaysAgain: ("exchange.once", "was started again"),
    SpendsMore: ("exchange.credit", "beyond a credit of 1"),
    KeepsAll: ("exchange.cancel", "after unneeded"),
    SaysOnlyThatItFailed: ("exchange.refusal", "with INTERNAL"),
}
"""The one rule that each worker breaks, and words of the finding."""


async def test_our_worker_keeps_every_rule_and_one_that_breaks_a_rule_is_named_by_it(start_mesh, engine, tmp_path):
    async def examined(kind: type[ExchangeWorker], examine: Callable[[str], Awaitable[Any]]) -> Any:
        mesh, folder = await start_mesh([engine]), tmp_path / kind.__name__
        folder.mkdir()
        address = f"127.0.0.1:{free_port()}"
        async with dialling(kind, mesh.runner, address, folder):
            return await examine(address)

    async def command(address: str) -> dict[str, str]:
        """The result of each rule, by the command."""
        asked = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "meshrl.cli.main", "conformance", "--full", "--json", "--deadline", str(DEADLINE_S),
            "--address", address, "--service", "exchange",
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        out, err = await asyncio.wait_for(asked.communicate(), 5 * DEADLINE_S)
        assert asked.returncode == 0, out + err
        return {one["rule"]: one["result"] for one in json.loads(out)["rules"]}

    async def findings(address: str) -> dict[str, str]:
        results = await examine_worker(address, full=False, deadline_s=DEADLINE_S)
        return {one.rule: one.found for one in results if one.result == "breaks"}

    # Side by side: an examination waits most of its 16 s for what a worker must not do.
    rules, *broken = await asyncio.gather(
        examined(ExchangeWorker, command), *(examined(kind, findings) for kind in BREAKS)
    )
    assert {rule for rule, result in rules.items() if result != "keeps"} == {"exchange.spool", "exchange.cut-off"}
    assert len(rules) == 10
    found = dict(zip(BREAKS, broken, strict=True))
    assert {kind: set(each) for kind, each in found.items()} == {kind: {rule} for kind, (rule, _) in BREAKS.items()}
    for kind, (rule, words) in BREAKS.items():
        assert words in found[kind][rule]
