"""Waits between attempts: doubled, bounded, spread."""

from meshrl.client.backoff import Backoff


def test_waits_double_up_to_the_longest_and_start_anew_after_a_success():
    backoff = Backoff(0.1, 0.5, jitter=0.0)
    assert [backoff.next_s() for _ in range(5)] == [0.1, 0.2, 0.4, 0.5, 0.5]
    backoff.reset()
    assert backoff.next_s() == 0.1


def test_chance_shortens_a_wait_by_up_to_its_share():
    drawn = iter([0.0, 1.0, 0.5])
    backoff = Backoff(1.0, 1.0, draw=lambda: next(drawn))
    assert [backoff.next_s() for _ in range(3)] == [0.5, 1.0, 0.75]


def test_drawn_waits_differ():
    waits = {Backoff(1.0, 1.0).next_s() for _ in range(20)}
    assert len(waits) > 1
    assert all(0.5 <= wait <= 1.0 for wait in waits)
