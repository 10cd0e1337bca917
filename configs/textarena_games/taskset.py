"""textarena's games as tasksets: `textarena:2048-v0` for one player, `textarena:TicTacToe-v0` as self-play.

A game is made from seed and index alone; nothing is downloaded, so games that need word lists, keys or files from
elsewhere are refused. The policy gets the game's messages as the user's turns, and each reply is a move.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
import json
import random
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AsyncExitStack, contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Self

import numpy as np
import verifiers.v1 as vf
from pydantic import ConfigDict, Field, model_validator

if TYPE_CHECKING:
    import textarena


__all__ = ["TextArenaGameEnv", "TextArenaGameTaskset"]

INSTALL = "uv sync --extra textarena, or uv pip install 'meshrl[textarena]'"
SYSTEM_PROMPT = "You play a game. Give each move in square brackets, in the form in which the game asks for it."
MOST_PLAYERS = 2
RAW = "-raw"
"""textarena's suffix for a game without wrappers, which shows only what is new since the player's last move."""


class TextArenaGameConfig(vf.TasksetConfig):  # type: ignore[misc]  # verifiers is untyped for the checker
    """Which game, how many tasks, and the game's own options, such as `max_turns`."""

    model_config = ConfigDict(extra="allow")

    game: str = ""
    """A game of textarena; the id `textarena:NAME` sets it."""

    size: int = Field(default=1000, ge=1)
    """Number of tasks."""

    seed: int = 0
    """Seed of all tasks; held-out tasks want one of their own."""

    players: int | None = Field(default=None, ge=1, le=MOST_PLAYERS)
    """Players of a game. None: the fewest that the game takes."""

    @property
    def options(self) -> dict[str, object]:
        return dict(self.model_extra or {})

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if not self.game:
            raise ValueError("which game? write the id as textarena:TicTacToe-v0, or set args.game")
        self.players = players_of(self.game, self.options, self.players)
        return self


class TextArenaGameData(vf.TaskData):  # type: ignore[misc]  # verifiers is untyped for the checker
    game: str
    options: dict[str, object]
    players: int
    seed: int


class TextArenaGameTask(vf.Task[TextArenaGameData]):  # type: ignore[misc]  # verifiers is untyped for the checker
    """Play the game to its end. The environment records the reward, which is the game's own."""


class TextArenaGameTaskset(vf.Taskset[TextArenaGameTask, TextArenaGameConfig]):  # type: ignore[misc]  # verifiers is untyped
    @property
    def num_tasks(self) -> int:
        return int(self.config.size)

    def task_at(self, index: int) -> TextArenaGameTask:
        config = self.config
        data = TextArenaGameData(
            name=f"{config.game}#{index}",
            system_prompt=SYSTEM_PROMPT,
            game=config.game,
            options=config.options,
            players=config.players,
            seed=random.Random(f"{config.seed}/{index}").getrandbits(31),
        )
        return TextArenaGameTask(data, config.task)

    def load(self) -> Iterable[TextArenaGameTask]:
        return map(self.task_at, range(self.num_tasks))


class TextArenaGameEnvConfig(vf.EnvConfig):  # type: ignore[misc]  # verifiers is untyped for the checker
    """Who plays. Games for one player have no opponent."""

    player: vf.AgentConfig = vf.AgentConfig()
    opponent: vf.AgentConfig = vf.AgentConfig()


class TextArenaGameEnv(vf.Env[TextArenaGameEnvConfig]):  # type: ignore[misc]  # verifiers is untyped for the checker
    """The player to move gets the game's messages, and the reply is the move."""

    async def run(self, task: TextArenaGameTask, agents: vf.Agents) -> None:
        match = Match(task.data)
        seats = (agents.player, agents.opponent)
        playing: dict[int, vf.Interaction] = {}
        cut = False
        async with AsyncExitStack() as stack:
            while not match.over and not cut:
                mover = match.mover
                if mover not in playing:  # only then: who never moved has nothing to learn from
                    playing[mover] = await stack.enter_async_context(seats[mover].interaction(task))
                segment = await playing[mover].turn(match.observation())
                cut = segment.terminated
                if segment.last_reply is not None:
                    match.move(segment.last_reply)
        for number, interaction in playing.items():
            interaction.trace.record_reward("game_reward", match.reward(number), 1.0)
            interaction.trace.record_metric("finished", float(match.over))
            interaction.trace.record_metric("invalid_move", float(match.invalid(number)))


