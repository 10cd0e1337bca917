"""Turns the errors of validation into one message."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence

from pydantic import SecretStr, ValidationError
from pydantic_core import ErrorDetails

from meshrl.core.config.schema import Kind, Path, describe, flag_of

_TYPE_SAYS_IT = ("_type", "_parsing", "literal_error", "enum")

Origin = Callable[[Path], str | None]


def explain(root: Kind, error: ValidationError, origin_of: Origin, missing: Sequence[Path] = ()) -> list[str]:
    """A line each, in validation's order, but for those about the `missing` keys, given under unknown names."""
    seen: set[Path] = set()
    texts: list[str] = []
    for problem in error.errors(include_url=False):
        kind, path = root, Path()
        for part in problem["loc"]:  # also names members of unions, which are no keys
            step = kind.step(str(part))
            if step is not None:
                path, kind = (*path, step[0]), step[1]
        if problem["type"] == "literal_error" and kind.section and isinstance(problem["input"], Mapping):
            continue  # the section's own problem is told; that it is no word either says nothing
        if path not in seen or problem["type"] in ("value_error", "assertion_error"):
            lines = _explain_one(problem, path, kind, origin_of).splitlines()
            texts += [line for line in lines if not any(_is_about(line, path, key) for key in missing)]
        seen.add(path)  # one line a key, though a union reports each of its members
    return texts


def _is_about(line: str, path: Path, key: Path) -> bool:
    if path[: len(key)] == key:
        return True
    names = (".".join(key), ".".join(key[len(path) :]))
    return key[: len(path)] == path and any(re.search(rf"(?<![\w.]){re.escape(name)}(?![\w])", line) for name in names)


def _explain_one(problem: ErrorDetails, path: Path, kind: Kind, origin_of: Origin) -> str:
    key = ".".join(path)
    origin = origin_of(path)
    came = "" if origin is None else f" (from {origin})"
    match problem["type"]:
        case "missing":
            section = origin_of(path[:-1]) if path[:-1] else None
            there = "" if section is None else f" (its section comes from {section})"
            return f"{key}: needs a value ({describe(kind)}); set it in a file or with {flag_of(path)}{there}"
        case "value_error" | "assertion_error":
            text = str((problem.get("ctx") or {}).get("error", problem["msg"]))
            name = next((part for part in reversed(path) if not part.isdecimal()), "")
            text = text if name in text else f"{key}: {text}"
            return text + (_came_of_named(text, path, origin_of) if kind.section else came)
    detail = ""
    if not problem["type"].endswith(_TYPE_SAYS_IT):
        detail = "; " + problem["msg"].replace("Input should", "it should")
    given = "a value that is not shown" if kind.annotation is SecretStr else repr(problem["input"])
    given = given if len(given) <= 80 else given[:77] + "..."
    return f"{key}: expected {describe(kind)}, got {given}{came}{detail}"


def _came_of_named(text: str, section: Path, origin_of: Origin) -> str:
    origins: dict[str, str] = {}
    for word in re.findall(r"[a-z0-9_]+(?:\.[a-z0-9_]+)*", text):
        if "_" in word or "." in word:  # others may be plain English
            named = tuple(word.split("."))
            origin = origin_of(named) or (origin_of((*section, *named)) if section else None)
            if origin is not None:
                origins[named[-1]] = origin
    return f" ({', '.join(f'{name} from {origin}' for name, origin in origins.items())})" if origins else ""


def one_message(prog: str, problems: str, help_flag: str) -> str:
    lines = problems.splitlines()
    if len(lines) > 1:
        problems = f"the configuration has {len(lines)} errors\n{indent(lines)}"
    return f"{prog}: {problems}\nRun '{prog} {help_flag}' for every key."


def indent(lines: Iterable[str]) -> str:
    return "\n".join(f"  {line}" for line in lines)
