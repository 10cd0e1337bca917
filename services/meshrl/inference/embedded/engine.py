"""The embedded engine: continuous batching of a Hugging Face model on a thread of its own.

Requests come in through an inbox that the thread empties before each step; tokens go back to the event loop in one call
a step. Weight commands come through the same inbox, so they take effect between two steps and never inside one.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import numpy as np
from loguru import logger
from transformers import PreTrainedModel

from meshrl.inference.embedded.live_weights import Layout, LiveWeights
from meshrl.inference.embedded.runner import make_runner
from meshrl.inference.embedded.sampler import stream_keys
from meshrl.inference.embedded.sleep import NeverSleeps
from meshrl.inference.embedded.slots import RequestRow, SlotTable
from meshrl.inference.embedded.staging import Staging
from meshrl.inference.engine import (
    CollectiveSeat,
    EngineStats,
    FinishReason,
    GenerateRequest,
    HostVersion,
    TokenChunk,
    check_request,
)
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.types import JoinGroup, Manifest

COMMAND_DEADLINE_S = 60.0
UNKNOWN_VERSION = -1

Result = TypeVar("Result")


@dataclass(frozen=True, eq=False)
class _Submit:
    row: RequestRow


@dataclass(frozen=True, eq=False)
class _Cancel:
    row: RequestRow


@dataclass(frozen=True, eq=False)
class _Call:
    """Runs on the engine's thread between two steps; the result goes into the future."""

    function: Callable[[], Any]
    done: Future[Any]


