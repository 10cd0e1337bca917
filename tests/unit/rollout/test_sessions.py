"""What is kept beside a trace."""

import numpy as np

from meshrl.rollout.engines.calls import Call, Session
from meshrl.wire.types.routes import Routes


def test_the_first_call_has_the_seed_of_its_rollout_and_every_other_call_its_own():
    first, second = Session(), Session(stream=1)
    seeds = [first.next_seed(7), first.next_seed(7), first.next_seed(7), second.next_seed(7), second.next_seed(7)]
    assert seeds[0] == 7
    assert len({*seeds, first.next_seed(8), Session().next_seed(8)}) == 7
    assert all(0 <= seed < 2**63 for seed in seeds)


def routed(tokens: list[int], start: int, salt: int = 0) -> Call:
    """A call over these tokens, of which the engine reported routes from `start` on: made of token, place and salt."""
    return Call([tokens[-1]], (), routes=made_of(tokens, salt)[start:-1], tokens=np.array(tokens, np.int32))


def made_of(tokens: list[int], salt: int = 0) -> Routes:
    rows = [[[token + salt, place]] for place, token in enumerate(tokens)]
    return np.array(rows, dtype=np.uint8)


def test_routes_of_turns_are_asked_for_once_and_joined() -> None:
    session = Session(keeps_routes=True)
    first = [1, 2, 3, 4]
    assert session.routes_from([1, 2, 3]) == 0
    session.calls.append(routed(first, 0))
    assert session.routes_from([*first, 5, 6]) == 3  # an engine never computes the last token of a call
    second = [*first, 5, 6, 7, 8]
    session.calls.append(routed(second, 3, salt=40))
    joined = session.routes_of(np.array([*second, 9], np.int32))
    assert joined is not None
    expected = np.concatenate([made_of(first)[:3], made_of(second, 40)[3:7]])
    np.testing.assert_array_equal(joined[:7], expected)
    assert (joined[7:] == 255).all()


def test_a_history_that_split_has_the_routes_of_what_both_begin_with() -> None:
    session = Session(keeps_routes=True)
    session.calls += [routed([1, 2, 3, 4], 0), routed([1, 2, 7, 8, 9], session.routes_from([1, 2, 7, 8]) + 2, salt=9)]
    other = session.routes_of(np.array([1, 2, 7, 8, 9], np.int32))
    assert other is not None
    np.testing.assert_array_equal(other[:2], made_of([1, 2]))
    np.testing.assert_array_equal(other[2:4], made_of([1, 2, 7, 8, 9], 9)[2:4])
    assert session.routes_of(np.array([6, 6], np.int32)) is None
    assert Session().routes_of(np.array([1, 2], np.int32)) is None


def test_what_no_engine_reported_is_unknown() -> None:
    session = Session(keeps_routes=True)
    session.calls += [Call([4], ()), routed([1, 2, 3, 4, 5], 3)]  # the first engine reported none
    joined = session.routes_of(np.array([1, 2, 3, 4, 5], np.int32))
    assert joined is not None
    assert (joined[:3] == 255).all()
    np.testing.assert_array_equal(joined[3], made_of([1, 2, 3, 4, 5])[3])
