"""Counts each tenant's trained tokens in a day of UTC, in a file, and refuses batches beyond its quota."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path

from meshrl.core.config import ConfigError
from meshrl.core.durable import write_file
from meshrl.core.rpc.guard import CALLER
from meshrl.wire.errors import MeshError, Reason

DAY_S = 86_400


class Quotas:
    def __init__(self, file: Path, now_s: Callable[[], float] = time.time) -> None:
        """Raises ConfigError for a damaged file."""
        self._file, self._now_s = file, now_s
        self._writing = asyncio.Lock()
        self._day, self._tokens = 0, dict[str, int]()
        if file.exists():
            try:
                kept = json.loads(file.read_bytes())
                self._day, self._tokens = int(kept["day"]), dict(kept["tokens"])
            except (ValueError, KeyError, TypeError) as error:
                raise ConfigError(
                    f"{file} is damaged: {error!r}; restore it, or delete it to count today's tokens anew"
                ) from error

    def check(self, tokens: int) -> None:
        """Raises OVERLOADED for a batch beyond the caller's quota."""
        caller, left_s = CALLER.get(), self._begin_day()
        most = None if caller is None else caller.scope.tokens_per_day
        if caller is None or most is None:
            return
        used = self._tokens.get(caller.account, 0)
        if used + tokens > most:
            raise MeshError(
                Reason.OVERLOADED,
                f"{caller} may train {most} tokens a day (--tokens-per-day of its token), has trained {used} today, and"
                f" this batch has {tokens}; send it in {left_s / 3600:.1f} hours, or ask for a token with more",
                retry_after_s=left_s,
            )

    async def charge(self, tokens: int) -> None:
        """Counts a batch that was accepted. Raises OSError."""
        caller = CALLER.get()
        if caller is not None and caller.scope.tokens_per_day is not None:
            self._begin_day()
            self._tokens[caller.account] = self._tokens.get(caller.account, 0) + tokens
            async with self._writing:
                self._file.parent.mkdir(parents=True, exist_ok=True)
                content = json.dumps({"day": self._day, "tokens": self._tokens}).encode()
                await asyncio.to_thread(write_file, self._file, content)

    def _begin_day(self) -> float:
        day, second = divmod(self._now_s(), DAY_S)
        if day != self._day:
            self._day, self._tokens = int(day), {}
        return DAY_S - second