class EmbeddedEngine(NeverSleeps):
    """An `Engine` (see `engine.py`) over one in-process model. `start` it on the loop that will consume its tokens."""

    def __init__(
        self, model: PreTrainedModel, *, max_model_len: int, num_slots: int, max_queue: int = 4096,
        max_num_batched_tokens: int = 2048, kv_cache_bytes: int | None = None, eos_token_ids: tuple[int, ...] = (),
        seed: int | None = None, version: int | None = 0,
    ) -> None:  # fmt: skip
        """Takes over `model`. `version` names the weights it comes with; None refuses requests until one is applied."""
        self.max_model_len = max_model_len
        self.max_queue = max_queue
        self.eos_token_ids = eos_token_ids
        self.vocab_size: int = model.config.get_text_config().vocab_size
        self._runner = make_runner(model, num_slots=num_slots, max_len=max_model_len, kv_cache_bytes=kv_cache_bytes)
        self._table = SlotTable(num_slots=self._runner.num_slots, max_len=max_model_len, store=self._runner.cache)
        self._weights = LiveWeights(model)
        self._device = model.device
        self._staging = Staging(self._weights, model.device)
        self._budget = max_num_batched_tokens
        self._seeds = np.random.default_rng(seed)
        self._inbox: queue.SimpleQueue[_Submit | _Cancel | _Call | None] = queue.SimpleQueue()
        self._outbox: list[Callable[[], None]] = []
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._idle = asyncio.Event()
        self._idle.set()
        self._in_flight, self._draining = 0, False
        self._version = version
        self._root: bytes | None = None
        self._paused, self._paused_at = False, 0.0
        self._unfit: str | None = None
        self._over: MeshError | None = None  # what is answered once the thread takes nothing any more
        self._counts = dict.fromkeys(("tokens", "prefilled", "finished", "steps"), 0)
        self._busy_s = self._last_pause_s = 0.0

    # --- state ------------------------------------------------------------------------------

    @property
    def version(self) -> int | None:
        return self._version

    @property
    def root(self) -> bytes | None:
        return self._root

    @property
    def logprobs_mode(self) -> Literal["processed_logprobs"]:
        return "processed_logprobs"  # `sampling.sample`

    @property
    def paused(self) -> bool:
        return self._paused

    @property
    def unfit(self) -> str | None:
        return self._unfit

    @property
    def lost(self) -> str | None:
        return None if self._thread.is_alive() or self._draining else f"its thread ended: {self._unfit}"

    @property
    def in_flight(self) -> int:
        return self._in_flight

    @property
    def num_slots(self) -> int:
        return self._table.num_slots

    @property
    def draining(self) -> bool:
        return self._draining

    @property
    def stages_from_files(self) -> bool:
        return False  # the model lives in this process

    @property
    def collective(self) -> CollectiveSeat | None:
        return CollectiveSeat(ranks=1, backend="nccl" if self._device.type == "cuda" else "gloo")

    def layout(self) -> Layout:
        return self._weights.layout

    def stats(self) -> EngineStats:
        """Counters read without stopping the engine; they may be a step apart from each other."""
        return EngineStats(
            running=self._table.occupied,
            waiting=max(0, self._in_flight - self._table.occupied),
            slots=self.num_slots,
            generated_tokens=self._counts["tokens"],
            prefilled_tokens=self._counts["prefilled"],
            shared_prompt_tokens=self._table.shared_prompt_tokens,
            finished_requests=self._counts["finished"],
            steps=self._counts["steps"],
            busy_s=self._busy_s,
            last_pause_s=self._last_pause_s,
        )

    # --- life -------------------------------------------------------------------------------

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def begin_drain(self) -> None:
        """Refuses new requests from now on; those in flight go on."""
        self._draining = True

    async def idle(self) -> None:
        """Returns once no request is in flight."""
        await self._idle.wait()

    async def close(self, deadline_s: float = 0.0) -> None:
        """Drains for at most `deadline_s`, aborts what is left and stops the thread."""
        self.begin_drain()
        if deadline_s > 0 and self._in_flight:
            try:
                await asyncio.wait_for(self.idle(), deadline_s)
            except TimeoutError:
                logger.warning("{} requests were still running at the drain deadline; aborting them", self._in_flight)
        await self._staging.leave()
        self._inbox.put(None)
        await asyncio.to_thread(self._thread.join, COMMAND_DEADLINE_S)

    # --- requests ---------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        self._check_fit()
        check_request(self, request, capacity=self.num_slots + self.max_queue, vocab_size=self.vocab_size)
        chunks: asyncio.Queue[TokenChunk | MeshError] = asyncio.Queue()
        params = request.sampling
        seed = self._seeds.integers(2**63) if params.seed is None else params.seed % 2**64
        eos = () if params.ignore_eos else self.eos_token_ids
        row = RequestRow(
            request=request,
            stop_ids=tuple(dict.fromkeys((*params.stop_token_ids, *eos))),
            key=stream_keys(np.array([seed], np.uint64))[0],
            limit=min(params.max_tokens, self.max_model_len - len(request.prompt_ids)),
            deliver=lambda chunk: self._outbox.append(lambda: chunks.put_nowait(chunk)),
            fail=lambda error: self._outbox.append(lambda: chunks.put_nowait(error)),
        )
        self._in_flight += 1
        self._idle.clear()
        self._put(_Submit(row))
        over = False
        try:
            while not over:
                chunk = await chunks.get()  # the caller bounds the wait: the HTTP layer has a deadline a request
                over = isinstance(chunk, MeshError) or chunk.finish_reason is not None
                if isinstance(chunk, MeshError):
                    raise chunk
                yield chunk
        finally:
            if not over:
                self._inbox.put(_Cancel(row))
            self._in_flight -= 1
            if self._in_flight == 0:
                self._idle.set()

    def _check_fit(self) -> None:
        if self._unfit is not None:
            raise MeshError(Reason.ENGINE_FAILED, f"this engine must be reseeded: {self._unfit}")

    # --- weights ----------------------------------------------------------------------------

    async def pause(self) -> int:
        def begin() -> int:
            if not self._paused:
                self._paused, self._paused_at = True, time.monotonic()
            return self._in_flight

        return await self._between_steps(begin)

    async def resume(self) -> None:
        def end() -> None:
            if self._paused:
                self._paused, self._last_pause_s = False, time.monotonic() - self._paused_at

        await self._between_steps(end)

    async def stage(self, host: HostVersion) -> None:
        await self._staging.stage(host)

    async def join_group(self, group: JoinGroup) -> None:
        await self._staging.join(group)

    async def receive(self, manifest: Manifest) -> None:
        await self._staging.receive(manifest)

    async def leave_group(self) -> None:
        await self._staging.leave()

    async def apply(self, version: int, root: bytes) -> None:
        shadow = self._staging.staged(version)

        def swap() -> None:
            if not self._paused:
                raise MeshError(
                    Reason.INVALID_REQUEST, "weights are applied only while the engine is paused; pause first"
                )
            try:
                self._weights.swap(shadow)
            except Exception as error:  # whatever went wrong, some tensors may be new and some old: never serve them
                self._unfit = f"applying version {version} failed: {error}"
                failure = MeshError(Reason.ENGINE_FAILED, self._unfit)
                self._fail_all(failure)
                raise failure from error
            self._unfit = None
            self._name_weights(version, root)

        await self._between_steps(swap)
        self._staging.drop()

    async def adopt(self, version: int, root: bytes) -> None:
        self._check_fit()
        await self._between_steps(lambda: self._name_weights(version, root, same=True))

    async def weights_root(self) -> bytes:
        return await asyncio.to_thread(self._weights.root)

    def _name_weights(self, version: int, root: bytes, *, same: bool = False) -> None:
        self._table.new_weights(version, before=self._version, same=same)
        self._version, self._root = version, root

    async def _between_steps(self, function: Callable[[], Result]) -> Result:
        if not self._thread.is_alive():
            raise MeshError(Reason.ENGINE_FAILED, "the engine's thread is not running; start or restart the engine")
        done: Future[Result] = Future()
        self._put(_Call(function, done))
        return await asyncio.wait_for(asyncio.wrap_future(done), COMMAND_DEADLINE_S)

    # --- the engine's thread ----------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._take_inbox():
                if not self._paused and self._has_work():
                    self._step()
                self._flush()
        except Exception as error:  # noqa: BLE001 - the thread is the engine: its requests must learn that it is gone
            logger.exception("the engine's thread failed")
            self._unfit = f"{type(error).__name__}: {error}"
            self._over = MeshError(Reason.ENGINE_FAILED, f"the engine failed: {self._unfit}")
            for row in [*self._table.rows, *self._table.waiting]:  # which stay: what failed may have damaged the table
                row.fail(self._over)
        else:
            self._over = MeshError(Reason.DRAINING, "this engine has shut down")
            for row in [*self._table.rows, *self._table.waiting]:
                row.deliver(self._table.chunk(row, FinishReason.ABORT))
        self._empty_inbox(self._over)
        self._flush()

    def _has_work(self) -> bool:
        return bool(self._table.occupied or self._table.waiting)

    def _take_inbox(self) -> bool:
        """Empties the inbox, waiting for a first item when there is nothing to compute; False: stop."""
        idle = self._paused or not self._has_work()
        while True:
            try:
                item = self._inbox.get(block=idle)
            except queue.Empty:
                return True
            idle = False
            if item is None:
                return False
            if isinstance(item, _Submit):
                self._table.waiting.append(item.row)
            elif isinstance(item, _Cancel):
                self._table.remove(item.row)
            elif item.done.set_running_or_notify_cancel():
                try:
                    item.done.set_result(item.function())
                except Exception as error:  # noqa: BLE001 - belongs to whoever called, not to this thread
                    item.done.set_exception(error)

    def _step(self) -> None:
        started = time.perf_counter()
        pieces = self._table.schedule(self._budget)
        output = self._runner.step(self._table, pieces)
        self._table.prefilled(pieces)
        if output is not None:
            version = UNKNOWN_VERSION if self._version is None else self._version
            self._counts["tokens"] += len(output.token_ids)
            left = self._table.absorb(
                output.token_ids, output.logprobs, output.raw_logprobs, output.alternatives, version
            )
            self._counts["finished"] += len(left)
            if any(reason is None for _, reason in left):
                self._fail_broken([row for row, reason in left if reason is None])
        self._counts["prefilled"] += sum(len(piece.tokens) for piece in pieces)
        self._counts["steps"] += 1
        self._busy_s += time.perf_counter() - started

    def _fail_broken(self, rows: list[RequestRow]) -> None:
        """Rows whose logits are not finite leave; freed slots are zeroed, since a mask does not stop a NaN."""
        message = f"the model (version {self._version}) produced logits that are not finite; apply other weights"
        logger.error("{}: {} requests failed", message, len(rows))
        for slot in range(self._table.occupied, self.num_slots):
            self._runner.cache.clear_slot(slot)
        for row in rows:
            row.fail(MeshError(Reason.ENGINE_FAILED, message))

    def _fail_all(self, error: MeshError) -> None:
        for row in [*reversed(self._table.rows), *self._table.waiting]:
            row.fail(error)
            self._table.remove(row)

    def _put(self, item: _Submit | _Call) -> None:
        """Into the inbox; when the thread has emptied it for the last time, the item is answered here."""
        self._inbox.put(item)
        if self._over is not None:
            self._empty_inbox(self._over)
            self._flush()

    def _empty_inbox(self, error: MeshError) -> None:
        """Answers what came in after the last step."""
        while True:
            try:
                item = self._inbox.get_nowait()
            except queue.Empty:
                return
            if isinstance(item, _Submit):
                item.row.fail(error)
            elif isinstance(item, _Call) and item.done.set_running_or_notify_cancel():
                item.done.set_exception(error)

    def _flush(self) -> None:
        """Hands what this step produced to the event loop, in one call."""
        if not self._outbox or self._loop is None:
            return
        deliveries, self._outbox = self._outbox, []
        try:
            self._loop.call_soon_threadsafe(lambda: [deliver() for deliver in deliveries])
        except RuntimeError:  # the loop is closed: nobody is left to read
            logger.debug("dropped {} deliveries after the event loop had closed", len(deliveries))