class Match:
    """One game.

    Games draw from Python's and numpy's global random numbers. Each match has states of its own, in place while the
    game moves, so that the same moves always lead to the same game.
    """

    def __init__(self, data: TextArenaGameData) -> None:
        self._python_numbers = random.Random(data.seed).getstate()
        self._numpy_numbers = np.random.RandomState(data.seed).get_state()
        self.over = False
        with self._own_numbers():
            self._env = _created(data.game, data.options)
            self._env.reset(num_players=data.players, seed=data.seed)

    @property
    def mover(self) -> int:
        return int(self._env.state.current_player_id)

    def observation(self) -> str:
        """The game's messages to the mover since its last move."""
        kinds = _package().ObservationType
        with self._own_numbers():
            player, messages = self._env.get_observation()
        names = self._env.state.role_mapping
        said = []
        for speaker, text, kind in messages:
            if kind is not kinds.PLAYER_ACTION:
                said.append(str(text).strip())
            elif speaker != player:
                said.append(f"[{names.get(speaker, f'Player {speaker}')}] {text}")
        return "\n".join(said) or "Your move."

    def move(self, reply: str) -> None:
        with self._own_numbers():
            self.over = bool(self._env.step(reply)[0])

    def reward(self, player: int) -> float:
        """0 while the game is not over."""
        return float((self._env.state.rewards or {}).get(player, 0.0)) if self.over else 0.0

    def invalid(self, player: int) -> bool:
        """The player's invalid moves ended the game."""
        return bool(self._env.state.game_info.get(player, {}).get("invalid_move", False))

    @contextmanager
    def _own_numbers(self) -> Iterator[None]:
        others = random.getstate(), np.random.get_state()
        random.setstate(self._python_numbers)
        np.random.set_state(self._numpy_numbers)
        try:
            yield
        finally:
            self._python_numbers, self._numpy_numbers = random.getstate(), np.random.get_state()
            random.setstate(others[0])
            np.random.set_state(others[1])


def players_of(game: str, options: Mapping[str, object], asked: int | None) -> int:
    """Raises ValueError for a game that cannot be played here, and ImportError."""
    return _players_of(game, json.dumps(options, sort_keys=True), asked)


@functools.lru_cache(maxsize=256)
def _players_of(game: str, options: str, asked: int | None) -> int:
    refused: list[str] = []
    for players in (asked,) if asked else range(1, MOST_PLAYERS + 1):
        try:
            Match(TextArenaGameData(game=game, options=json.loads(options), players=players, seed=0))
        except (AssertionError, IndexError, KeyError) as error:
            refused.append(f"{players}: {error}")
        else:
            return players
    raise ValueError(f"textarena's {game} cannot be played by that many players ({'; '.join(refused)})")


def _created(game: str, options: Mapping[str, object]) -> textarena.Env:
    """Raises ValueError for a wrong name or option, or a game that lacks something."""
    package = _package()
    known = package.envs.registration.ENV_REGISTRY
    if game + RAW not in known:
        names = sorted(name.removesuffix(RAW) for name in known if name.endswith(RAW))
        close = difflib.get_close_matches(game, names, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(close)}?" if close else f"there are {', '.join(names)}"
        raise ValueError(f"textarena has no game {game!r}; {hint}")
    try:
        if unknown := sorted(set(options) - (takes := _options_of(known[game + RAW].entry_point))):
            raise ValueError(f"{game} has no option {', '.join(unknown)}; its options are {', '.join(sorted(takes))}")
        return package.make(game + RAW, **options)
    except LookupError as error:  # nltk's, with a page of text
        raise ValueError(f"textarena's {game} needs a word list of nltk that is not on this machine") from error
    except (ImportError, OSError, SyntaxError) as error:
        raise ValueError(f"textarena's {game} cannot be made here: {type(error).__name__}: {error}") from error


def _options_of(entry_point: str) -> set[str]:
    module, _, name = entry_point.partition(":")
    return set(inspect.signature(getattr(importlib.import_module(module), name)).parameters)


@functools.cache
def _package() -> ModuleType:
    """Imported when it is first needed. Raises ImportError."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the compilation of a package
            import textarena
            import textarena.envs.registration
    except ModuleNotFoundError as error:
        raise ImportError(f"textarena is not installed ({error}); install it: {INSTALL}") from error
    module: ModuleType = textarena
    return module
