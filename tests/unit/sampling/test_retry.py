import pytest

from meshrl.sampling.retry import Patience
from meshrl.wire.errors import MeshError, Reason

AWAY = MeshError(Reason.UNREACHABLE, "gone")
BUSY = MeshError(Reason.OVERLOADED, "full")


def patience(**changes) -> Patience:
    return Patience(**({"unreachable_s": 5.0, "retry_s": 60.0, "jitter": lambda: 1.0} | changes))


@pytest.mark.parametrize("error", [BUSY, AWAY])
def test_waits_double_up_to_half_a_second(error: MeshError) -> None:
    waits = patience()
    assert [waits.wait_s(error, now_s=0.0) for _ in range(6)] == [0.05, 0.1, 0.2, 0.4, 0.5, 0.5]


def test_the_wait_that_the_service_asks_for_wins() -> None:
    assert patience().wait_s(MeshError(Reason.VERSION_NOT_AVAILABLE, "", retry_after_s=1.5), now_s=0.0) == 1.5


def test_what_cannot_succeed_is_not_repeated() -> None:
    assert patience().wait_s(MeshError(Reason.UNKNOWN_ENVIRONMENT, "no"), now_s=0.0) is None
    asked = patience(also=frozenset({Reason.UNKNOWN_VERSION}))
    assert asked.wait_s(MeshError(Reason.UNKNOWN_VERSION, "no"), now_s=0.0) is not None


def test_a_service_that_is_away_is_given_up_sooner_than_one_that_refuses() -> None:
    waits = patience()
    assert waits.wait_s(AWAY, now_s=0.0) is not None
    assert waits.wait_s(AWAY, now_s=5.0) is None
    assert waits.wait_s(BUSY, now_s=59.0) is not None
    assert waits.wait_s(BUSY, now_s=60.0) is None


def test_time_away_is_counted_anew_after_an_answer() -> None:
    waits = patience()
    waits.wait_s(AWAY, now_s=0.0)
    waits.wait_s(BUSY, now_s=4.0)
    assert waits.wait_s(AWAY, now_s=6.0) is not None
    assert waits.wait_s(AWAY, now_s=10.9) is not None
    assert waits.wait_s(AWAY, now_s=11.0) is None


def test_no_wait_is_shorter_than_the_service_asked_for() -> None:
    full = MeshError(Reason.OVERLOADED, "full", retry_after_s=1.5)
    waits = [patience(jitter=lambda drawn=drawn: drawn).wait_s(full, now_s=0.0) for drawn in (0.0, 0.25, 0.999, 1.0)]
    assert min(waits) >= 1.5
    assert len(set(waits)) == 4, "callers spread out all the same"
