"""textarena's games as tasksets, by name."""

from __future__ import annotations

import random
import sys
from typing import Any

import pytest
from meshrl.environments.textarena_games import taskset as adapter

from meshrl.core.config import ConfigError
from meshrl.core.config.shared import EnvConfig
from meshrl.rollout import hosting
from meshrl.wire.types import Sampling


def load(game: str, **args: Any) -> hosting.HostedEnvironment:
    config = EnvConfig(id=f"textarena:{game}", args=args)
    return hosting.load(
        config, model="m", harness="meshrl.environments.harness", max_turns=None, default_sampling=Sampling()
    )


async def played(game: str, moves: list[str], *, index: int = 0, **args: Any) -> tuple[adapter.Match, list[str]]:
    """A match after these moves, and what the game said before each."""
    match = adapter.Match((await load(game, **args).tasks.at(index)).data)
    said = []
    for move in moves:
        said.append(f"{match.mover}: {match.observation()}")
        match.move(move)
    return match, said


TIC_TAC_TOE = ["[4]", "[0]", "[1]", "[2]", "[7]"]


async def test_a_game_of_two_is_moved_in_turns_and_each_hears_the_others_moves() -> None:
    match, said = await played("TicTacToe-v0", TIC_TAC_TOE)
    assert [line[0] for line in said] == ["0", "1", "0", "1", "0"]
    assert "[Player 0] [4]" in said[1]
    assert "[Player 1]" not in said[0]
    assert (match.over, match.reward(0), match.reward(1)) == (True, 1.0, -1.0)


async def test_invalid_moves_end_a_game_for_who_made_them() -> None:
    match, _ = await played("TicTacToe-v0", ["nothing", "nothing again"])
    assert match.over
    assert (match.invalid(0), match.invalid(1)) == (True, False)
    assert match.reward(0) < match.reward(1)


async def test_a_game_that_is_not_over_gives_nothing() -> None:
    match, _ = await played("TicTacToe-v0", TIC_TAC_TOE[:2])
    assert (match.over, match.reward(0), match.reward(1)) == (False, 0.0, 0.0)


@pytest.mark.parametrize(
    ("game", "players", "moves"),
    [
        ("2048-v0", 1, ["[up]", "[left]", "[down]", "[right]"]),
        ("Blackjack-v0", 1, ["[Hit]", "[Stand]"]),
        ("FrozenLake-v0-random", 1, ["[right]", "[down]"]),
        ("GuessTheNumber-v0", 1, ["[7]", "[12]"]),
        ("Mastermind-v0", 1, ["[1 2 3 4]"]),
        ("Minesweeper-v0", 1, ["[2 2]"]),
        ("LightsOut-v0", 1, ["[1 1]"]),
        ("TowerOfHanoi-v0", 1, ["[A C]"]),
        ("ConnectFour-v0", 2, ["[col 3]", "[col 3]"]),
        ("KuhnPoker-v0", 2, ["[Check]", "[Bet]"]),
        ("LiarsDice-v0", 2, ["[Bid: 1, 2]", "[Call]"]),
        ("Nim-v0", 2, ["[0 1]", "[1 1]"]),
        ("PigDice-v0", 2, ["[roll]", "[hold]", "[roll]"]),
    ],
)
async def test_a_game_follows_from_seed_index_and_moves_alone(game: str, players: int, moves: list[str]) -> None:
    assert load(game).tasks.num_tasks == 1000
    first, said = await played(game, moves, index=7)
    random.seed(1)  # what is played beside it
    state = random.getstate()
    again, said_again = await played(game, moves, index=7)
    assert said == said_again
    assert (first.over, first.reward(0)) == (again.over, again.reward(0))
    assert random.getstate() == state
    assert {line[0] for line in said} <= {str(player) for player in range(players)}
    assert (await load(game).tasks.at(7)).data.players == players


async def test_another_seed_or_index_is_another_game() -> None:
    starts = [
        (await played("Minesweeper-v0", ["[2 2]", "[0 0]"], index=i, seed=s))[1][1] for i, s in ((0, 0), (1, 0), (0, 1))
    ]
    assert len(set(starts)) == 3


@pytest.mark.parametrize(
    ("game", "args", "words"),
    [
        ("TicTacTo-v0", {}, "textarena has no game 'TicTacTo-v0'; did you mean TicTacToe-v0"),
        ("2048-v0", {"colour": 3}, "2048-v0 has no option colour; its options are "),
        ("TicTacToe-v0", {"players": 1}, "TicTacToe-v0 cannot be played by that many players"),
        ("ThreePlayerIPD-v0", {}, "ThreePlayerIPD-v0 cannot be played by that many players"),
        ("Klondike-v0x", {}, "textarena has no game"),
        ("UsedCarNegotiation-v0", {}, "UsedCarNegotiation-v0 cannot be made here: FileNotFoundError"),
        ("", {}, "ids with a colon are reasoning_gym:<dataset>, textarena:<game>"),
    ],
)
def test_what_does_not_fit_is_said_with_what_does(game: str, args: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load(game, **args)


def test_without_the_package_it_is_said_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "textarena", None)
    adapter._package.cache_clear()
    adapter._players_of.cache_clear()
    with pytest.raises(ConfigError, match=r"uv sync --extra textarena, or uv pip install 'meshrl\[textarena\]'"):
        load("TicTacToe-v0")
    adapter._package.cache_clear()
