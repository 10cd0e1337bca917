"""The servers to sample from: their kind and sequence length, and the loading of checkpoints."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Literal

import aiohttp
from loguru import logger

from meshrl.core.rpc.blocking_http import error_text
from meshrl.core.rpc.engine_http import NO_ANSWER, ask
from meshrl.rollout.config import ClientConfig
from meshrl.sampling.retry import RunError
from meshrl.trials.config import DEFAULT_SEQ_LEN, TrialDeadlinesConfig

Api = Literal["generate", "chat_completions"]

LOOK_S = 0.5
LOOK_DEADLINE_S = 5.0
ADAPTER = "adapter_config.json"
OURS = "logprobs_mode"
"""A field that GET /version of our engines has, and of no other servers."""


@dataclass(frozen=True, kw_only=True)
class ServerFacts:
    urls: tuple[str, ...]
    """Without /v1 for engines."""
    api: Api
    seq_len: int


class PolicyEndpoints:
    """The servers of one command, at `urls` without /v1. It may have `started` them, with the base model."""

    def __init__(
        self,
        http: aiohttp.ClientSession,
        urls: Sequence[str],
        *,
        base_model: str,
        started: bool,
        deadlines: TrialDeadlinesConfig,
    ) -> None:
        self._http = http
        self._urls = tuple(urls)
        self._base_model = base_model
        self._started = self._serves_base = started
        self._deadlines = deadlines
        self.version: int | None = None
        """The version loaded last."""

    async def wait_until_ready(self, client: ClientConfig, most: int | None) -> ServerFacts:
        """`most`: longest sequence, in tokens. Raises RunError for a server that does not answer."""
        deadline_s = self._deadlines.engine_startup_s if self._started else self._deadlines.startup_s
        until_s = time.monotonic() + deadline_s
        said = [await self._version_of(url, until_s) for url in self._urls]
        given = "api" in client.model_fields_set
        ours = all(OURS in answer for answer in said)
        api: Api = client.api if given else "generate" if ours else "chat_completions"
        if not given:
            kind = "engines of ours" if ours else "servers of /v1/chat/completions"
            logger.info("sampling from {} at {}", kind, ", ".join(self._urls))
        if api == "chat_completions":
            urls = self._urls if self._started else tuple(client.base_url)
            return ServerFacts(urls=urls, api=api, seq_len=most or DEFAULT_SEQ_LEN)
        lengths = [await self._max_model_len(url) for url in self._urls]
        known = [length for length in lengths if length is not None]
        held = min(known, default=DEFAULT_SEQ_LEN)
        return ServerFacts(urls=self._urls, api=api, seq_len=min(held, most or held))

    async def load(self, folder: Path | None, version: int, *, what: str) -> None:
        """Has every engine serve the weights in `folder`, an absolute path, or the base model. Raises RunError when one
        cannot."""
        if folder is None and self._serves_base:
            return
        route: str = "/reload_weights"
        body: dict[str, object] = {"version": version}
        if folder is not None:
            adapter = (folder / ADAPTER).exists()
            route = "/load_lora_adapter" if adapter else "/update_weights"
            body["lora_path" if adapter else "weight_dir"] = str(folder)
        for url in self._urls:
            status, answer = await self._post(url + route, body, what)
            if status == HTTPStatus.NOT_FOUND:
                raise RunError(
                    f"the server at {url} has no {route}: checkpoints are loaded into engines that `inference` starts;"
                    " start one with the base model, or let this command start it (--inference)"
                )
            if status != HTTPStatus.OK or not isinstance(answer, dict):
                raise RunError(f"the engine at {url} does not load {what}: {error_text(answer)}")
        self.version, self._serves_base = version, folder is None
        logger.info("{} is loaded", what)

    async def _version_of(self, url: str, until_s: float) -> dict[str, object]:
        """Empty from a server without that route."""
        while True:
            try:
                status, answer = await ask(self._http, "GET", url + "/version", deadline_s=LOOK_DEADLINE_S)
                return answer if status == HTTPStatus.OK and isinstance(answer, dict) else {}
            except NO_ANSWER as error:
                if time.monotonic() >= until_s:
                    raise RunError(
                        f"no server answers at {url} ({error}): start one with `inference --model.name"
                        f" {self._base_model}`, name another with --client.base-url, or add --inference to have"
                        " one started"
                    ) from error
                await asyncio.sleep(LOOK_S)

    async def _max_model_len(self, url: str) -> int | None:
        try:
            _, answer = await ask(self._http, "GET", url + "/v1/models", deadline_s=LOOK_DEADLINE_S)
            length = answer["data"][0]["max_model_len"]  # type: ignore[index]  # another form is caught below
            return length if isinstance(length, int) else None
        except (*NO_ANSWER, KeyError, IndexError, TypeError):  # it gives none
            return None

    async def _post(self, url: str, body: object, what: str) -> tuple[int, object]:
        deadline_s = self._deadlines.load_s
        try:
            return await ask(self._http, "POST", url, body=body, deadline_s=deadline_s)
        except TimeoutError as error:
            raise RunError(f"{url} did not load {what} within {deadline_s:g} s (deadlines.load_s)") from error
        except aiohttp.ClientError as error:
            raise RunError(f"{url} failed while loading {what}: {error}") from error
