"""Explains why an environment's module cannot be loaded, and how to install it."""

from __future__ import annotations

import difflib
import importlib.util
import pkgutil
import re
import sys
from pathlib import Path

from meshrl.environments.plugins import registered

HUB = "https://hub.primeintellect.ai"
TRIED = re.compile(r"\w+ '.*' not found \(tried to import '(.*?)'\)")
"""Begins verifiers' message when there is no module for an id."""
OLD_API = re.compile(r"^(async )?def load_environment\(", re.MULTILINE)


def why_not_loaded(taskset_id: str, error: Exception) -> str:
    module = module_of(taskset_id)
    if is_of_the_old_api(module):
        return (
            f"module {module!r} is an environment of the older verifiers API (load_environment); serve it with"
            " meshrl-verifiers-v0 from a virtual environment of its own, and give its address to"
            " orchestrator.services.rollout (docs/environments.md, Older environments)"
        )
    absent, told = _absent_module(error), TRIED.match(str(error))
    wanted = told[1] if told is not None else module
    if absent is None or (absent == wanted != module):  # an environment or a harness: verifiers' own words name them
        return f"{error}"
    if absent != wanted and not wanted.startswith(f"{absent}."):
        return f"{wanted} imports {absent}, which is not installed in {sys.prefix}; install it: uv pip install {absent}"
    return f"no module {wanted!r} is installed in {sys.prefix}.{_meant(wanted)} {how_to_install(taskset_id)}"


def how_to_install(taskset_id: str) -> str:
    owner, _, name = taskset_id.partition("@")[0].rpartition("/")
    package = module_of(name).partition(".")[0]
    own = (
        f"Your own: `uv pip install -e path/to/{name}`, or no installation: put the folder that holds {package} on"
        " PYTHONPATH"
    )
    if "." in name:
        return own
    owner = owner or "OWNER"
    examples = "" if registered() else "One of the examples: `uv pip install meshrl-examples`. "
    return (
        f"{examples}"
        f"One of the Environments Hub: `prime env install {owner}/{name}`, or `uv pip install {name}"
        f" --extra-index-url {HUB}/{owner}/simple/`. {own}"
    )


def module_of(taskset_id: str) -> str:
    """The module that verifiers imports: `owner/my-words@1.0` is in my_words."""
    return taskset_id.rpartition("/")[2].partition("@")[0].replace("-", "_").lower()


def is_of_the_old_api(module: str) -> bool:
    """The module defines load_environment and no taskset. It is read, not imported."""
    try:
        found = importlib.util.find_spec(module)
    except (ImportError, ValueError):  # there is no such package, or it is no module
        return False
    if found is None or not found.origin or not found.origin.endswith(".py"):
        return False
    source = Path(found.origin)
    files = source.parent.glob("*.py") if source.name == "__init__.py" else (source,)
    text = "\n".join(file.read_text(errors="replace") for file in files)
    return OLD_API.search(text) is not None and "verifiers.v1" not in text


def _absent_module(error: Exception) -> str | None:
    """verifiers raises an error of its own from that of the import. None for any other error, such as a taskset's own
    ImportError."""
    cause: BaseException | None = error
    while isinstance(cause, ModuleNotFoundError):
        if cause.name:
            return cause.name
        cause = cause.__cause__
    return None


def _meant(module: str) -> str:
    try:
        from verifiers.v1 import envs, tasksets

        known = [info.name for package in (tasksets, envs) for info in pkgutil.iter_modules(package.__path__)]
    except ImportError:
        known = []
    close = difflib.get_close_matches(module, [*registered(), *known], n=1, cutoff=0.75)
    return f" Did you mean {close[0]!r}?" if close else ""
