"""Whatever happens in whatever order, every rollout of a group is counted once and the limits hold."""

from hypothesis import given, settings
from hypothesis import strategies as st

from meshrl.rollout.groups import Admissions, Outcome
from meshrl.wire.errors import MeshError
from meshrl.wire.types import RolloutRequest

steps = st.lists(
    st.one_of(
        st.tuples(st.just("admit"), st.integers(1, 6), st.sampled_from(["", "a", "b"])),
        st.tuples(st.just("settle"), st.integers(0, 50), st.sampled_from([Outcome.FINISHED, Outcome.FAILED])),
        st.tuples(st.just("end"), st.integers(0, 50), st.sampled_from([Outcome.CANCELLED, Outcome.FAILED])),
    ),
    max_size=60,
)


@settings(max_examples=200, deadline=None)
@given(running=st.integers(1, 5), queued=st.integers(0, 6), events=steps)
def test_every_rollout_is_counted_once_and_the_limits_hold(running: int, queued: int, events: list[tuple]):
    table = Admissions(max_concurrent=running, max_queued=queued)
    admitted, playing = [], []
    for now, event in enumerate(events):
        if event[0] == "admit":
            try:
                request = RolloutRequest(
                    request_id=f"r{now}", group_id=f"g{now}", environment="e", group_size=event[1], deadline_s=60.0,
                    run_id=event[2],
                )  # fmt: skip
                admitted.append(table.admit(request, float(now)))
            except MeshError:
                assert table.running + table.queued + event[1] > running + queued
        elif event[0] == "settle" and playing:
            group, index = playing[event[1] % len(playing)]
            was_running = index in group.running
            assert table.record_outcome(group, index, event[2], float(now), reason="X") is was_running
        elif event[0] == "end" and admitted:
            table.end(admitted[event[1] % len(admitted)], event[2], float(now), reason="X")
        playing += table.start()
        assert table.running == sum(len(group.running) for group in admitted)
        assert table.queued == sum(len(group.waiting) for group in admitted)
        assert table.running <= running
        assert table.running + table.queued <= running + queued
        assert table.queued == 0 or table.running == running
    for group in admitted:
        ended = sum(group.ended.values())
        assert ended + len(group.running) + len(group.waiting) == group.request.group_size
        assert group.over == (ended == group.request.group_size)
