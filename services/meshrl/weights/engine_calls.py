"""Asks engines that run already to take their versions from this hub: POST /follow_hub at each of `weights.engines`.

An engine is called again only once its lease is over.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence

from loguru import logger

from meshrl.core.rpc.blocking_http import ask_blocking, error_text
from meshrl.core.waiting import set_within
from meshrl.machine.addresses import ANY_HOST

CALL_EVERY_S = 2.0
CALL_DEADLINE_S = 10.0  # the engine looks for the hub before it answers
FOLLOW_PATH = "/follow_hub"


class EngineCaller:
    def __init__(
        self,
        urls: Sequence[str],
        *,
        host: str,
        port: int,
        api_key: str | None,
        token: str | None = None,
        registered: Callable[[], Collection[str]],
        every_s: float = CALL_EVERY_S,
    ) -> None:
        """`registered` gives the URLs of engines that hold a lease; they are to show `token` to this hub."""
        self._urls, self._registered, self._every_s = tuple(urls), registered, every_s
        self._hub = {"host": "" if host in ANY_HOST else host, "port": port}
        if token is not None:
            self._hub["token"] = token
        self._api_key = api_key
        self._logged: dict[str, str] = {}  # by URL, what was last logged

    async def run(self, stop: asyncio.Event) -> None:
        while not stop.is_set():
            missing = set(self._urls) - set(self._registered())
            await asyncio.gather(*(self._call(url) for url in self._urls if url in missing))
            await set_within(stop, self._every_s)

    async def _call(self, url: str) -> None:
        trouble = await asyncio.to_thread(self._ask, url)
        if self._logged.get(url) != trouble:
            self._logged[url] = trouble
            logger.log("WARNING" if trouble else "INFO", "engine {} {}", url, trouble or "follows this hub")

    def _ask(self, url: str) -> str:
        body = {**self._hub, "url": url}
        try:
            status, answer = ask_blocking(
                url + FOLLOW_PATH, body=body, api_key=self._api_key, deadline_s=CALL_DEADLINE_S
            )
        except OSError as error:  # not there yet, or something that speaks no HTTP
            return f"does not answer ({error}); it is called until it does"
        return _refusal(status, answer) if status >= 400 else ""


def _refusal(status: int, answer: object) -> str:
    if status in (404, 405):
        return (
            "gets no versions: it has no POST /follow_hub, so it is no `inference` of meshrl, or an older one; start it"
            " with `inference`, or do not list it"
        )
    message = error_text(answer)
    if status == 502:
        return (
            f"does not reach this hub: {message}; set weights.server.host to an address that it reaches, and allow it"
            " with weights.server.insecure where there is no TLS"
        )
    return f"refused to follow ({status}): {message}"
