"""Turns what validation found wrong into one message that says what was expected, what came and what to change."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from pydantic import SecretStr, ValidationError
from pydantic_core import ErrorDetails

from meshrl.core.config.schema import Kind, Section, describe, field_kind, find_field, key_names, nearest

_TYPE_SAYS_IT = ("_type", "_parsing", "literal_error", "enum")


def explain(section: Section, error: ValidationError, origins: Mapping[tuple[str, ...], str]) -> str:
    """All problems, a line each, sorted as validation found them."""
    lines: dict[tuple[str, ...], str] = {}
    texts: list[str] = []
    for problem in error.errors(include_url=False):
        path, kind, parent = _locate(section, problem)
        text = _explain_one(problem, path, kind, parent, origins)
        if path not in lines or problem["type"] in ("value_error", "assertion_error"):
            texts.append(text)  # one line a key, though a union reports each of its members
        lines.setdefault(path, text)
    return "\n".join(dict.fromkeys(texts))


def _locate(section: Section, problem: ErrorDetails) -> tuple[tuple[str, ...], Kind, Kind]:
    """The path of the key, what it accepts and what holds it; names of union members in the location are left out."""
    kind = Kind(annotation=section, sections=(section,))
    parent = kind
    path: tuple[str, ...] = ()
    last = len(problem["loc"]) - 1
    for place, part in enumerate(problem["loc"]):
        if kind.discriminator is not None and len(kind.sections) > 1:
            narrowed = kind.section_for({kind.discriminator: part})
            if narrowed != kind.sections:  # the location names the class that was chosen
                kind = replace(kind, sections=narrowed)
                continue
        step = _step(kind, part)
        if step is not None:
            parent, kind = kind, step[1]
            path = (*path, step[0])
        elif problem["type"] == "extra_forbidden" and place == last:
            parent, kind = kind, Kind(annotation=None)
            path = (*path, str(part))
    return path, kind, parent


def _step(kind: Kind, part: str | int) -> tuple[str, Kind] | None:
    if kind.item is not None:
        return (str(part), kind.item) if isinstance(part, int) else None
    if kind.sections:
        found = find_field(kind.sections, str(part))
        return None if found is None else (found[0], field_kind(found[1]))
    return None if kind.value is None else (str(part), kind.value)


def _explain_one(
    problem: ErrorDetails, path: tuple[str, ...], kind: Kind, parent: Kind, origins: Mapping[tuple[str, ...], str]
) -> str:
    key = ".".join(path)
    came = _came(path, origins)
    context: Mapping[str, Any] = problem.get("ctx") or {}
    match problem["type"]:
        case "missing":
            return f"{key}: needs a value ({describe(kind)}); set it in a file or with --{key.replace('_', '-')}"
        case "extra_forbidden":
            return f"{key}: no such key{came}{_meant(parent, path)}"
        case "value_error" | "assertion_error":
            text = str(context.get("error", problem["msg"]))
            return text if not path or path[-1] in text else f"{key}: {text}"
        case "union_tag_invalid" | "union_tag_not_found":
            chooser = str(context.get("discriminator", "type")).strip("'")
            tag = f", got {context['tag']!r}" if "tag" in context else ", got none"
            expected = context.get("expected_tags") or _tags(kind, chooser)
            return f"{key}.{chooser}: expected one of {expected}{tag}{_came((*path, chooser), origins)}"
    detail = ""
    if not problem["type"].endswith(_TYPE_SAYS_IT):
        detail = "; " + problem["msg"].replace("Input should", "it should")
    given = "a value that is not shown" if kind.annotation is SecretStr else _shorten(problem["input"])
    return f"{key}: expected {describe(kind)}, got {given}{came}{detail}"


def _tags(kind: Kind, chooser: str) -> str:
    choices = (section.model_fields.get(chooser) for section in kind.sections)
    return ", ".join(repr(field.default) for field in choices if field is not None)


def _meant(parent: Kind, path: tuple[str, ...]) -> str:
    close = nearest(parent.sections, path[-1], path[:-1])
    if close is not None:
        return f"; did you mean {close}?"
    names = ", ".join(key_names(parent.sections))
    return f"; keys of {'.'.join(path[:-1])} are {names}" if path[:-1] else f"; top-level keys are {names}"


def _came(path: tuple[str, ...], origins: Mapping[tuple[str, ...], str]) -> str:
    return f" (from {origins[path]})" if path in origins else ""


def _shorten(value: Any, limit: int = 80) -> str:
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def one_message(prog: str, problems: str) -> str:
    """The message a program ends with."""
    lines = problems.splitlines()
    if len(lines) == 1:
        return f"{prog}: {lines[0]}\nRun '{prog} --help' for every key."
    return f"{prog}: the configuration has {len(lines)} errors\n{indent(lines)}\nRun '{prog} --help' for every key."


def indent(lines: Iterable[str]) -> str:
    return "\n".join(f"  {line}" for line in lines)
