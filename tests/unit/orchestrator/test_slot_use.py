import pytest

from meshrl.orchestrator.run import SlotUse


class Time:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Slots:
    number: int | None = None
    out = 0

    def __call__(self) -> int | None:
        return self.number

    def read_out(self) -> int:
        return self.out


def using(slots: int | None) -> tuple[SlotUse, Time, Slots]:
    time, said = Time(), Slots()
    said.number = slots
    return SlotUse(time, said, said.read_out), time, said


def test_idle_slots_are_counted_over_time_and_apart_while_a_batch_waits() -> None:
    use, time, said = using(10)
    said.out = 12  # two more than there are slots: they wait at the service, and nothing is idle
    use.note()
    time.now_s = 2.0
    with use.waiting():
        said.out = 4
        use.note()
        time.now_s = 3.0  # 4 of 10 for a second
        said.out = 3
        use.note()
        time.now_s = 4.0  # 3 of 10
    said.out = 0
    use.note()
    time.now_s = 5.0  # none, but nobody waits
    assert use.idle_shares() == pytest.approx(
        {"perf/engines_idle": 1 / 5, "perf/idle_slots": (6 + 7 + 10) / 50, "perf/tail_idle_slots": (6 + 7) / 50}
    )


def test_each_step_begins_anew_and_a_change_of_slots_counts_from_its_moment() -> None:
    use, time, said = using(2)
    said.out = 2
    use.note()
    time.now_s = 1.0
    said.number = 4
    assert use.idle_shares() == {"perf/engines_idle": 0.0, "perf/idle_slots": 0.0, "perf/tail_idle_slots": 0.0}
    time.now_s = 2.0
    assert use.idle_shares() == {"perf/engines_idle": 0.0, "perf/idle_slots": 0.5, "perf/tail_idle_slots": 0.0}


def test_without_known_slots_there_is_no_share_of_them() -> None:
    use, time, said = using(None)
    said.out = 3
    use.note()
    time.now_s = 1.0
    said.number = 3
    assert use.idle_shares() == {"perf/engines_idle": 0.0}
    time.now_s = 2.0
    said.number = None
    said.out = 2
    use.note()
    time.now_s = 9.0
    assert use.idle_shares() == {"perf/engines_idle": 0.0, "perf/idle_slots": 0.0, "perf/tail_idle_slots": 0.0}
