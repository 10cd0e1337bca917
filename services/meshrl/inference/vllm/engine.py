"""The vLLM engine: vLLM's async front end as an `Engine`, in the process that serves HTTP.

Requests go to vLLM's engine process as token ids and come back whole (see `whole_completions`), unless they stream;
weights go to its workers (see `worker`).

Asleep (vLLM's sleep mode, level 1), its scheduler is paused and only a copy of the weights on the host is left. Waking
ends that pause, which the scheduler counts like any other.
"""

from __future__ import annotations

import asyncio
import dataclasses
import pickle
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from loguru import logger
from numpy.typing import NDArray
from vllm.inputs import tokens_input
from vllm.lora.request import LoRARequest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from meshrl.core.waiting import InFlight
from meshrl.inference.adapters import AdapterTable, ServedAdapter
from meshrl.inference.engine import (
    CollectiveSupport,
    Engine,
    EngineStats,
    GenerateRequest,
    HostVersion,
    SamplingParams,
    TokenChunk,
)
from meshrl.inference.sleep import Sleeper
from meshrl.inference.vllm.adapters import AdapterStore, parts_of
from meshrl.inference.vllm.calls import RPC_DEADLINE_S, EngineCalls
from meshrl.inference.vllm.installed import VllmError, client_errors, kv_tokens_of
from meshrl.inference.vllm.requests import RequestCodec, RoutedLayers
from meshrl.inference.vllm.version_clock import VersionClock
from meshrl.inference.vllm.whole_completions import AHEAD, PROBE_SEATS
from meshrl.models.state import hf_state
from meshrl.versions.layout import Layout, layout_of, mismatch
from meshrl.versions.placement import check_parts
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.types import JoinGroup, Manifest, VersionSpan

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from meshrl.inference.vllm.worker import WorkerPhase

OPEN_DEADLINE_S = 1800.0  # a checkpoint may be read once more
STAGE_DEADLINE_S = 600.0
RECEIVE_STALL_S = 30.0
SLEEP_DEADLINE_S = 180.0
LOADING_SHARE = 0.1  # of the engine's time, while an adapter is loaded between its steps
LEAST_TEMPERATURE = 0.01  # vLLM raises any lower one but 0 to it


