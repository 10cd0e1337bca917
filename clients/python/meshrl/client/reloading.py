"""A gRPC channel whose certificate and server's name may change in use.

A changed certificate opens another channel; running calls finish on the old one. A revoked server certificate renames
the role's servers, and calls over the old channel end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Self
from weakref import WeakSet

import grpc

LOOK_S = 1.0
"""Between looks whether the server of running calls is still trusted."""


class ReloadingChannel(grpc.aio.Channel):  # type: ignore[misc]  # grpc has no types
    """Connects anew before the first call after `changed()` or `distrusted()`, which may raise OSError."""

    def __init__(
        self,
        connect: Callable[[], grpc.aio.Channel],
        changed: Callable[[], bool],
        *,
        distrusted: Callable[[], bool] = lambda: False,
    ) -> None:
        self._connect, self._changed, self._distrusted = connect, changed, distrusted
        self._cut: WeakSet[grpc.aio.Call] = WeakSet()
        self._looking: asyncio.Task[None] | None = None
        self._current = connect()
        self._running: dict[grpc.aio.Channel, set[grpc.aio.Call]] = {self._current: set()}
        self._closing: set[asyncio.Task[None]] = set()

    def was_cut(self, call: object) -> bool:
        return call in self._cut

    def _fresh(self) -> grpc.aio.Channel:
        if self._distrusted():
            self._cut_off()
        elif self._changed():
            try:
                renewed = self._connect()
            except OSError:  # being replaced: the next call looks again
                return self._current
            before, self._current = self._current, renewed
            self._running[self._current] = set()
            self._close_if_done(before)
        return self._current

    def _cut_off(self) -> None:
        try:
            renewed = self._connect()
        except OSError:  # being replaced: the next call looks again
            return
        before, self._current = self._running, renewed
        self._running = {self._current: set(), **before}
        for channel, calls in before.items():
            for call in list(calls):
                self._cut.add(call)
                call.cancel()
            self._close_if_done(channel)

    async def _look(self) -> None:
        while any(self._running.values()):
            await asyncio.sleep(LOOK_S)
            if self._distrusted():
                self._cut_off()
        self._looking = None

    def _close_if_done(self, channel: grpc.aio.Channel) -> None:
        if channel is not self._current and channel in self._running and not self._running[channel]:
            del self._running[channel]
            closing = asyncio.ensure_future(channel.close(None))
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    def _method(
        self, kind: str, arguments: tuple[object, ...], named: dict[str, object]
    ) -> Callable[..., grpc.aio.Call]:
        made: dict[grpc.aio.Channel, Callable[..., grpc.aio.Call]] = {}

        def call(*request: object, **options: object) -> grpc.aio.Call:
            channel = self._fresh()
            if channel not in made:
                made.clear()
                made[channel] = getattr(channel, kind)(*arguments, **named)
            pending = made[channel](*request, **options)
            running = self._running[channel]
            running.add(pending)
            if self._looking is None:
                self._looking = asyncio.ensure_future(self._look())

            def over(_: grpc.aio.Call) -> None:
                running.discard(pending)
                self._close_if_done(channel)

            pending.add_done_callback(over)
            return pending

        return call

    def unary_unary(self, *arguments: object, **named: object) -> Callable[..., grpc.aio.Call]:
        return self._method("unary_unary", arguments, named)

    def unary_stream(self, *arguments: object, **named: object) -> Callable[..., grpc.aio.Call]:
        return self._method("unary_stream", arguments, named)

    def stream_unary(self, *arguments: object, **named: object) -> Callable[..., grpc.aio.Call]:
        return self._method("stream_unary", arguments, named)

    def stream_stream(self, *arguments: object, **named: object) -> Callable[..., grpc.aio.Call]:
        return self._method("stream_stream", arguments, named)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._current.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._current.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._current.channel_ready()

    async def close(self, grace: float | None = None) -> None:
        """Ends calls that still run after `grace` seconds."""
        if self._looking is not None:
            self._looking.cancel()
        await asyncio.gather(*(channel.close(grace) for channel in self._running), *self._closing)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close(None)
