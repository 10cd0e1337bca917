"""Asks servers whether they take this program's key, before a rollout needs it."""

from __future__ import annotations

import aiohttp

from meshrl.rollout.config import ClientConfig

LOCKED = frozenset({401, 403})


def key_refusal(url: str, status: int, config: ClientConfig, *, has_key: bool) -> str:
    carried = "with the key of this program" if has_key else "without a key"
    return (
        f"{url} answers {status} to calls {carried}; put the engines' key into the variable {config.api_key_var}, or"
        " into a file and its path into client.api_key_file (the key of a run's engines is in"
        " OUTPUT_DIR/credentials/engine.key)"
    )


async def why_locked_out(http: aiohttp.ClientSession, api: str, config: ClientConfig, *, has_key: bool) -> str:
    """Empty if the server takes the key that `http` sends. Lists its models, which needs the key on every server.
    Raises aiohttp's error if it does not answer within `probe_deadline_s`."""
    timeout = aiohttp.ClientTimeout(total=config.probe_deadline_s)
    async with http.get(f"{api}/models", timeout=timeout) as reply:
        return key_refusal(api, reply.status, config, has_key=has_key) if reply.status in LOCKED else ""
