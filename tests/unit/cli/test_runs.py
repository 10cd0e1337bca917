"""`meshrl run` against a trainer that keeps a table of runs and trains nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from click.testing import CliRunner, Result

from meshrl.cli.main import main
from meshrl.v1 import runs_pb2, trainer_pb2, trainer_pb2_grpc


class Runs(trainer_pb2_grpc.TrainerServiceServicer):
    """A table of runs behind the RPCs of a trainer."""

    def __init__(self) -> None:
        self.runs = {
            "main": trainer_pb2.Run(run_id="main", step=7, version=7, epoch=1, phase=runs_pb2.RUN_PHASE_ACTIVE)
        }

    def ListRuns(self, request: Any, context: Any) -> Any:  # noqa: N802 (named after the RPC)
        return trainer_pb2.ListRunsResponse(runs=self.runs.values())

    def GetRun(self, request: Any, context: Any) -> Any:  # noqa: N802
        return trainer_pb2.GetRunResponse(run=self.runs[request.run_id])

    def CreateRun(self, request: Any, context: Any) -> Any:  # noqa: N802
        made = trainer_pb2.Run(run_id=request.run_id, spec=request.spec, phase=runs_pb2.RUN_PHASE_ACTIVE)
        self.runs[request.run_id] = made
        return trainer_pb2.CreateRunResponse(run=made)

    def SuspendRun(self, request: Any, context: Any) -> Any:  # noqa: N802
        run = self.runs[request.run_id]
        run.phase, run.suspension.message = runs_pb2.RUN_PHASE_SUSPENDED, request.message
        return trainer_pb2.SuspendRunResponse(run=run)

    def ResumeRun(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.runs[request.run_id].phase = runs_pb2.RUN_PHASE_ACTIVE
        return trainer_pb2.ResumeRunResponse(run=self.runs[request.run_id])

    def DeleteRun(self, request: Any, context: Any) -> Any:  # noqa: N802
        assert request.keep_checkpoints
        del self.runs[request.run_id]
        return trainer_pb2.DeleteRunResponse()

    def SaveCheckpoint(self, request: Any, context: Any) -> Any:  # noqa: N802
        return trainer_pb2.SaveCheckpointResponse(step=self.runs[request.run_id].step, path=f"/out/{request.run_id}")


@pytest.fixture
def trainer() -> Iterator[tuple[str, Runs]]:
    server = grpc.server(ThreadPoolExecutor(2))
    runs = Runs()
    trainer_pb2_grpc.add_TrainerServiceServicer_to_server(runs, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}", runs
    server.stop(None).wait()


def test_a_run_is_made_listed_suspended_resumed_saved_and_deleted(trainer: tuple[str, Runs]) -> None:
    address, runs = trainer

    def meshrl(command: str, *arguments: str, code: int = 0) -> Result:
        result = CliRunner().invoke(main, ["run", command, "--address", address, *arguments])
        assert result.exit_code == code, result.output
        return result

    options = ("--rank", "4", "--target", "q_proj", "--lr", "0.001", "--share", "2")
    assert meshrl("create", "a", *options).output == "the run a is active at step 0\n"
    spec = runs.runs["a"].spec
    assert (spec.adapter.rank, spec.adapter.alpha, list(spec.adapter.target_modules)) == (4, 8.0, ["q_proj"])
    assert (spec.optimizer.learning_rate, spec.share) == (0.001, 2.0)
    header, main_line, line = meshrl("list").output.splitlines()
    assert header.split()[:4] == ["RUN", "STATE", "STEP", "VERSION"]
    assert main_line.split()[:4] == ["main", "active", "7", "7"]
    assert line.split()[:5] == ["a", "active", "0", "0", "2"]
    assert meshrl("suspend", "a", "--message", "too slow").output == "the run a is suspended at step 0\n"
    shown = meshrl("show", "a").output
    assert "suspended   too slow" in shown
    assert "adapter     rank 4, alpha 8.0, target_modules ('q_proj',)" in shown
    assert json.loads(meshrl("show", "a", "--json").output)["phase"] == "suspended"
    assert meshrl("resume", "a").output == "the run a is active at step 0\n"
    assert json.loads(meshrl("checkpoint", "a", "--json").output) == {"step": 0, "path": "/out/a"}
    meshrl("delete", "a", "--keep-checkpoints", "--yes")
    assert list(runs.runs) == ["main"]
    assert "give its --rank" in meshrl("create", "b", "--alpha", "2", code=2).output
