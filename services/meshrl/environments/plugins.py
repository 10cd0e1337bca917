"""Finds the modules behind environment and harness ids, in the form in which verifiers loads them.

verifiers resolves a plugin by a top-level module name, so a dotted module (`meshrl.environments.harness`, or one
inside a user's own package) is imported here once and entered in `sys.modules` under its name with underscores;
verifiers then finds that very module. Nothing is loaded twice and nothing of verifiers is changed.
"""

from __future__ import annotations

import importlib
import sys

BUNDLED = {
    "letter_sort": "meshrl.environments.letter_sort",
    "memory_game": "meshrl.environments.memory_game",
    "nim": "meshrl.environments.nim",
    "reverse_text": "meshrl.environments.reverse_text",
    "reasoning_gym": "meshrl.environments.reasoning_gym",
    "textarena_games": "meshrl.environments.textarena_games",
    "word_trail": "meshrl.environments.word_trail",
}
"""Short names of the tasksets in this package."""

NAMESAKES = {
    "reverse-text": "meshrl's own short sentences (meshrl.environments.reverse_text), not the data of prime-rl's"
    " taskset of that id"
}
"""Ids of other packages' tasksets that name one of this package, and the difference."""

CHOOSING = {
    "reasoning_gym": ("reasoning_gym", "dataset"),
    "textarena": ("textarena_games", "game"),  # verifiers has a taskset textarena, which fetches word lists
}
"""Bundled tasksets that are many: an id `reasoning_gym:leg_counting` says which. By what stands before the colon the
taskset's short name and the option that the rest sets."""


def plugin_id(module_id: str) -> str:
    """Returns the id under which verifiers finds `module_id`: a bundled short name, a dotted module, or an id of its
    own.

    Raises ModuleNotFoundError when a bundled or dotted module does not exist.
    """
    dotted = BUNDLED.get(_short(module_id), module_id)
    if "." not in dotted or "/" in dotted:
        return module_id
    module = importlib.import_module(dotted)
    alias = dotted.replace(".", "_").lower()
    sys.modules.setdefault(alias, module)
    return alias


def split_choice(taskset_id: str) -> tuple[str, dict[str, str]]:
    """The id of a taskset without what stands behind a colon, and the option that this sets.

    Raises ValueError for a colon behind a taskset that takes none.
    """
    family, colon, choice = taskset_id.partition(":")
    if not colon:
        return taskset_id, {}
    if _short(family) not in CHOOSING or not choice:
        known = ", ".join(f"{name}:<{option}>" for name, (_, option) in CHOOSING.items())
        raise ValueError(f"{taskset_id!r} is no taskset: ids with a colon are {known}")
    name, option = CHOOSING[_short(family)]
    return name, {option: choice}


def is_bundled(taskset_id: str) -> bool:
    """True for a short name of a taskset in this package."""
    return _short(taskset_id) in BUNDLED


def _short(name: str) -> str:
    return name.replace("-", "_").lower()
