"""A trainer that keeps a table of runs behind the contract and trains nothing."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc

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


@contextmanager
def serving_runs() -> Iterator[tuple[str, Runs]]:
    """The address of a trainer, and its table."""
    server = grpc.server(ThreadPoolExecutor(2))
    runs = Runs()
    trainer_pb2_grpc.add_TrainerServiceServicer_to_server(runs, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}", runs
    finally:
        server.stop(None).wait()
