"""nim: its rules, its tasks, its demonstrations, and games against players whose moves are known."""

from __future__ import annotations

import random
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest
from meshrl.environments.nim.demonstrations import played_game
from meshrl.environments.nim.game import heaps, moves, read_move, right_move
from meshrl.environments.nim.taskset import NimConfig, NimData, NimEnv, NimTask


def wins(heap: int) -> bool:
    """Whether the mover can win, by trying every game."""
    return any(not wins(heap - taken) for taken in moves(heap))


@pytest.mark.parametrize("heap", range(1, 12))
def test_the_right_move_leaves_the_other_player_a_lost_heap(heap: int) -> None:
    right = right_move(heap)
    assert (right is not None) == wins(heap)
    assert right is None or not wins(heap - right)


@pytest.mark.parametrize(
    ("reply", "heap", "move"),
    [("2", 5, 2), ("3", 2, None), ("0", 5, None), ("4", 5, None), ("", 5, None), (" 1", 5, None), ("two", 5, None)],
)
def test_only_what_the_rules_allow_is_a_move(reply: str, heap: int, move: int | None) -> None:
    assert read_move(reply, heap) == move


def test_held_out_games_can_be_won_by_two_right_moves_or_more() -> None:
    assert set(heaps("held_out")) == {5, 6, 7, 9, 10, 11}
    assert set(heaps("train")) == set(range(1, 12))


def test_a_demonstration_is_a_whole_game_by_the_rules() -> None:
    first, second = played_game(11, shares=(1.0, 0.0), source=random.Random(0))
    assert [message["role"] for message in first[:3]] == ["system", "user", "assistant"]
    numbers = [[int(message["content"]) for message in seen[1:]] for seen in (first, second)]
    assert numbers[0][:2] == [11, 3]
    assert numbers[1][0] == 8
    assert all(taken in moves(heap) for seen in numbers for heap, taken in zip(seen[::2], seen[1::2], strict=True))
    assert numbers[0][-2] == numbers[0][-1]  # who never errs takes the last


class Seat:
    """A player whose replies are known, in place of an agent; without any it makes the right moves."""

    def __init__(self, replies: list[str]) -> None:
        self.replies, self.read = replies, []
        self.reward: dict[str, float] = {}
        self.metrics: dict[str, float] = {}
        self.trace = SimpleNamespace(
            record_reward=lambda name, value, weight: self.reward.update({name: value * weight}),
            record_metric=lambda name, value: self.metrics.update({name: value}),
        )

    @asynccontextmanager
    async def interaction(self, task):
        yield self

    async def turn(self, said):
        self.read.append(said)
        reply = self.replies.pop(0) if self.replies else str(right_move(int(said)))
        return SimpleNamespace(last_reply=reply, terminated=False)


async def play(heap: int, first: list[str], second: list[str], against: str = "itself") -> tuple[Seat, Seat]:
    seats = (Seat(first), Seat(second))
    data = NimData(idx=0, heap=heap, against=against)
    env = NimEnv.__new__(NimEnv)  # of its state `run` needs none
    await env.run(NimTask(data, NimConfig(id="nim").task), SimpleNamespace(first=seats[0], second=seats[1]))
    return seats


async def test_who_takes_the_last_match_wins() -> None:
    first, second = await play(7, ["3", "1"], ["2", "1"])
    assert (first.read, second.read) == (["7", "2"], ["4", "1"])
    assert (first.reward, second.reward) == ({"won": 0.0}, {"won": 1.0})
    assert (first.metrics, second.metrics) == (
        {"illegal": 0.0, "right_moves": 0.5},
        {"illegal": 0.0, "right_moves": 1.0},
    )


async def test_a_reply_that_is_no_move_loses_the_game() -> None:
    first, second = await play(5, ["1"], ["9"])
    assert (first.reward, second.reward) == ({"won": 1.0}, {"won": 0.0})
    assert (first.metrics["illegal"], second.metrics["illegal"]) == (0.0, 1.0)


async def test_the_expert_takes_the_second_seat_and_makes_no_mistake() -> None:
    won, nobody = await play(9, [], [], "expert")
    assert (won.read[0], won.reward, won.metrics) == ("9", {"won": 1.0}, {"illegal": 0.0, "right_moves": 1.0})
    assert (nobody.read, nobody.reward) == ([], {})
    lost, _ = await play(9, ["2", "1"], [], "expert")  # leaves 7, of which the expert takes 3, and 3
    assert (lost.read, lost.reward) == (["9", "4"], {"won": 0.0})
