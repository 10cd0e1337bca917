"""Hub and agents under every order of events: crashes, lost messages, faults, restarts, groups that break."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import invariant

from meshrl.weights.coordinator import states as hub
from meshrl.weights.coordinator.coordinator import Coordinator
from meshrl.wire.types import AgentState, Transport, VersionState
from weight_sync_mesh import SimulatedMesh
from weight_sync_model import ENGINES, KEPT_ENDED, TORN

SLACK = 8  # versions that an engine served until lately, and those whose row is on its way to the log


class WeightSync(SimulatedMesh):
    # --- what must always hold ------------------------------------------------------------------------

    @invariant()
    def engines_serve_only_whole_decided_versions(self) -> None:
        decided = self.decided_artifacts()
        for engine in self.engines.values():
            for run_id, machine in engine.machine.lines.items():
                line = engine.lines[run_id]
                if line.live == TORN:
                    assert line.paused
                    assert machine.version is None
                    assert machine.state not in (AgentState.READY, AgentState.FETCHING)
                elif machine.version is not None:
                    assert line.live in decided
                    assert self.manifests[line.live].run_id == run_id
                    assert machine.version == self.manifests[line.live].version

    @invariant()
    def hub_routes_only_to_engines_with_a_decided_version(self) -> None:
        decided = [self.manifests[artifact] for artifact in self.decided_artifacts()]
        vouched = {(manifest.run_id, manifest.version, manifest.result_root) for manifest in decided}
        for info in self.coordinator.engines("", self.now_s):
            lines = self.coordinator.pool.engines[info.engine_id].lines
            assert not info.routable or any((run, line.serving, line.root) in vouched for run, line in lines.items())

    @invariant()
    def decisions_only_go_forward(self) -> None:
        decided = [save.decision for save in self.history if save.decision is not None]
        for run_id in self.RUNS:
            mine = [key for key in decided if key.run_id == run_id]
            assert mine == sorted(set(mine))

    @invariant()
    def log_gives_back_the_same_versions(self) -> None:
        if self.pending:
            return
        replayed = self.new_hub()
        replayed.recover(self.disk, self.now_s, self.now_s)
        assert replayed.epochs == self.coordinator.epochs
        assert replayed.revision == self.coordinator.revision
        assert replayed.groups.current == self.coordinator.groups.current
        assert known(replayed) == known(self.coordinator)

    @invariant()
    def records_and_log_stay_small(self) -> None:
        for line in self.coordinator.lines.values():
            ended = [record for record in line.records.values() if record.state not in hub.LIVE]
            served = [r for r in ended if any(e.serves(r) for e in line.engines)]
            assert len(ended) <= KEPT_ENDED + len(served) + SLACK
            if self.disk is not None:
                mine = [key for key in self.disk.versions if key.run_id == line.run_id]
                assert len(mine) <= len(line.records) + SLACK

    @invariant()
    def at_most_the_kept_versions_stay_committed(self) -> None:
        for line in self.coordinator.lines.values():
            states = [record.state for record in line.records.values()]
            assert states.count(VersionState.COMMITTED) <= 2

    # --- and what must come in the end ------------------------------------------------------------------

    def gone_with_its_trainer(self, record: hub.VersionRecord) -> bool:
        """Its bytes were only ever in the memory of a trainer that is no more."""
        bytes_here = record.transport is not Transport.NCCL or record.copied
        return not bytes_here and record.key.epoch != self.epoch[record.key.run_id]

    def publisher_goes_on(self, which: int, turn: int) -> None:
        """A publisher without trouble: it sends the newest version, copies it to the hub, and goes forward."""
        run_id = self.run(which)
        line = self.line(run_id)
        decided = None if line is None else line.records.newest_decided()
        if turn == 0 and decided is not None and self.gone_with_its_trainer(decided):
            self.next_version[run_id] = max(self.next_version[run_id], decided.version)
            self.publish_and_activate(which, 0, False, 0, Transport.NCCL)
        if turn % 4 == 1 and not self.adapters:
            self.copy(True)
        newest = self.newest(run_id)
        if turn % 4 == 2 and newest is not None and newest.state is VersionState.SEALED:
            self.activate(
                which, self.next_version[run_id] - 1 - newest.version, False, 0
            )  # only the newest comes again
        if turn % 4 == 3:
            self.send()

    def teardown(self) -> None:
        """With no more trouble, every engine comes to serve the newest decided versions and none stays paused."""
        for turn in range(80):
            self.now_s += 1.0
            for which in range(len(self.RUNS)):
                self.publisher_goes_on(which, turn)
            for name in ENGINES:
                self.connect(name)
                self.command_arrives(name, 9)
                self.join_ends(name, True)
                for which in range(len(self.RUNS)):
                    self.fetch_ends(name, which, True)
                    self.apply_ends(name, which, True)
                    self.resume_ends(name, which)
                self.report_arrives(name, 9)
            self.time_passes(0.1, True)
            while self.pending:
                self.perform_one()
        served = [run_id for run_id in self.RUNS if self.ends_well(run_id)]
        infos = self.coordinator.engines("", self.now_s)
        assert not served or [info.routable for info in infos] == [True, True]

    def ends_well(self, run_id: str) -> bool:
        """Whether a run has a version that must be served; it is, by every engine."""
        line = self.line(run_id)
        newest = None if line is None else line.records.newest_decided()
        if line is None or newest is None or self.gone_with_its_trainer(newest):
            return False
        assert newest.state is VersionState.COMMITTED
        for engine in self.engines.values():
            machine, mine = engine.machine.lines[run_id], engine.lines[run_id]
            assert not mine.paused
            assert machine.state in (AgentState.READY, AgentState.PREPARED)
            assert machine.version == newest.version
            assert self.manifests[mine.live].result_root == newest.root
        assert all(line.routable(engine) for engine in self.coordinator.pool.engines.values())
        return True


def known(coordinator: Coordinator) -> dict[hub.Key, object]:
    return {
        key: (record.state, record.artifact_id, record.answer)
        for line in coordinator.lines.values()
        for key, record in line.records.items()
    }


class TwoRuns(WeightSync):
    """Two adapters on the same engines: neither line does anything to the other."""

    RUNS = ("a", "b")


for machine in (WeightSync, TwoRuns):
    machine.TestCase.settings = settings(
        max_examples=60, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
    )
test_weight_sync = WeightSync.TestCase
test_two_runs = TwoRuns.TestCase


def walk(kind: type[WeightSync], seed: int, steps: int) -> WeightSync:
    """A long run with the trouble rare enough that versions get through; checks everything after every step."""
    draw = random.Random(seed)
    mesh = kind()
    trouble = draw.choice([0.0, 0.02, 0.05, 0.15])
    transports = draw.choice([[Transport.STREAM], [Transport.NCCL], [Transport.STREAM, Transport.NCCL]])

    # A transfer in a group has more steps: versions come less often there, or none would get through.
    publishing = 1.0 if Transport.NCCL not in transports else 0.5

    def flip() -> bool:
        return draw.random() < 0.5

    def which() -> int:
        return draw.randrange(len(mesh.RUNS))

    usual: list[tuple[float, Callable[[str], None]]] = [
        (
            publishing,
            lambda _: mesh.publish(which(), draw.randrange(4), draw.random() < 0.8, 0, draw.choice(transports), flip()),
        ),
        (1.0, lambda _: mesh.activate(which(), draw.choice([0, 0, 0, 1, 2]), flip(), draw.choice([0, 0, 0, 1, 2]))),
        (4.0, lambda _: mesh.hub_works(draw.randrange(1, 12))),
        (3.0, lambda name: mesh.connect(name)),
        (4.0, lambda name: mesh.command_arrives(name, draw.randrange(1, 4))),
        (4.0, lambda name: mesh.report_arrives(name, draw.randrange(1, 4))),
        (3.0, lambda name: mesh.fetch_ends(name, which(), draw.random() > 2 * trouble)),
        (3.0, lambda name: mesh.apply_ends(name, which(), draw.random() > 3 * trouble)),
        (3.0, lambda name: mesh.resume_ends(name, which())),
        (1.0, lambda _: mesh.time_passes(draw.choice([0.1, 0.5, 2.0]), draw.random() > trouble)),
    ]
    if Transport.NCCL in transports:
        usual += [
            (0.2, lambda _: mesh.open_group()),
            (0.3, lambda _: mesh.copy(flip())),
            (1.0, lambda _: mesh.group_goes_on(draw.randrange(1, 10))),
            (3.0, lambda name: mesh.join_ends(name, draw.random() > trouble)),
            (1.0, lambda _: mesh.send()),
        ]
    rare: list[Callable[[str], None]] = [
        lambda _: mesh.hub_crashes_and_restarts(True, flip()),
        lambda _: mesh.trainer_restarts(which(), draw.randrange(3), True),
        lambda _: mesh.abort(which(), draw.randrange(3), True),
        lambda name: mesh.session_breaks(name, True),
        lambda name: mesh.engine_is_killed(name, True),
        lambda _: mesh.time_passes(25.0, flip()),
    ]
    weights = [weight for weight, _ in usual]
    for _ in range(steps):
        name = draw.choice(ENGINES)
        if draw.random() < trouble:
            draw.choice(rare)(name)
        else:
            draw.choices(usual, weights)[0][1](name)
        mesh.engines_serve_only_whole_decided_versions()
        mesh.hub_routes_only_to_engines_with_a_decided_version()
        mesh.decisions_only_go_forward()
        mesh.log_gives_back_the_same_versions()
        mesh.at_most_the_kept_versions_stay_committed()
        mesh.records_and_log_stay_small()
    mesh.teardown()
    return mesh


def walked(kind: type[WeightSync]) -> Counter[str]:
    """What happened in long runs."""
    kinds: Counter[str] = Counter()
    for seed in range(50):
        mesh = walk(kind, seed, 400)
        rows = [row for save in mesh.history for row in save.versions.values()]
        kinds.update("forgotten" if row is None else row["state"] for row in rows)
        kinds["epoch"] += len({tuple(save.run["epochs"].items()) for save in mesh.history})
        kinds["group"] += sum(len(save.groups) for save in mesh.history)
        kinds["sent"] += mesh.sent
    return kinds


def test_long_runs_keep_the_law_and_get_versions_through() -> None:
    kinds = walked(WeightSync)
    # The walk would prove nothing if little happened in it.
    assert kinds["committed"] > 50
    assert kinds["retired"] > 15
    assert kinds["aborted"] > 50
    assert kinds["epoch"] > 30
    assert kinds["group"] > 50
    assert kinds["sent"] > 50
    assert kinds["forgotten"] > 45


def test_two_runs_keep_the_law_and_get_versions_through() -> None:
    kinds = walked(TwoRuns)
    assert kinds["committed"] > 50
    assert kinds["retired"] > 15
    assert kinds["aborted"] > 50
    assert kinds["epoch"] > 30


@pytest.mark.parametrize("power_cut", [False, True])
def test_a_hub_that_is_killed_after_any_entry_brings_both_runs_on(power_cut: bool) -> None:
    """Restarts at each entry of the log in turn: what was decided is served in the end, for both runs."""
    for entry in range(1, 24):
        mesh = TwoRuns()
        for turn in range(60):
            mesh.publish_and_activate(turn, turn % 4, False, 0, Transport.STREAM)
            for name in ENGINES:
                mesh.engines_go_on((name,), turn, 8, True)
            mesh.report_arrives(ENGINES[turn % 2], 3)
            if len(mesh.history) >= entry:
                mesh.hub_crashes_and_restarts(True, power_cut)
                break
        mesh.engines_serve_only_whole_decided_versions()
        mesh.log_gives_back_the_same_versions()
        mesh.teardown()
        assert mesh.line("a") is not None
