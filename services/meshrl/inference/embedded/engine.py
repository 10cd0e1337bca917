"""The embedded engine: continuous batching of a Hugging Face model inside the `inference` program.

It lives on the event loop; a thread of its own steps the model (`step_thread`). transformers' `generate_batch` (5.19)
makes 0.15 to 0.17 of its tokens/s on a CPU (`bench_engine.py`), has one random stream for all requests, and no adapters
by request, alternatives, routes or versions of tokens.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedModel

from meshrl.inference.adapters import AdapterTable, ServedAdapter
from meshrl.inference.embedded.low_rank import BASE, LoadedAdapter
from meshrl.inference.embedded.runner import make_runner, stream_keys
from meshrl.inference.embedded.slots import RequestRow
from meshrl.inference.embedded.staging import LiveWeights, Staging
from meshrl.inference.embedded.step_thread import StepThread
from meshrl.inference.engine import (
    CollectiveSupport,
    Engine,
    EngineStats,
    GenerateRequest,
    HostVersion,
    PromptLogprobs,
    TokenChunk,
)
from meshrl.versions.layout import Layout
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.types import JoinGroup, Manifest, VersionKind

MAX_ADAPTERS = 16


class EmbeddedEngine(Engine):
    """Over one in-process model. `start` it on the loop that will consume its tokens."""

    receives_deltas = True

    def __init__(
        self, model: PreTrainedModel, *, max_model_len: int, num_slots: int, max_queue: int = 4096,
        max_num_batched_tokens: int = 2048, kv_cache_bytes: int | None = None, eos_token_ids: tuple[int, ...] = (),
        seed: int | None = None, version: int | None = 0, keep_routes: bool = False, max_adapters: int = MAX_ADAPTERS,
    ) -> None:  # fmt: skip
        """Takes over `model`. `version` names its weights; None refuses requests until a version is applied."""
        self.eos_token_ids = eos_token_ids
        runner = make_runner(
            model, num_slots=num_slots, max_len=max_model_len, kv_cache_bytes=kv_cache_bytes, keep_routes=keep_routes
        )
        super().__init__(
            max_model_len=max_model_len,
            vocab_size=model.config.get_text_config().vocab_size,
            capacity=runner.num_slots + max_queue,
            reports_routes=keep_routes,
        )
        self._steps = StepThread(runner, budget=max_num_batched_tokens, version=version)
        self._weights, self.outline = LiveWeights(model), model
        self.collective = CollectiveSupport(ranks=1, backend="nccl" if model.device.type == "cuda" else "gloo")
        self._staging = Staging(self._weights, model.device)
        self.adapters: AdapterTable[LoadedAdapter] = AdapterTable(
            max_adapters,
            max_rank=0,
            unload=lambda adapter: self._steps.soon(lambda: runner.adapters.drop(adapter.number)),
        )
        self._seeds = np.random.default_rng(seed)

    # --- state ------------------------------------------------------------------------------

    @property
    def version(self) -> int | None:
        return self._steps.version

    @property
    def paused(self) -> bool:
        return self._steps.paused

    @property
    def unfit(self) -> str | None:
        return self._steps.unfit

    @property
    def lost(self) -> str | None:
        return None if self._steps.alive or self.draining else f"its thread ended: {self._steps.unfit}"

    @property
    def num_slots(self) -> int:
        return self._steps.table.num_slots

    def layout(self) -> Layout:
        return self._weights.layout

    def stats(self) -> EngineStats:
        table, counts = self._steps.table, self._steps.counts
        return EngineStats(
            running=table.occupied,
            waiting=max(0, self.in_flight - table.occupied),
            slots=self.num_slots,
            generated_tokens=counts.tokens,
            prefilled_tokens=counts.prefilled,
            shared_prompt_tokens=table.shared_prompt_tokens,
            finished_requests=counts.finished,
            steps=counts.steps,
            busy_s=counts.busy_s,
            last_pause_s=self._last_pause_s,
            kv_tokens=self.num_slots * self.max_model_len,
        )

    # --- life -------------------------------------------------------------------------------

    def start(self) -> None:
        self._steps.start()

    async def close(self, deadline_s: float = 0.0) -> None:
        await self._drain(deadline_s)
        await self._staging.receiver.leave()
        await self._steps.stop()

    # --- requests ---------------------------------------------------------------------------

    async def _complete(
        self, request: GenerateRequest, adapter: ServedAdapter[LoadedAdapter] | None
    ) -> AsyncGenerator[TokenChunk, None]:
        chunks: asyncio.Queue[TokenChunk | MeshError] = asyncio.Queue()
        params = request.sampling
        seed = self._seeds.integers(2**63) if params.seed is None else params.seed % 2**64
        eos = () if params.ignore_eos else self.eos_token_ids
        row = RequestRow(
            request=request,
            stop_ids=tuple(dict.fromkeys((*params.stop_token_ids, *eos))),
            key=stream_keys(np.array([seed], np.uint64))[0],
            limit=self._room(request),
            adapter=BASE if adapter is None else adapter.number,
            adapter_version=None if adapter is None else adapter.version,
            came_s=time.monotonic(),
            deliver=lambda chunk: self._steps.defer(lambda: chunks.put_nowait(chunk)),
            fail=lambda error: self._steps.defer(lambda: chunks.put_nowait(error)),
        )
        submitted = over = False
        with self._in_flight.one():
            try:
                prompt = None
                if params.prompt_logprobs is not None:
                    prompt = await self._score_prompt(request.prompt_ids, params.prompt_logprobs, row.adapter)
                self._steps.submit(row)
                submitted = True
                while not over:
                    chunk = await chunks.get()  # the caller bounds the wait: the HTTP layer has a deadline a request
                    over = isinstance(chunk, MeshError) or chunk.finish_reason is not None
                    if isinstance(chunk, MeshError):
                        raise chunk
                    yield chunk if prompt is None else replace(chunk, prompt_logprobs=prompt)
                    prompt = None
            finally:
                if submitted and not over:
                    self._steps.cancel(row)

    async def _score(
        self, prompt_ids: tuple[int, ...], adapter: ServedAdapter[LoadedAdapter] | None
    ) -> list[NDArray[np.float32]]:
        return [(await self._score_prompt(prompt_ids, 1, BASE if adapter is None else adapter.number)).logprobs]

    async def _score_prompt(self, prompt_ids: tuple[int, ...], asked: int, adapter: int) -> PromptLogprobs:
        top_k = asked if asked > 1 else 0
        runner = self._steps.runner
        found = await self._steps.call(lambda: runner.score_prompt(prompt_ids, top_k=top_k, adapter=adapter))
        if not np.isfinite(found.logprobs[1:]).all():
            message = f"the model (version {self.version}) produced logits that are not finite; apply other weights"
            raise MeshError(Reason.ENGINE_FAILED, message)
        return found

    # --- weights ----------------------------------------------------------------------------

    async def pause(self) -> int:
        def begin() -> int:
            if not self._steps.paused:
                self._steps.paused, self._paused_at = True, time.monotonic()
            return self.in_flight

        return await self._steps.call(begin)

    async def resume(self) -> None:
        def end() -> None:
            if self._steps.paused:
                self._steps.paused, self._last_pause_s = False, time.monotonic() - self._paused_at

        await self._steps.call(end)

    async def stage(self, host: HostVersion) -> None:
        await self._stage(host, copy=True)

    async def _stage(self, host: HostVersion, *, copy: bool) -> None:
        if host.adapter is None:
            await self._staging.stage(host, copy=copy)
            return
        layers, number = self._steps.runner.adapters, await self.adapters.room(host.run_id)
        with self._staging.named_out_of_memory(host.version):
            loaded = await asyncio.to_thread(layers.prepare, host, number)
        await self._steps.call(lambda: layers.add(loaded))
        self.adapters.add(host.run_id, host.version, number, loaded)

    async def join_group(self, group: JoinGroup) -> None:
        await self._staging.receiver.join(group)

    async def receive(self, manifest: Manifest) -> None:
        if manifest.kind is VersionKind.DELTA:
            await self._staging.receive_delta(manifest)
            return
        await self._stage(await self._staging.receive(manifest), copy=False)

    async def leave_group(self) -> None:
        await self._staging.receiver.leave()

    async def apply(self, version: int, root: bytes) -> None:
        shadow = self._staging.staged(version)

        def swap() -> None:
            if not self._steps.paused:
                raise MeshError(
                    Reason.INVALID_REQUEST, "weights are applied only while the engine is paused; pause first"
                )
            try:
                self._weights.swap(shadow)
            except Exception as error:  # whatever went wrong, some tensors may be new and some old: never serve them
                self._steps.unfit = f"applying version {version} failed: {error}"
                failure = MeshError(Reason.ENGINE_FAILED, self._steps.unfit)
                self._steps.fail_all(failure)
                raise failure from error
            self._steps.unfit = None
            self._name_weights(version, root)

        await self._steps.call(swap)
        self._staging.drop()

    async def condemn(self, why: str) -> None:
        def give_up() -> None:
            self._steps.paused, self._paused_at = True, time.monotonic()
            self._steps.unfit = why
            self._steps.fail_all(MeshError(Reason.ENGINE_FAILED, why))

        await self._steps.call(give_up)

    async def adopt(self, version: int, root: bytes) -> None:
        self.check_fit()
        await self._steps.call(lambda: self._name_weights(version, root, same=True))

    async def weights_root(self) -> bytes:
        return await asyncio.to_thread(self._weights.root)

    def _name_weights(self, version: int, root: bytes, *, same: bool = False) -> None:
        self._steps.table.new_weights(version, before=self._steps.version, same=same)
        self._steps.version, self.root = version, root
