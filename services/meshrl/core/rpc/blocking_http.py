"""Asks an engine over HTTP with the standard library alone, for installs without aiohttp. It blocks."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request

from meshrl.core.credentials.https import client_context


def ask_blocking(url: str, *, body: object = None, api_key: str | None = None, deadline_s: float) -> tuple[int, object]:
    """Status and `parsed` body of the answer. A `body` is posted as JSON; without one it is a GET.

    Engines are verified by `client_context`, and asked without a proxy. Raises OSError where no whole answer comes, and
    ConfigError for an unreadable authority.
    """
    headers = {"Content-Type": "application/json"}
    if api_key is not None:
        headers["Authorization"] = f"Bearer {api_key}"
    data = None if body is None else json.dumps(body).encode()
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=client_context())
    )
    try:
        with opener.open(urllib.request.Request(url, data, headers), timeout=deadline_s) as answer:
            return answer.status, parsed(answer.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, parsed(error.read())
    except urllib.error.URLError as error:
        raise OSError(str(error.reason)) from error
    except (http.client.HTTPException, ValueError) as error:  # something that speaks no HTTP
        raise OSError(f"{type(error).__name__}: {error}") from error


def parsed(raw: bytes) -> object:
    try:
        return json.loads(raw)
    except ValueError:
        return raw.decode(errors="replace")


def error_text(answer: object) -> str:
    """The message, in OpenAI's form or any other; at most 300 characters."""
    error = answer.get("error", answer) if isinstance(answer, dict) else answer
    return str(error.get("message", error) if isinstance(error, dict) else error)[:300]
