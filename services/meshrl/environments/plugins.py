"""Finds the modules behind environment and harness ids, in the form in which verifiers loads them.

verifiers resolves a plugin by a top-level module name, so a dotted module is imported here once and entered in
`sys.modules` under its name with underscores.

A distribution gives its tasksets short ids by entry points: `meshrl.environments` has the module of each id, and
`meshrl.environments.families` the module and the option of ids with a colon.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points

TASKSETS = "meshrl.environments"
FAMILIES = "meshrl.environments.families"
_OWN_TASKSETS = "verifiers.v1.tasksets"
"""Where verifiers looks first."""

NAMESAKES = {
    "reverse-text": "meshrl's own short sentences (meshrl.environments.reverse_text), not the data of prime-rl's"
    " taskset of that id"
}
"""Ids of other packages' tasksets that name one of ours, and the difference."""


@cache
def registered(group: str = TASKSETS) -> Mapping[str, EntryPoint]:
    return {found.name: found for found in entry_points(group=group)}


def plugin_id(module_id: str) -> str:
    """The id under which verifiers finds a registered id, a dotted module, or an id of its own. Raises
    ModuleNotFoundError when a registered or dotted module does not exist."""
    found = registered().get(_short(module_id))
    dotted = found.module if found is not None else module_id
    if "." not in dotted or "/" in dotted:
        return module_id
    module = importlib.import_module(dotted)
    alias = dotted.replace(".", "_").lower()
    # Found under the second, it does not import all its own tasksets with their servers, half a second in each worker.
    for name in (alias, f"{_OWN_TASKSETS}.{alias}"):
        sys.modules.setdefault(name, module)
    return alias


def split_choice(taskset_id: str) -> tuple[str, dict[str, str]]:
    """The module of `family:choice` and the option that the choice sets; any other id as it is. Raises ValueError for a
    colon behind a taskset that takes none."""
    family, colon, choice = taskset_id.partition(":")
    if not colon:
        return taskset_id, {}
    families = registered(FAMILIES)
    found = families.get(_short(family))
    if found is None or not choice:
        known = ", ".join(f"{name}:<{found.attr}>" for name, found in sorted(families.items()))
        raise ValueError(
            f"{taskset_id!r} is no taskset: ids with a colon are {known}"
            if known
            else f"{taskset_id!r} is no taskset: ids with a colon are those of meshrl-examples, which is not installed"
        )
    return found.module, {found.attr: choice}


def is_registered(taskset_id: str) -> bool:
    return _short(taskset_id) in registered()


def _short(name: str) -> str:
    return name.replace("-", "_").lower()
