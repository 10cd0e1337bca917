"""`Engine`, the base of all engines and their interface for the HTTP server and the weight agent, and its data types.

Weights change between two steps: `stage` builds a shadow beside the running engine, `pause` stops stepping, `apply`
swaps, `resume` goes on with the same requests and their KV cache.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal

import numpy as np
from loguru import logger
from numpy.typing import NDArray

from meshrl.core.waiting import InFlight
from meshrl.inference.adapters import RETRY_AFTER_S, AdapterTable, ServedAdapter
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.types import AdapterConfig, JoinGroup, Manifest, VersionSpan
from meshrl.wire.types.routes import Routes

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from meshrl.versions.layout import Layout

GREEDY_BELOW = 1e-5
MAX_ALTERNATIVES = 64
MAX_HELD_BACK = 120
"""Most stop tokens of a request with min_tokens, the model's own included: vLLM's engine process dies of more than
128."""


class FinishReason(enum.StrEnum):
    """Why a completion ended, in OpenAI's words."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to sample one completion.

    First logits are reweighted, in vLLM's order. logit_bias is added. Then, of tokens in the prompt or the completion,
    positive logits are divided by repetition_penalty and negative ones multiplied. Then frequency_penalty is subtracted
    for each time that a token is in the completion, and presence_penalty once. The processed distribution is
    softmax(reweighted / temperature), cut by min_p, then top_k, then top_p, and normalised again. A temperature of 0
    takes the most likely token, with its logprob of the uncut distribution at temperature 1.
    """

    max_tokens: int  # at most; fewer where fewer fit behind the prompt
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 keeps every token
    min_p: float = 0.0
    min_tokens: int = 0  # stop tokens cannot be sampled before this many
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # by token id
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None  # None takes one from the engine's own stream
    logprobs: bool = True  # False: nobody reads them, so they may be left out (NaN)
    top_logprobs: int = 0  # alternatives to report for each token
    prompt_logprobs: int | None = None  # report logprobs of the prompt's tokens, above 1 also so many alternatives
    raw_logprobs: bool = False  # report the logprob of the plain model, too: temperature 1, not reweighted, uncut
    routed_experts_prompt_start: int | None = None  # report routes of all tokens from this one of the prompt on

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def truncated(self) -> bool:
        return not self.greedy and (self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0)

    @property
    def penalised(self) -> bool:
        """Whether a token's weight depends on the tokens before it."""
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0.0, 0.0, 1.0)

    @property
    def reweighted(self) -> bool:
        return self.penalised or bool(self.logit_bias)


@dataclass(frozen=True, kw_only=True)
class GenerateRequest:
    """With `stream` each step yields a chunk, else one comes at the end."""

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    stream: bool = False
    policy: str = ""  # whose adapter samples it; see `AdapterTable.using`


@dataclass(frozen=True, kw_only=True)
class RequestTimes:
    """In the queue, until the first token, and for the others."""

    queue_s: float
    prefill_s: float
    decode_s: float


@dataclass(frozen=True, kw_only=True, eq=False)
class PromptLogprobs:
    """Of P prompt tokens, and K alternatives in the place of each; the first token's have no meaning."""

    logprobs: NDArray[np.float32]  # (P,) of each token after those before it; the first NaN
    top_ids: NDArray[np.int32] | None = None  # (P, K)
    top_logprobs: NDArray[np.float32] | None = None  # (P, K)


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenChunk:
    """Tokens [start, start + T) of a completion; K alternatives a token, most likely first.

    Version spans count from the start of the completion; an engine may give all with the last chunk. A candidate that
    the cuts removed has logprob -inf.
    """

    start: int
    token_ids: NDArray[np.int32]  # (T,)
    logprobs: NDArray[np.float32]  # (T,) of the processed distribution
    raw_logprobs: NDArray[np.float32] | None = None  # (T,)
    top_ids: NDArray[np.int32] | None = None  # (T, K)
    top_logprobs: NDArray[np.float32] | None = None  # (T, K)
    version_spans: tuple[VersionSpan, ...] = ()
    finish_reason: FinishReason | None = None  # None: more chunks follow
    stop_token_id: int | None = None
    prompt_logprobs: PromptLogprobs | None = None  # with the first chunk, where the request asks for them
    routed_experts: Routes | None = None  # (N, L, K) with the last chunk: from the token asked for to the last but one
    times: RequestTimes | None = None  # with the last chunk, where the engine knows them

    @property
    def alternatives(self) -> list[list[tuple[int, float]]]:
        if self.top_ids is None or self.top_logprobs is None:
            return [[] for _ in self.token_ids]
        ranked = zip(self.top_ids.tolist(), self.top_logprobs.tolist(), strict=True)
        return [list(zip(ids, logprobs, strict=True)) for ids, logprobs in ranked]

    @property
    def version(self) -> int | None:
        return self.version_spans[-1].version if self.version_spans else None

    @property
    def prompt_version(self) -> int | None:
        """Oldest version that computed a part of the prompt's KV cache; None unless this is the beginning."""
        if not self.version_spans or self.version_spans[0].start > 0:
            return None
        first = self.version_spans[0]
        return first.version if first.prompt_version is None else first.prompt_version


