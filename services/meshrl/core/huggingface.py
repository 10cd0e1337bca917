"""How programs ask the Hugging Face hub."""

from __future__ import annotations

from typing import Any

from huggingface_hub import get_session
from huggingface_hub.errors import HfHubHTTPError

ANSWER_S = 20.0
"""Longest silence in a question or download. Libraries ask again up to six times."""

NO_ANSWER: type[Exception] = HfHubHTTPError.__mro__[1]
"""Errors of connection of the HTTP library of this release of huggingface_hub."""

ADVICE = "check the name, the network, HF_TOKEN and HF_ENDPOINT, or give a folder"


def give_up_on_silence() -> None:
    """Bounds every question of this process to the hub by ANSWER_S."""
    hooks: dict[str, list[Any]] = get_session().event_hooks
    if _limit_wait not in hooks["request"]:
        get_session().event_hooks = {**hooks, "request": [*hooks["request"], _limit_wait]}


def told(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__


def _limit_wait(request: Any) -> None:
    if request.method in ("GET", "HEAD"):
        waits: dict[str, float | None] = request.extensions["timeout"]
        request.extensions["timeout"] = {
            phase: ANSWER_S if wait is None else min(wait, ANSWER_S) for phase, wait in waits.items()
        }