class VllmEngine(Engine):
    """Over one AsyncLLM. `start` it on the loop that will consume its tokens."""

    stages_from_files = True  # the workers are other processes

    sharing: asyncio.Task[None] | None = None
    """Gives what was compiled to the hub."""

    def __init__(
        self, llm: AsyncLLM, *, outline: PreTrainedModel, vocab_size: int, eos_token_ids: tuple[int, ...],
        max_queue: int, store: AdapterStore | None, version: int | None, routed: RoutedLayers | None = None,
    ) -> None:  # fmt: skip
        """Takes over `llm`; `version` as of `EmbeddedEngine`."""
        config = llm.vllm_config
        parallel = config.parallel_config
        self._copies = parallel.data_parallel_size
        self.num_slots: int = (config.scheduler_config.max_num_seqs - PROBE_SEATS) * self._copies
        super().__init__(
            max_model_len=config.model_config.max_model_len,
            vocab_size=vocab_size,
            capacity=self.num_slots + max_queue,
            reports_routes=routed is not None,
        )
        self._llm, self._layout, self._store = llm, layout_of(hf_state(outline)), store
        self.outline = outline
        self._calls = EngineCalls(llm)
        on_gpu, self._ranks = config.device_config.device_type == "cuda", parallel.world_size * self._copies
        if (lora := config.lora_config) is None:
            self.collective = CollectiveSupport(ranks=self._ranks, backend="nccl" if on_gpu else "gloo")
        else:  # adapters are small and come as files
            places = max(lora.max_loras, lora.max_cpu_loras or 0)
            self.adapters = AdapterTable[LoRARequest](places, lora.max_lora_rank, unload=self._unload)
        self._unloading: set[asyncio.Task[None]] = set()
        self._kv_tokens = kv_tokens_of(config)
        self._clock = VersionClock(version)
        self._requests = RequestCodec(self._clock, eos_token_ids=eos_token_ids, routed=routed)
        self._staged: int | None = None
        self._paused = False
        self._unfit: str | None = None
        self._versions_under_way = InFlight()  # staged, received or groups joined, at this moment
        self.can_sleep = bool(config.model_config.enable_sleep_mode) and on_gpu
        self._sleeper = Sleeper(self._fall_asleep, self._wake_up, busy=self._has_work, deadline_s=SLEEP_DEADLINE_S)
        self._counts = dict.fromkeys(("tokens", "prompt", "finished"), 0)
        self._client_errors = client_errors()

    # --- state ------------------------------------------------------------------------------

    @property
    def version(self) -> int | None:
        return self._clock.version

    @property
    def paused(self) -> bool:
        return self._paused

    @property
    def unfit(self) -> str | None:
        return self._unfit or self.lost

    @property
    def lost(self) -> str | None:
        gone = "vLLM's engine process is gone; its last log lines say why"
        return gone if self._llm.errored else self._sleeper.failed

    @property
    def sleeping(self) -> bool:
        return self._sleeper.sleeping

    def layout(self) -> Layout:
        return self._layout

    def stats(self) -> EngineStats:
        return EngineStats(
            running=min(self.in_flight, self.num_slots),
            waiting=max(self._requests.queued if self.in_flight else 0, self.in_flight - self.num_slots),
            slots=self.num_slots,
            generated_tokens=self._counts["tokens"],
            prefilled_tokens=self._counts["prompt"],
            finished_requests=self._counts["finished"],
            last_pause_s=self._last_pause_s,
            kv_tokens=self._kv_tokens,
            preempted=self._requests.preempted,
        )

    # --- life -------------------------------------------------------------------------------

    async def start(self) -> list[WorkerPhase]:
        """Builds the workers' shadows; returns how a worker came up. Raises VllmError when this model cannot take
        versions."""
        made = await self._calls.rpc("meshrl_open", self._calls.ends.address, deadline_s=OPEN_DEADLINE_S)
        if "reason" in made:
            raise VllmError(made["message"])
        self.patches = self.receives_deltas = made["shadow"] == "ParameterShadow"
        logger.info(
            "weight versions are staged as {} on {} ({} worker(s))", made["shadow"], made["device"], self._ranks
        )
        phases: list[WorkerPhase] = made["phases"]
        return phases

    async def close(self, deadline_s: float = 0.0) -> None:
        await self._drain(deadline_s)
        if self.sharing is not None:
            self.sharing.cancel()
        self._llm.shutdown()
        self._calls.ends.close()
        if self._store is not None:
            self._store.close()

    # --- requests ---------------------------------------------------------------------------

    async def _complete(
        self,
        request: GenerateRequest,
        adapter: ServedAdapter[LoRARequest] | None,
        *,
        copy: int | None = None,
        priority: int = 0,
    ) -> AsyncGenerator[TokenChunk, None]:
        """`copy`: of the model, by its number; None: vLLM chooses."""
        sampling = request.sampling
        changed = sampling.reweighted or sampling.truncated or sampling.temperature not in (0.0, 1.0)
        if sampling.raw_logprobs and changed:
            raise MeshError(
                Reason.NOT_SUPPORTED,
                "vLLM reports one kind of logprobs, those sampled from; leave raw_logprobs out, or sample at "
                "temperature 1 without cuts, penalties and biases, where both are the same",
            )
        if not sampling.greedy and sampling.temperature < LEAST_TEMPERATURE:
            raise MeshError(
                Reason.INVALID_REQUEST,
                f"temperature {sampling.temperature:g} would be {LEAST_TEMPERATURE} in vLLM; send at least"
                f" {LEAST_TEMPERATURE}, or 0 for the likeliest tokens",
            )
        with self._in_flight.one():  # from here on it does not fall asleep
            try:
                await self._sleeper.wake()
                prompt = tokens_input(list(request.prompt_ids), cache_salt=self._clock.salt)
                params = self._requests.params(request, self._room(request))
                outputs = self._llm.generate(
                    prompt, params, f"{request.request_id}-{uuid.uuid4().hex}",
                    lora_request=None if adapter is None else adapter.loaded,
                    data_parallel_rank=copy, priority=priority,
                )  # fmt: skip
                start = 0
                async for output in outputs:
                    chunk = self._requests.chunk(request, output, start)
                    if adapter is not None and chunk.finish_reason is not None:
                        end = start + len(chunk.token_ids)
                        spans = (VersionSpan(start=0, end=end, version=adapter.version),)
                        chunk = dataclasses.replace(chunk, version_spans=spans)
                    start += len(chunk.token_ids)
                    if chunk.finish_reason is not None:
                        self._counts["tokens"] += start
                        self._counts["prompt"] += len(request.prompt_ids)
                        self._counts["finished"] += 1
                    yield chunk
            except EngineDeadError as error:
                raise MeshError(Reason.ENGINE_FAILED, "vLLM's engine process is gone; its log says why") from error
            except self._client_errors as error:
                raise MeshError(Reason.INVALID_REQUEST, f"vLLM refuses the request: {error}") from error

    async def _score(
        self, prompt_ids: tuple[int, ...], adapter: ServedAdapter[LoRARequest] | None
    ) -> list[NDArray[np.float32]]:
        sampling = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, prompt_logprobs=1)
        request = GenerateRequest(request_id="probe", prompt_ids=prompt_ids, sampling=sampling)

        async def by(copy: int | None) -> NDArray[np.float32]:
            async with aclosing(self._complete(request, adapter, copy=copy, priority=AHEAD)) as chunks:
                async for chunk in chunks:
                    if chunk.prompt_logprobs is not None:
                        return chunk.prompt_logprobs.logprobs
            raise MeshError(Reason.NOT_SUPPORTED, "vLLM sent no logprobs of the probe, as some of its parts do")

        return await asyncio.gather(*(by(copy if self._copies > 1 else None) for copy in range(self._copies)))

    # --- sleep ------------------------------------------------------------------------------

    async def sleep(self) -> bool:
        return await self._sleeper.sleep() if self.can_sleep else False

    async def wake(self) -> None:
        await self._sleeper.wake()

    def _has_work(self) -> bool:
        return bool(self.in_flight or self._versions_under_way.count or self._paused or self._staged is not None)

    async def _fall_asleep(self) -> None:
        began_s = time.monotonic()
        free_before = int(await self._calls.rpc("meshrl_sleep"))
        # "keep" and not vLLM's own "abort": nothing is ever dropped for sleep.
        await self._calls.core(self._llm.sleep(level=1, mode="keep"), SLEEP_DEADLINE_S)
        freed = int(await self._calls.rpc("meshrl_free_bytes")) - free_before
        logger.info("asleep after {:.2f} s; {:.2f} GiB are free again", time.monotonic() - began_s, freed / 2**30)

    async def _wake_up(self) -> None:
        began_s = time.monotonic()
        self._clock.resumed()  # the scheduler counts the end of this pause, too
        await self._calls.core(self._llm.wake_up(), SLEEP_DEADLINE_S)
        logger.info("awake after {:.2f} s", time.monotonic() - began_s)

    # --- weights ----------------------------------------------------------------------------

    async def pause(self) -> int:
        with self._versions_under_way.one():
            await self._sleeper.wake()
            if not self._paused:
                self._paused, self._paused_at = True, time.monotonic()
                # Not through AsyncLLM.pause_generation, which sleeps 20 ms on top for tidier logs.
                await self._calls.core(self._llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=False))
            return self.in_flight

    async def resume(self) -> None:
        if self._paused:
            self._clock.resumed()
            await self._calls.core(self._llm.resume_generation())
            self._paused, self._last_pause_s = False, time.monotonic() - self._paused_at

    async def stage(self, host: HostVersion) -> None:
        self._staged = None
        with self._versions_under_way.one():
            await self._sleeper.wake()
            if self.adapters is not None and self._store is not None:
                await self._load(host, self.adapters, self._store)
                return
            if host.adapter is not None:
                raise MeshError(Reason.NOT_SUPPORTED, "this engine was started without LoRA; set inference.enable_lora")
            refused = mismatch(host.version, self._layout, layout_of(host.tensors))
            if refused is not None:
                raise refused
            files = [str(path) for path in host.files]
            await self._calls.job("meshrl_stage", host.version, files, deadline_s=STAGE_DEADLINE_S)
            self._staged = host.version

    async def patch(self, manifest: Manifest, delta: Path, *, onto_staged: bool) -> None:
        self._staged = None
        with self._versions_under_way.one():
            await self._sleeper.wake()
            patch = ("meshrl_patch", pickle.dumps(manifest), str(delta), onto_staged)
            try:
                check_parts(manifest, await self._calls.job(*patch, deadline_s=STAGE_DEADLINE_S))
            except MeshError as error:
                if error.reason is Reason.NOT_SUPPORTED or onto_staged:  # the base was right
                    logger.warning("deltas are applied to a copy on the host from now on: {}", error)
                    self.patches = False
                raise
            self._staged = manifest.version

    async def _load(self, host: HostVersion, adapters: AdapterTable[LoRARequest], store: AdapterStore) -> None:
        if host.adapter is None:
            raise MeshError(Reason.NOT_SUPPORTED, "an engine with LoRA takes adapters; publish them without merging")
        number = await adapters.room(host.run_id)
        folder = await asyncio.to_thread(store.write, host, self._layout, number)
        request = LoRARequest(f"{host.run_id}@{host.version}", number, str(folder))
        try:
            await self._load_parts(request)
        except MeshError as error:
            logger.warning("{} is loaded at once, and other requests wait meanwhile: {}", request.lora_name, error)
            try:
                await self._drop(number)
                await self._calls.core(self._llm.add_lora(request))
            except BaseException:  # whatever it was, nothing names the folder
                store.remove(number)
                raise
        except BaseException:  # a load that is given up holds a slot
            self._unload(ServedAdapter(run_id=host.run_id, version=host.version, number=number, loaded=request))
            raise
        adapters.add(host.run_id, host.version, number, request)

    async def _load_parts(self, request: LoRARequest) -> None:
        began_s = time.monotonic()
        parts = await asyncio.to_thread(parts_of, Path(request.lora_path))
        await self._calls.rpc("meshrl_open_adapter", request.lora_int_id, request.lora_path)
        took_s: list[float] = []
        loaded, at_once = 0, 1
        while loaded < len(parts):
            called_s = time.monotonic()
            some = parts[loaded : loaded + at_once]
            loaded += len(some)
            tensors = [tensor for part in some for tensor in part]
            took_s += [await self._calls.rpc("meshrl_load_adapter", request.lora_int_id, tensors, loaded == len(parts))]
            # The engine makes a step between two calls, of 0.2 s for a mixture that fills its GPU.
            at_once = max(1, int(len(some) * LOADING_SHARE * (time.monotonic() - called_s) / took_s[-1]))
        logger.info(
            "adapter {} is loaded, {} parts between steps in {:.2f} s, of {:.1f} ms at most",
            request.lora_name, len(parts), time.monotonic() - began_s, 1e3 * max(took_s),
        )  # fmt: skip

    async def _drop(self, number: int) -> None:
        while any(await self._calls.answers("meshrl_drop_adapter", number)):
            pass  # some layers are freed a call, and the engine makes a step between two of them

    def _unload(self, adapter: ServedAdapter[LoRARequest]) -> None:
        async def unload() -> None:
            try:
                await self._drop(adapter.number)
            except MeshError as error:  # the engine is ending, or vLLM has dropped it by itself
                logger.debug("{} was not unloaded: {}", adapter.name, error)
            if self._store is not None:
                await asyncio.to_thread(self._store.remove, adapter.number)

        task = asyncio.get_running_loop().create_task(unload())
        self._unloading.add(task)
        task.add_done_callback(self._unloading.discard)

    async def apply(self, version: int, root: bytes) -> None:
        held = self._staged
        if held != version:
            named = "nothing" if held is None else f"version {held}"
            raise MeshError(Reason.VERSION_NOT_SEALED, f"version {version} is not staged here, but {named}; stage it")
        if not self._paused:
            raise MeshError(Reason.INVALID_REQUEST, "weights are applied only while the engine is paused; pause first")
        self._staged = None
        try:
            await self._calls.rpc("meshrl_apply", version)
        except MeshError as error:
            self._unfit = f"applying version {version} failed: {error.message}"
            raise MeshError(Reason.ENGINE_FAILED, self._unfit) from error
        self._unfit = None
        self.root = root
        self._clock.serve(version)

    async def condemn(self, why: str) -> None:
        self._unfit, self._paused, self._paused_at = why, True, time.monotonic()
        await self._calls.core(self._llm.engine_core.pause_scheduler_async(mode="abort", clear_cache=False))

    async def adopt(self, version: int, root: bytes) -> None:
        self.check_fit()
        self.root = root
        self._clock.serve(version, same=True)

    async def join_group(self, group: JoinGroup) -> None:
        with self._versions_under_way.one():
            deadline_s = group.deadline_s + RPC_DEADLINE_S
            await self._calls.job("meshrl_join", dataclasses.asdict(group), deadline_s=deadline_s)

    async def receive(self, manifest: Manifest) -> None:
        self._staged = None
        with self._versions_under_way.one():
            await self._sleeper.wake()
            try:
                receive = ("meshrl_receive", pickle.dumps(manifest), RECEIVE_STALL_S)
                parts = await self._calls.job(*receive, deadline_s=STAGE_DEADLINE_S)
                if any(parts):  # of a delta, or each worker got its own
                    check_parts(manifest, parts)
            except asyncio.CancelledError:
                await asyncio.shield(self.leave_group())
                raise
            self._staged = manifest.version

    async def leave_group(self) -> None:
        await self._calls.rpc("meshrl_leave")