@dataclass(frozen=True, kw_only=True)
class EngineStats:
    """Totals are since the engine's start."""

    running: int
    waiting: int
    slots: int
    generated_tokens: int
    prefilled_tokens: int
    finished_requests: int
    shared_prompt_tokens: int = 0
    steps: int = 0
    busy_s: float = 0.0
    last_pause_s: float = 0.0
    kv_tokens: int = 0  # tokens that the KV cache has room for, over all requests; 0 where it is not known
    preempted: int = 0  # requests that lost their room in it and were begun anew


@dataclass(frozen=True, kw_only=True, eq=False)
class HostVersion:
    """A version in this host's memory, its digests checked, ready to be staged.

    `tensors` has Hugging Face names, or PEFT's if `adapter` describes them as a LoRA adapter of the base model. `files`
    are safetensors files of the same tensors, for engines that `stages_from_files`.
    """

    version: int
    tensors: Mapping[str, torch.Tensor]
    adapter: AdapterConfig | None = None
    run_id: str = ""
    files: tuple[Path, ...] = ()


@dataclass(frozen=True, kw_only=True)
class CollectiveSupport:
    """Ranks in broadcasts (nccl transport), one a device, and their backend."""

    ranks: int
    backend: Literal["nccl", "gloo"]


class Engine(ABC):
    """Raises everywhere `MeshError` with ENGINE_FAILED once the engine is unfit (a failed apply), DRAINING after close.

    An engine that overrides only the abstract members never sleeps and takes whole versions alone.
    """

    logprobs_mode: Final = "processed_logprobs"
    """The chunks' logprobs are of the distribution sampled from."""

    stages_from_files: ClassVar[bool] = False
    """Whether `stage` reads `HostVersion.files`, for a model in other processes of this host."""

    patches: bool = False
    """Whether `patch` makes the next version from the served one, so that no copy of it is needed."""

    receives_deltas: bool = False
    """Whether `receive` makes a version of its delta and the served weights."""

    can_sleep: bool = False

    adapters: AdapterTable[Any] | None = None
    """None for an engine without adapters."""

    collective: CollectiveSupport | None = None
    """None for an engine that takes no part in broadcasts."""

    outline: PreTrainedModel | None = None
    """A model with the names and shapes of the weights, by which files are read that have them otherwise."""

    root: bytes | None = None
    """Of the live weights, when known."""

    draining = False

    def __init__(self, *, max_model_len: int, vocab_size: int, capacity: int, reports_routes: bool) -> None:
        """`max_model_len`: tokens of prompt and completion together; `capacity`: requests in flight."""
        self.max_model_len, self.vocab_size = max_model_len, vocab_size
        self._capacity, self._reports_routes = capacity, reports_routes
        self._in_flight = InFlight()
        self._paused_at = self._last_pause_s = 0.0

    # --- state ------------------------------------------------------------------------------

    @property
    @abstractmethod
    def version(self) -> int | None:
        """None before the first one is known."""

    @property
    @abstractmethod
    def paused(self) -> bool: ...

    @property
    @abstractmethod
    def unfit(self) -> str | None:
        """Why this engine must not serve; None when it may."""

    @property
    @abstractmethod
    def lost(self) -> str | None:
        """Why this engine can never serve again, on which the program ends; None while it may."""

    @property
    def sleeping(self) -> bool:
        """Whether it has given memory back; a request or a version wakes it."""
        return False

    @property
    def runs(self) -> Mapping[str, ServedAdapter[Any]]:
        """The newest adapter of each run."""
        return {} if self.adapters is None else self.adapters.newest

    @property
    def in_flight(self) -> int:
        return self._in_flight.count

    @abstractmethod
    def stats(self) -> EngineStats:
        """Read without stopping the engine."""

    @abstractmethod
    def layout(self) -> Layout:
        """(name, dtype, shape) of every weight, sorted by Hugging Face name, tied duplicates left out."""

    async def weights_root(self) -> bytes:
        """Computed from the bytes of the live weights; empty if the engine cannot read them back."""
        return b""

    # --- life -------------------------------------------------------------------------------

    def begin_drain(self) -> None:
        """Refuses new requests; those in flight go on."""
        self.draining = True

    @abstractmethod
    async def close(self, deadline_s: float = 0.0) -> None:
        """Drains for at most `deadline_s`, aborts the rest and frees the model."""

    async def _drain(self, deadline_s: float) -> None:
        self.begin_drain()
        if deadline_s > 0 and not await self._in_flight.idle_within(deadline_s):
            logger.warning("{} requests were still running at the drain deadline; aborting them", self.in_flight)

    async def sleep(self) -> bool:
        """Gives memory back (weights to the host, KV cache dropped) until the next `wake`; returns whether the engine
        sleeps.

        Requests in flight, a pause or a version under way keep it awake. A failure leaves it unfit for good and raises
        MeshError ENGINE_FAILED.
        """
        return False

    async def wake(self) -> None:  # noqa: B027  # an engine that never sleeps has nothing to do
        """Takes the memory again, as `generate`, `pause`, `stage` and `receive` do by themselves; fails as `sleep`."""

    # --- requests ---------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        """Yields chunks until one carries a finish reason; closing the iterator cancels the request. Raises as
        `check_request`."""
        with nullcontext() if self.adapters is None else self.adapters.using(request.policy) as adapter:
            self.check_request(request, of_adapter=adapter is not None)
            async with aclosing(self._complete(request, adapter)) as chunks:
                async for chunk in chunks:
                    yield chunk

    @abstractmethod
    def _complete(
        self, request: GenerateRequest, adapter: ServedAdapter[Any] | None
    ) -> AsyncGenerator[TokenChunk, None]:
        """As `generate`, for a request that may be served."""

    async def score(self, prompt_ids: tuple[int, ...], policy: str | None = None) -> list[NDArray[np.float32]]:
        """(P,) logprob of each token of a prompt after those before it, the first NaN, by each copy of the model.

        Ahead of waiting requests; only while not paused. `policy`: as of `AdapterTable.using`; None is the base model.
        Raises MeshError ENGINE_FAILED for logprobs that are not finite.
        """
        with nullcontext() if policy is None or self.adapters is None else self.adapters.using(policy) as adapter:
            return await self._score(prompt_ids, adapter)

    @abstractmethod
    async def _score(
        self, prompt_ids: tuple[int, ...], adapter: ServedAdapter[Any] | None
    ) -> list[NDArray[np.float32]]: ...

    def _room(self, request: GenerateRequest) -> int:
        return min(request.sampling.max_tokens, self.max_model_len - len(request.prompt_ids))

    def check_fit(self) -> None:
        """Raises MeshError ENGINE_FAILED for an engine that may hold torn weights."""
        if self.unfit is not None:
            raise MeshError(Reason.ENGINE_FAILED, f"this engine must be reseeded: {self.unfit}")

    def check_request(self, request: GenerateRequest, *, of_adapter: bool = False) -> None:
        """A request `of_adapter` needs no version of the base model. Raises MeshError ENGINE_FAILED, DRAINING,
        VERSION_NOT_AVAILABLE and OVERLOADED for the engine's state, INVALID_REQUEST and NOT_SUPPORTED for the
        request."""
        self.check_fit()
        if self.draining:
            raise MeshError(Reason.DRAINING, "this engine is shutting down; use another one")
        if self.version is None and not of_adapter:
            message = "this engine has no weight version yet; it serves once its agent has applied one"
            raise MeshError(Reason.VERSION_NOT_AVAILABLE, message, retry_after_s=RETRY_AFTER_S)
        if self.in_flight >= self._capacity:
            full = f"{self._capacity} requests are running or waiting here, which is all that may"
            raise MeshError(Reason.OVERLOADED, f"{full}; retry, or raise max_queue", retry_after_s=RETRY_AFTER_S)
        sampling, length, limit = request.sampling, len(request.prompt_ids), self.max_model_len
        stops, start = sampling.stop_token_ids, sampling.routed_experts_prompt_start
        if start is not None and not self._reports_routes:
            text = (
                "this engine reports no routed experts; start it with inference.enable_return_routed_experts, or leave"
                " routed_experts_prompt_start out"
            )
            raise MeshError(Reason.NOT_SUPPORTED, text)
        wrong = None
        if not 0 < length < limit:
            wrong = (
                f"the prompt has {length} tokens, but this model's maximum context length is {limit} tokens, at least"
                f" one of them for the completion; send 1 to {limit - 1} prompt tokens"
            )
        elif min(request.prompt_ids) < 0 or max(request.prompt_ids) >= self.vocab_size:
            wrong = f"prompt token ids must be in [0, {self.vocab_size})"
        elif any(not 0 <= token < self.vocab_size for token in stops):
            wrong = f"stop_token_ids must be in [0, {self.vocab_size})"
        elif any(not 0 <= token < self.vocab_size for token in sampling.logit_bias):
            wrong = f"token ids of logit_bias must be in [0, {self.vocab_size})"
        elif sampling.min_tokens > 0 and len(set(stops)) > MAX_HELD_BACK:
            wrong = (
                f"{len(set(stops))} different stop_token_ids with min_tokens, which holds back at most {MAX_HELD_BACK};"
                " name fewer, or leave min_tokens out"
            )
        elif start is not None and start > length:
            wrong = f"routed_experts_prompt_start {start} is beyond the prompt's {length} tokens"
        if wrong is not None:
            raise MeshError(Reason.INVALID_REQUEST, wrong)

    # --- weights ----------------------------------------------------------------------------

    @abstractmethod
    async def pause(self) -> int:
        """Stops between two steps, keeping requests; returns how many are in flight. Pausing twice is fine."""

    @abstractmethod
    async def resume(self) -> None: ...

    @abstractmethod
    async def stage(self, host: HostVersion) -> None:
        """Builds the shadow of a version while generation goes on; an earlier one is dropped.

        Raises MeshError LAYOUT_MISMATCH, NOT_SUPPORTED for an adapter that it cannot serve, OUT_OF_MEMORY; the live
        version stays.
        """

    async def patch(self, manifest: Manifest, delta: Path, *, onto_staged: bool) -> None:
        """Builds the shadow by a delta in a file, from the served version or, `onto_staged`, the staged one.

        Every digest of the result is checked. Raises MeshError NOT_SUPPORTED if the engine turns out not to patch,
        DIGEST_MISMATCH; the live version stays.
        """
        raise MeshError(Reason.NOT_SUPPORTED, "this engine takes whole versions alone")

    @abstractmethod
    async def join_group(self, group: JoinGroup) -> None:
        """Meets the senders and leaves the group before; raises MeshError GROUP_BROKEN unless all come."""

    @abstractmethod
    async def receive(self, manifest: Manifest) -> None:
        """Builds the shadow of a version from its senders' broadcast, while generation goes on. Every digest is
        checked.

        Cancelling it breaks the group. Raises MeshError GROUP_BROKEN when the group is gone or nothing came in time,
        DIGEST_MISMATCH, LAYOUT_MISMATCH, OUT_OF_MEMORY; the live version stays.
        """

    @abstractmethod
    async def leave_group(self) -> None:
        """A receive under way included."""

    @abstractmethod
    async def apply(self, version: int, root: bytes) -> None:
        """Makes the staged shadow live; only while paused. Raises MeshError VERSION_NOT_SEALED when `version` is not
        staged, ENGINE_FAILED for a failure, which leaves the engine unfit."""

    @abstractmethod
    async def adopt(self, version: int, root: bytes) -> None:
        """Names the live weights `version`, whose root they already have."""

    @abstractmethod
    async def condemn(self, why: str) -> None:
        """Pauses and is unfit until another version is applied; requests in flight end."""
