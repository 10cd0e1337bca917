"""Turns what validation found wrong into one message that says what was expected, what came and what to change."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from pydantic import SecretStr, ValidationError
from pydantic_core import ErrorDetails

from meshrl.core.config.schema import Kind, Path, Table, describe, flag_of, nearest, suggestion

_TYPE_SAYS_IT = ("_type", "_parsing", "literal_error", "enum")

Origin = Callable[[Path], str | None]


def explain(root: Kind, error: ValidationError, origin_of: Origin, *, only: Sequence[str] = ()) -> list[str]:
    """All problems, a line each, sorted as validation found them; `origin_of` says where a value came from.

    `only` are the types of problems that are told, all when it is empty.
    """
    seen: set[Path] = set()
    texts: list[str] = []
    for problem in error.errors(include_url=False):
        if only and problem["type"] not in only:
            continue
        path, kind, parent = _locate(root, problem)
        if problem["type"] == "literal_error" and kind.sections and isinstance(problem["input"], Mapping):
            continue  # the section's own problem is told; that it is no word either says nothing
        if path not in seen or problem["type"] in ("value_error", "assertion_error"):
            texts += _explain_one(problem, path, kind, parent, origin_of).splitlines()
        seen.add(path)  # one line a key, though a union reports each of its members
    return list(dict.fromkeys(texts))


def without_unknown(root: Kind, values: Table, error: ValidationError) -> Table | None:
    """The values with each unknown key under the name of its sibling that it is most like, where that is free, or
    without it. None where no key is unknown.
    """
    unknown = [problem for problem in error.errors(include_url=False) if problem["type"] == "extra_forbidden"]
    if not unknown:
        return None
    mended = copy.deepcopy(values)
    for problem in unknown:
        path, _, parent = _locate(root, problem)
        holder: Any = mended
        for part in path[:-1]:
            holder = holder[int(part)] if isinstance(holder, list) else holder.get(part, {})
        if not isinstance(holder, dict) or path[-1] not in holder:
            continue
        value, close = holder.pop(path[-1]), nearest(parent.sections, path[-1], path[:-1])
        if close is not None and close[:-1] == path[:-1]:
            holder.setdefault(close[-1], value)
    return mended


def _locate(kind: Kind, problem: ErrorDetails) -> tuple[Path, Kind, Kind]:
    """The path of the key, what it accepts and what holds it; names of union members in the location are left out."""
    parent = kind
    path: Path = ()
    for place, part in enumerate(problem["loc"]):
        if kind.discriminator is not None and len(kind.sections) > 1:
            narrowed = kind.narrowed({kind.discriminator: part})
            if narrowed is not kind:  # the location names the class that was chosen
                kind = narrowed
                continue
        step = None if kind.is_any else kind.step(str(part))
        if step is not None:
            parent, kind = kind, step[1]
            path = (*path, step[0])
        elif problem["type"] == "extra_forbidden" and place == len(problem["loc"]) - 1:
            parent, kind = kind, Kind(annotation=None)
            path = (*path, str(part))
    return path, kind, parent


def _explain_one(problem: ErrorDetails, path: Path, kind: Kind, parent: Kind, origin_of: Origin) -> str:
    key = ".".join(path)
    context: Mapping[str, object] = problem.get("ctx") or {}

    def came(place: Path) -> str:
        origin = origin_of(place)
        return "" if origin is None else f" (from {origin})"

    match problem["type"]:
        case "missing":
            return f"{key}: needs a value ({describe(kind)}); set it in a file or with {flag_of(path)}"
        case "extra_forbidden":
            return f"{key}: no such key{came(path)}{suggestion(parent, path[:-1], path[-1], '.'.join)}"
        case "value_error" | "assertion_error":
            text = str(context.get("error", problem["msg"]))
            return text if not path or path[-1] in text else f"{key}: {text}"
        case "union_tag_invalid" | "union_tag_not_found":
            chooser = str(context.get("discriminator", "type")).strip("'")
            choices = (section.model_fields.get(chooser) for section in kind.sections)
            tags = ", ".join(repr(field.default) for field in choices if field is not None)
            expected = context.get("expected_tags") or tags
            tag = repr(context["tag"]) if "tag" in context else "none"
            return f"{key}.{chooser}: expected one of {expected}, got {tag}{came((*path, chooser))}"
    detail = ""
    if not problem["type"].endswith(_TYPE_SAYS_IT):
        detail = "; " + problem["msg"].replace("Input should", "it should")
    given = "a value that is not shown" if kind.annotation is SecretStr else repr(problem["input"])
    given = given if len(given) <= 80 else given[:77] + "..."
    return f"{key}: expected {describe(kind)}, got {given}{came(path)}{detail}"


def one_message(prog: str, problems: str, help_flag: str) -> str:
    """The message a program ends with."""
    lines = problems.splitlines()
    if len(lines) > 1:
        problems = f"the configuration has {len(lines)} errors\n{indent(lines)}"
    return f"{prog}: {problems}\nRun '{prog} {help_flag}' for every key."


def indent(lines: Iterable[str]) -> str:
    """The lines as a list below a sentence."""
    return "\n".join(f"  {line}" for line in lines)
