"""Hub and agents under every order of events: crashes, lost messages, faults, restarts, groups that break."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

from hypothesis import HealthCheck, settings
from hypothesis.stateful import invariant

from meshrl.weights.coordinator import states as hub
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
            machine = engine.machine
            if engine.live == TORN:
                assert engine.paused
                assert machine.version is None
                assert machine.state not in (AgentState.READY, AgentState.FETCHING)
            elif machine.version is not None:
                assert engine.live in decided
                assert machine.version == self.manifests[engine.live].version

    @invariant()
    def hub_routes_only_to_engines_with_a_decided_version(self) -> None:
        decided = [self.manifests[artifact] for artifact in self.decided_artifacts()]
        vouched = {(manifest.version, manifest.result_root) for manifest in decided}
        for info in self.coordinator.pool.infos("", self.coordinator.records.values(), self.now_s):
            if info.routable:
                record = self.coordinator.pool.engines[info.engine_id]
                assert (record.serving, record.root) in vouched

    @invariant()
    def decisions_only_go_forward(self) -> None:
        decided = [tuple(row["key"]) for row in self.rows_in(VersionState.COMMITTING)]
        assert decided == sorted(set(decided))

    @invariant()
    def log_gives_back_the_same_versions(self) -> None:
        if self.pending:
            return
        replayed = self.new_hub()
        replayed.recover(self.disk, self.now_s, self.now_s)
        assert replayed.epoch == self.coordinator.epoch
        assert replayed.revision == self.coordinator.revision
        assert replayed.groups.current == self.coordinator.groups.current
        mine = {key: (r.state, r.artifact_id, r.answer) for key, r in self.coordinator.records.items()}
        assert {key: (r.state, r.artifact_id, r.answer) for key, r in replayed.records.items()} == mine

    @invariant()
    def records_and_log_stay_small(self) -> None:
        ended = [record for record in self.coordinator.records.values() if record.state not in hub.LIVE]
        served = [r for r in ended if any(e.serves(r) for e in self.coordinator.pool.engines.values())]
        assert len(ended) <= KEPT_ENDED + len(served) + SLACK
        if self.disk is not None:
            assert len(self.disk.versions) <= len(self.coordinator.records) + SLACK

    @invariant()
    def at_most_the_kept_versions_stay_committed(self) -> None:
        states = [record.state for record in self.coordinator.records.values()]
        assert states.count(VersionState.COMMITTED) <= 2

    # --- and what must come in the end ------------------------------------------------------------------

    def gone_with_its_trainer(self, record: hub.VersionRecord) -> bool:
        """Its bytes were only ever in the memory of a trainer that is no more."""
        return record.transport is Transport.NCCL and record.key[0] != self.epoch

    def publisher_goes_on(self, turn: int) -> None:
        """A publisher without trouble: it sends the newest version, again where engines lack it, and goes forward."""
        decided = self.coordinator.newest_decided()
        if turn == 0 and decided is not None and self.gone_with_its_trainer(decided):
            self.next_version = max(self.next_version, decided.version)
            self.publish_and_activate(0, False, 0, Transport.NCCL)
        if turn % 4 == 1:
            self.open_group(True)
        newest = self.newest()
        if turn % 4 == 2 and newest is not None and newest.state is VersionState.SEALED:
            self.activate(self.next_version - 1 - newest.version, False, 0)  # only the newest is ever sent again
        if turn % 4 == 3:
            self.send()

    def teardown(self) -> None:
        """With no more trouble, every engine comes to serve the newest decided version and none stays paused."""
        for turn in range(80):
            self.now_s += 1.0
            self.publisher_goes_on(turn)
            for name in ENGINES:
                self.connect(name)
                self.command_arrives(name, 9)
                self.join_ends(name, True)
                self.fetch_ends(name, True)
                self.apply_ends(name, True)
                self.resume_ends(name)
                self.report_arrives(name, 9)
            self.time_passes(0.1, True)
            while self.pending:
                self.perform_one()
        newest = self.coordinator.newest_decided()
        if newest is None or self.gone_with_its_trainer(newest):
            return
        assert newest.state is VersionState.COMMITTED
        for engine in self.engines.values():
            assert not engine.paused
            assert engine.machine.state in (AgentState.READY, AgentState.PREPARED)
            assert engine.machine.version == newest.version
            assert self.manifests[engine.live].result_root == newest.root
        infos = self.coordinator.pool.infos("", self.coordinator.records.values(), self.now_s)
        assert [info.routable for info in infos] == [True, True]


WeightSync.TestCase.settings = settings(
    max_examples=60, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
)
test_weight_sync = WeightSync.TestCase


def walk(seed: int, steps: int) -> WeightSync:
    """A long run with the trouble rare enough that versions get through; checks everything after every step."""
    draw = random.Random(seed)
    mesh = WeightSync()
    trouble = draw.choice([0.0, 0.02, 0.05, 0.15])
    transports = draw.choice([[Transport.STREAM], [Transport.NCCL], [Transport.STREAM, Transport.NCCL]])

    # A transfer in a group has more steps: versions come less often there, or none would get through.
    publishing = 1.0 if Transport.NCCL not in transports else 0.5

    def flip() -> bool:
        return draw.random() < 0.5

    usual: list[tuple[float, Callable[[str], None]]] = [
        (
            publishing,
            lambda _: mesh.publish(draw.randrange(4), draw.random() < 0.8, 0, draw.choice(transports), flip()),
        ),
        (1.0, lambda _: mesh.activate(draw.choice([0, 0, 0, 1, 2]), flip(), draw.choice([0, 0, 0, 1, 2]))),
        (4.0, lambda _: mesh.hub_works(draw.randrange(1, 12))),
        (3.0, lambda name: mesh.connect(name)),
        (4.0, lambda name: mesh.command_arrives(name, draw.randrange(1, 4))),
        (4.0, lambda name: mesh.report_arrives(name, draw.randrange(1, 4))),
        (3.0, lambda name: mesh.fetch_ends(name, draw.random() > 2 * trouble)),
        (3.0, lambda name: mesh.apply_ends(name, draw.random() > 3 * trouble)),
        (3.0, lambda name: mesh.resume_ends(name)),
        (1.0, lambda _: mesh.time_passes(draw.choice([0.1, 0.5, 2.0]), draw.random() > trouble)),
    ]
    if Transport.NCCL in transports:
        usual += [
            (0.2, lambda _: mesh.open_group(flip())),
            (1.0, lambda _: mesh.group_goes_on(flip(), draw.randrange(1, 9))),
            (3.0, lambda name: mesh.join_ends(name, draw.random() > trouble)),
            (1.0, lambda _: mesh.send()),
        ]
    rare: list[Callable[[str], None]] = [
        lambda _: mesh.hub_crashes_and_restarts(True),
        lambda _: mesh.trainer_restarts(draw.randrange(3), True),
        lambda _: mesh.abort(draw.randrange(3), True),
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


def test_long_runs_keep_the_law_and_get_versions_through() -> None:
    kinds: Counter[str] = Counter()
    for seed in range(50):
        mesh = walk(seed, 400)
        rows = [row for save in mesh.history for row in save.versions.values()]
        kinds.update("forgotten" if row is None else row["state"] for row in rows)
        kinds["epoch"] += len({save.run["epoch"] for save in mesh.history})
        kinds["group"] += sum(len(save.groups) for save in mesh.history)
        kinds["sent"] += mesh.sent
    # The walk would prove nothing if little happened in it.
    assert kinds["committed"] > 50
    assert kinds["retired"] > 15
    assert kinds["aborted"] > 50
    assert kinds["epoch"] > 30
    assert kinds["group"] > 50
    assert kinds["sent"] > 50
    assert kinds["forgotten"] > 45
