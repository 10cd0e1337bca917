"""How programs ask the Hugging Face hub: what never answers is given up, and what goes wrong is known by its class.

Called before a library loads a model, a tokenizer or a dataset by its name.
"""

from __future__ import annotations

from typing import Any

from huggingface_hub import get_session
from huggingface_hub.errors import HfHubHTTPError

HUB_ANSWER_S = 20.0
"""How long the hub may keep a question or a download waiting without a byte. Libraries ask again up to six times."""

NO_ANSWER: type[Exception] = HfHubHTTPError.__mro__[1]
"""No connection, or none in time: all errors of the HTTP library that this release of huggingface_hub uses."""

HUB_ADVICE = "check the name, the network, HF_TOKEN and HF_ENDPOINT, or give a folder"


def give_up_on_silence() -> None:
    """From now on no question of this process to the hub waits longer than HUB_ANSWER_S. transformers and
    huggingface_hub wait for ever with some questions, and for six minutes with others."""
    hooks: dict[str, list[Any]] = get_session().event_hooks
    if _limit_wait not in hooks["request"]:
        get_session().event_hooks = {**hooks, "request": [*hooks["request"], _limit_wait]}


def told(error: Exception) -> str:
    """The libraries' error about a hub, in one line."""
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__


def _limit_wait(request: Any) -> None:
    """Bounds what a request of httpx says of its timeouts; what is written to the hub is the writer's to bound."""
    if request.method in ("GET", "HEAD"):
        waits: dict[str, float | None] = request.extensions["timeout"]
        request.extensions["timeout"] = {
            phase: HUB_ANSWER_S if wait is None else min(wait, HUB_ANSWER_S) for phase, wait in waits.items()
        }
