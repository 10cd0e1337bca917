"""Which tests stay together when several workers of pytest-xdist share a run, and which begin first.

A worker takes whole files, since fixtures of a module cost the most. Tests of the engine contract share one engine of
each kind for the session, so all that use the same engine go to the same worker; files that start embedded engines of
their own are spread. All tests of vLLM are one piece: its engines take gigabytes and a core each, and no other worker
starts one beside them. Tests of the live run are one piece, too. What takes longest begins first, so that no worker
ends long after the others.
"""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest
    from xdist.scheduler import LoadScopeScheduling
    from xdist.workermanage import WorkerController

ENGINES = "tests/contract/inference/"
LIVE_RUN = "tests/mesh/test_live_"
OWN_ENGINES = {"test_adapters.py", "test_mixture.py", "test_parallel.py"}
LONGEST_FIRST = (
    "tests/mesh/", "tests/wan/", ENGINES, "tests/contract/training/", "tests/contract/trainer/",
    "tests/contract/", "tests/unit/training/", "tests/unit/models/",
)  # fmt: skip


def group_of(nodeid: str) -> str:
    """What a worker takes as one piece: a file, or all tests of one engine."""
    file, _, test = nodeid.partition("::")
    if file.startswith(LIVE_RUN):
        return LIVE_RUN
    if not file.startswith(ENGINES):
        return file
    engine = test.partition("[")[2].rstrip("]").partition("-")[0]
    has_its_own = PurePosixPath(file).name in OWN_ENGINES
    if engine == "vllm" or (has_its_own and engine != "embedded"):
        return f"{ENGINES}[vllm]"
    return f"{file if has_its_own else ENGINES}[embedded]"


def rank_of(nodeid: str) -> int:
    """Its place in the order of beginning; tests of vLLM, one piece that takes minutes, are the first."""
    if group_of(nodeid).startswith(ENGINES) and "embedded" not in group_of(nodeid):
        return -1
    ranks = [rank for rank, folder in enumerate(LONGEST_FIRST) if nodeid.startswith(folder)]
    return min(ranks, default=len(LONGEST_FIRST))


def scheduler(config: pytest.Config, log: object) -> LoadScopeScheduling:
    """Hands out the groups in the order of the collection."""
    from xdist.scheduler import LoadScopeScheduling

    class GroupScheduling(LoadScopeScheduling):
        """With two changes for a worker that crashes, after which the base class may wait forever: what the crashed
        worker had done is not handed out again, nor is the test that crashed it, and a worker always has enough to
        go on with."""

        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

        def remove_node(self, node: WorkerController) -> str | None:
            """Returns the test that was running, which has failed; the rest of its group goes to another worker."""
            to_do = [
                (group, test)
                for group, tests in self.assigned_work[node].items()
                for test, done in tests.items()
                if not done
            ]
            left: dict[str, dict[str, bool]] = {}
            for group, test in to_do[1:]:
                left.setdefault(group, {})[test] = False
            self.assigned_work[node] = left
            super().remove_node(node)
            return to_do[0][1] if to_do else None

        def _reschedule(self, node: WorkerController) -> None:
            """A worker runs a test once it knows the next one, or that there is none."""
            if node.shutting_down or node not in self.registered_collections:
                return  # it ends, or still looks for its tests
            while self.workqueue and self._pending_of(self.assigned_work[node]) < 2:
                self._assign_work_unit(node)
            if not self.workqueue:
                node.shutdown()

    config.option.loadscopereorder = False
    return GroupScheduling(config, log)
