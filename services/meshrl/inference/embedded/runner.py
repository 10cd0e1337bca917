"""Runs one step of the model: takes what the slot table planned, returns a sampled token for each decoding row.

Each request owns a counter-based stream of uniforms: the n-th is a hash of (seed, n), so its draws depend on its seed
and its own distribution alone. Shapes: R decoding rows, T tokens of the step (rows first, then prompt pieces), V
vocabulary, K alternatives, B rows that are sampled, C rows with some cut.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from loguru import logger
from numpy.typing import NDArray
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PreTrainedModel

from meshrl.inference.embedded.cache import (
    ATTENTION_NAME,
    PLAN_ARGUMENT,
    Segment,
    SlotCache,
    SlotLayer,
    StepPlan,
    bytes_per_slot,
    probe_layers,
    slot_attention,
)
from meshrl.inference.embedded.low_rank import BASE, AdapterLayers
from meshrl.inference.embedded.routes import RouteStore
from meshrl.inference.embedded.slots import PrefillPiece, SlotStore, SlotTable, StepOutput
from meshrl.inference.engine import PromptLogprobs, SamplingParams
from meshrl.models.attention import use_attention
from meshrl.models.families import unpacked_reason
from meshrl.models.routers import Routers

RECOMPUTED_TOKENS = 8192  # in one forward pass, unless one sequence alone is longer
SCORED_LOGITS = 2**28  # of a prompt, in one forward pass: a gigabyte of float32
GPU_BLOCK = 64
# not cuDNN: it plans anew for every length, which takes longer than the step
GPU_ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


@dataclass(frozen=True, kw_only=True, eq=False)
class BatchSampling:
    """Parameters of B rows, rebuilt when a row joins, leaves or moves. None: no row needs this part.

    `top_k` is V for rows that keep every token; `greedy` marks rows that take the most likely token.
    """

    temperature: torch.Tensor | None = None  # (B, 1)
    greedy: torch.Tensor | None = None  # (B,)
    cut_rows: torch.Tensor | None = None  # (C,) rows with any cut; the next three are of these rows only
    min_p: torch.Tensor | None = None  # (C, 1)
    top_k: torch.Tensor | None = None  # (C, 1)
    top_p: torch.Tensor | None = None  # (C, 1)
    num_alternatives: int = 0
    raw: bool = False


class ModelRunner(ABC):
    """Used by one thread."""

    cache: SlotCache | None = None

    def __init__(self, model: PreTrainedModel, *, num_slots: int, max_len: int, keep_routes: bool) -> None:
        self.model = model
        self.num_slots = num_slots
        self.max_len = max_len
        self.device = model.device
        self.adapters = AdapterLayers(model, model.device)
        self.routes = RouteStore(Routers(model), num_slots=num_slots, max_len=max_len) if keep_routes else None
        self._params = BatchSampling()
        self._reweighted: list[int] = []  # slots of decoding rows with penalties or biases

    @property
    def stores(self) -> list[SlotStore]:
        """What moves with the rows."""
        return [store for store in (self.cache, self.routes) if store is not None]

    @abstractmethod
    def _forward(self, table: SlotTable, pieces: Sequence[PrefillPiece]) -> torch.Tensor:
        """(R, V) logits of the decoding rows."""

    def score_prompt(self, token_ids: Sequence[int], *, top_k: int = 0, adapter: int = BASE) -> PromptLogprobs:
        """The logprob of each token after those before it, and of the likeliest in its place, at temperature 1.

        One plain forward pass between two steps; several if all logits would take more than a gigabyte.
        """
        ids_P = torch.tensor(token_ids, dtype=torch.long, device=self.device)
        vocab_size = self.model.config.get_text_config().vocab_size
        found = torch.full((len(ids_P),), torch.nan, device=self.device)
        top_ids = torch.zeros((len(ids_P), min(top_k, vocab_size)), dtype=torch.int32, device=self.device)
        top_logprobs = torch.zeros(top_ids.shape, device=self.device)
        at_once = max(1, SCORED_LOGITS // vocab_size)
        accepts = "logits_to_keep" in inspect.signature(self.model.forward).parameters
        with torch.inference_mode(), self.adapters.passing(np.full(1, adapter)):
            for start in range(0, len(ids_P) - 1, at_once):
                end = min(start + at_once, len(ids_P) - 1)
                kept = {"logits_to_keep": torch.arange(start, end, device=self.device)} if accepts else {}
                logits = self.model(input_ids=ids_P[None], use_cache=False, **kept).logits[0]
                logits_CV = (logits if accepts else logits[start:end]).float()
                chosen_C = logits_CV.gather(1, ids_P[start + 1 : end + 1, None])[:, 0]
                lse_C = logits_CV.logsumexp(1)
                found[start + 1 : end + 1] = chosen_C - lse_C
                if top_k:
                    values_CK, ids_CK = logits_CV.topk(top_ids.shape[1], dim=1)
                    top_ids[start + 1 : end + 1] = ids_CK.to(torch.int32)
                    top_logprobs[start + 1 : end + 1] = values_CK - lse_C[:, None]
        return PromptLogprobs(
            logprobs=found.cpu().numpy(),
            top_ids=top_ids.cpu().numpy() if top_k else None,
            top_logprobs=top_logprobs.cpu().numpy() if top_k else None,
        )

    def step(self, table: SlotTable, pieces: Sequence[PrefillPiece]) -> StepOutput | None:
        """None when no row decodes."""
        rows = table.decoding
        with torch.inference_mode():
            logits_RV = self._forward(table, pieces)
            if rows == 0:
                return None
            if table.changed:
                params = [row.request.sampling for row in table.rows[:rows]]
                self._params = self._read_params(params)
                self._reweighted = [slot for slot, each in enumerate(params) if each.reweighted]
                table.changed = False
            live = table.slots[:rows]
            for slot in np.flatnonzero(live["generated"] < live["min_tokens"]):  # too early to stop
                stops = table.stop_SW[slot]
                logits_RV[slot, torch.from_numpy(stops[stops >= 0]).to(self.device)] = -torch.inf
            uniforms_R = uniforms(live["key"], live["generated"].astype(np.uint64))
            plain_RV = logits_RV
            if self._reweighted:
                logits_RV = reweight(plain_RV, table, self._reweighted)
            return sample(logits_RV, torch.from_numpy(uniforms_R).to(self.device), self._params, plain_RV)

    def _read_params(self, params: Sequence[SamplingParams]) -> BatchSampling:
        vocabulary = self.model.config.get_text_config().vocab_size
        cut_rows = [row for row, each in enumerate(params) if each.truncated]
        cuts = [params[row] for row in cut_rows]

        def column(values: list[float], neutral: float, dtype: torch.dtype = torch.float32) -> torch.Tensor | None:
            if all(value == neutral for value in values):
                return None
            return torch.tensor(values, dtype=dtype, device=self.device)[:, None]

        greedy = [each.greedy for each in params]
        return BatchSampling(
            temperature=column([1.0 if each.greedy else each.temperature for each in params], 1.0),
            greedy=torch.tensor(greedy, device=self.device) if any(greedy) else None,
            cut_rows=torch.tensor(cut_rows, device=self.device) if cut_rows else None,
            min_p=column([each.min_p for each in cuts], 0.0),
            top_k=column([min(each.top_k or vocabulary, vocabulary) for each in cuts], vocabulary, torch.int64),
            top_p=column([each.top_p for each in cuts], 1.0),
            num_alternatives=max((each.top_logprobs for each in params), default=0),
            raw=any(each.raw_logprobs for each in params),
        )


class SlotRunner(ModelRunner):
    """A token costs one token's work. For models with packed attention."""

    cache: SlotCache

    def __init__(
        self, model: PreTrainedModel, *, num_slots: int, max_len: int, kv_cache_bytes: int | None, keep_routes: bool
    ) -> None:
        """A bound on the cache's bytes may reduce the slots. Raises ValueError when not even one fits."""
        use_attention(model, ATTENTION_NAME, slot_attention)
        states = probe_layers(model)
        slot_bytes = bytes_per_slot(states, max_len)
        if kv_cache_bytes is not None:
            num_slots = min(num_slots, kv_cache_bytes // slot_bytes)
        if num_slots < 1:
            raise ValueError(
                f"one sequence of max_model_len {max_len} takes {slot_bytes} bytes of KV cache, more than the bound of "
                f"{kv_cache_bytes}; raise kv_cache_bytes or lower max_model_len"
            )
        self.cache = SlotCache([SlotLayer(num_slots, max_len, key, value) for key, value in states])
        super().__init__(model, num_slots=num_slots, max_len=max_len, keep_routes=keep_routes)

    def _forward(self, table: SlotTable, pieces: Sequence[PrefillPiece]) -> torch.Tensor:
        rows = table.decoding
        token_ids, positions = table.decode_inputs()
        slots = np.arange(rows)
        segments: list[Segment] = []
        if pieces:
            lengths = [len(piece.tokens) for piece in pieces]
            offsets = rows + np.cumsum([0, *lengths[:-1]])
            segments = [
                Segment(piece.row.slot, piece.start, length, int(offset))
                for piece, length, offset in zip(pieces, lengths, offsets, strict=True)
            ]
            token_ids = np.concatenate([token_ids, *(piece.tokens for piece in pieces)])
            positions = np.concatenate([positions, *(np.arange(s.start, s.start + s.length) for s in segments)])
            slots = np.concatenate([slots, np.repeat([s.slot for s in segments], lengths)])
        extent = int(positions[:rows].max()) + 1 if rows else 0  # tokens that decoding rows attend to
        if self.device.type == "cuda":  # in blocks: its kernels want aligned masks
            extent = min(-(-extent // GPU_BLOCK) * GPU_BLOCK, self.max_len)
        plan = StepPlan(
            cache=self.cache,
            max_len=self.max_len,
            slots_T=torch.from_numpy(slots).to(self.device),
            positions_T=torch.from_numpy(positions).to(self.device),
            rows=rows,
            extent=extent,
            ragged=rows > 0 and extent > int(positions[:rows].min()) + 1,
            segments=segments,
            dtype=self.cache.layers[0].keys.dtype,
        )
        attention = sdpa_kernel(GPU_ATTENTION) if self.device.type == "cuda" else nullcontext()
        adapters_T = table.slots["adapter"][slots]
        noting = nullcontext() if self.routes is None else self.routes.noting(slots, positions)
        with attention, noting, self.adapters.passing(adapters_T, adapters_T[:rows]):
            output = self.model(
                input_ids=torch.from_numpy(token_ids).to(self.device)[None],
                position_ids=plan.positions_T[None],
                use_cache=False,
                logits_to_keep=torch.arange(rows, device=self.device) if segments else 0,
                **{PLAN_ARGUMENT: plan},
            )
        logits_RV: torch.Tensor = output.logits[0]
        return logits_RV


class RecomputingRunner(ModelRunner):
    """Every whole sequence again for each token: slow, right for any causal LM."""

    def __init__(self, model: PreTrainedModel, *, num_slots: int, max_len: int, keep_routes: bool) -> None:
        super().__init__(model, num_slots=num_slots, max_len=max_len, keep_routes=keep_routes)
        accepts = inspect.signature(model.forward).parameters
        self._last_only = {"logits_to_keep": 1} if "logits_to_keep" in accepts else {}

    def _forward(self, table: SlotTable, pieces: Sequence[PrefillPiece]) -> torch.Tensor:
        """Ignores the prompt pieces: a decoding row computes its prompt again anyway."""
        lengths_R = table.slots["cached"][: table.decoding] + 1
        logits_RV = torch.empty(0, device=self.device)
        for length in np.unique(lengths_R):
            rows = np.flatnonzero(lengths_R == length)
            for start in range(0, len(rows), at_once := max(1, RECOMPUTED_TOKENS // int(length))):
                some = rows[start : start + at_once]
                token_ids = torch.from_numpy(table.tokens_SM[some, :length].astype(np.int64)).to(self.device)
                adapters_B = table.slots["adapter"][some]
                noting = nullcontext() if self.routes is None else self._noting(table, some, int(length))
                with noting, self.adapters.passing(np.repeat(adapters_B, length), adapters_B):
                    last_BV = self.model(input_ids=token_ids, use_cache=False, **self._last_only).logits[:, -1]
                if not len(logits_RV):
                    logits_RV = last_BV.new_empty((table.decoding, last_BV.shape[-1]))
                logits_RV[torch.from_numpy(some).to(self.device)] = last_BV
        return logits_RV

    def _noting(self, table: SlotTable, rows_B: NDArray[np.int64], length: int) -> AbstractContextManager[None]:
        assert self.routes is not None
        fresh_B1 = (table.slots["generated"][rows_B] == 0)[:, None]
        places, positions_N = np.nonzero(fresh_B1 | (np.arange(length) == length - 1))
        tokens_N = torch.from_numpy(places * length + positions_N).to(self.device)
        return self.routes.noting(rows_B[places], positions_N, tokens_N)


def make_runner(
    model: PreTrainedModel, *, num_slots: int, max_len: int, kv_cache_bytes: int | None, keep_routes: bool = False
) -> ModelRunner:
    """Raises ValueError when the cache bound is below one sequence, and for routes of a model without experts."""
    reason = unpacked_reason(model, max_len)
    if reason is None:
        return SlotRunner(
            model, num_slots=num_slots, max_len=max_len, kv_cache_bytes=kv_cache_bytes, keep_routes=keep_routes
        )
    logger.warning(
        "the embedded engine computes every sequence of {} again for each token, which is right but slow ({}); "
        "use vLLM for this model where it is installed: inference.engine = 'vllm'",
        type(model).__name__,
        reason,
    )
    return RecomputingRunner(model, num_slots=num_slots, max_len=max_len, keep_routes=keep_routes)


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014): every input bit reaches every output bit."""
    values = (values ^ (values >> np.uint64(30))) * _MIX_1
    values = (values ^ (values >> np.uint64(27))) * _MIX_2
    return values ^ (values >> np.uint64(31))


def stream_keys(seeds: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Start of each seed's stream; mixed first so that neighbouring seeds do not run through overlapping states."""
    return _mix(_mix(seeds + _GAMMA) ^ _GAMMA)


def uniforms(keys: NDArray[np.uint64], counters: NDArray[np.uint64]) -> NDArray[np.float64]:
    """The counter-th uniform in [0, 1) of each stream, with 53 bits."""
    bits = _mix(keys + (counters + np.uint64(1)) * _GAMMA) >> np.uint64(11)
    return bits.astype(np.float64) * 2.0**-53


def reweight(logits_RV: torch.Tensor, table: SlotTable, slots: Sequence[int]) -> torch.Tensor:
    """A copy of the logits in float32, with logit_bias and penalties of the rows in `slots` applied.

    As `SamplingParams` defines them; repetition_penalty is that of arXiv 1909.05858. U: different tokens of one row.
    """
    reweighted_RV = logits_RV.to(torch.float32, copy=True)
    for slot in slots:
        params = table.rows[slot].request.sampling
        logits_V = reweighted_RV[slot]
        if params.logit_bias:
            ids_U = torch.tensor(list(params.logit_bias), device=logits_V.device)
            logits_V[ids_U] += torch.tensor(list(params.logit_bias.values()), device=logits_V.device)
        if not params.penalised:
            continue
        prompt, made = table.sequence(slot)
        if params.repetition_penalty != 1.0:
            seen_U = torch.from_numpy(np.union1d(prompt, made).astype(np.int64)).to(logits_V.device)
            values_U = logits_V[seen_U]
            logits_V[seen_U] = torch.where(
                values_U > 0, values_U / params.repetition_penalty, values_U * params.repetition_penalty
            )
        made_U, counts_U = np.unique(made, return_counts=True)
        ids_U = torch.from_numpy(made_U.astype(np.int64)).to(logits_V.device)
        times_U = torch.from_numpy(counts_U.astype(np.float32)).to(logits_V.device)
        logits_V[ids_U] -= params.frequency_penalty * times_U + params.presence_penalty
    return reweighted_RV


def sample(
    logits_BV: torch.Tensor, uniforms_B: torch.Tensor, how: BatchSampling, plain_BV: torch.Tensor | None = None
) -> StepOutput:
    """`uniforms_B` are float64 in [0, 1) on the device of the logits."""
    logits_BV = logits_BV.float()
    raw_BV = (logits_BV if plain_BV is None else plain_BV.float()).log_softmax(-1) if how.raw else None
    scaled_BV = logits_BV if how.temperature is None else logits_BV / how.temperature
    if how.cut_rows is not None:
        scaled_BV = _cut(scaled_BV, how)
    logprobs_BV = scaled_BV.log_softmax(-1)
    token_ids_B1 = _invert(logprobs_BV, uniforms_B)
    if how.greedy is not None:
        best_B1 = logits_BV.argmax(-1, keepdim=True)
        token_ids_B1 = torch.where(how.greedy[:, None], best_B1, token_ids_B1)
    top_ids_BK = top_logprobs_BK = None
    if how.num_alternatives:
        top_logprobs_BK, top_ids_BK = logprobs_BV.topk(min(how.num_alternatives, logprobs_BV.shape[-1]), dim=-1)
    return StepOutput(
        token_ids=token_ids_B1[:, 0].cpu().numpy(),
        logprobs=logprobs_BV.gather(-1, token_ids_B1)[:, 0].cpu().numpy(),
        raw_logprobs=None if raw_BV is None else raw_BV.gather(-1, token_ids_B1)[:, 0].cpu().numpy(),
        top_ids=None if top_ids_BK is None else top_ids_BK.cpu().numpy(),
        top_logprobs=None if top_logprobs_BK is None else top_logprobs_BK.cpu().numpy(),
    )


def _invert(logprobs_BV: torch.Tensor, uniforms_B: torch.Tensor) -> torch.Tensor:
    """(B, 1) first token whose cumulative probability exceeds the uniform; in float64, so that no token of probability
    zero is hit."""
    cumulative_BV = logprobs_BV.exp().cumsum(-1, dtype=torch.float64)
    total_B1 = cumulative_BV[:, -1:]
    target_B1 = torch.minimum(uniforms_B[:, None] * total_B1, total_B1 * (1.0 - 2.0**-52))
    return torch.searchsorted(cumulative_BV, target_B1, right=True).clamp_(max=logprobs_BV.shape[-1] - 1)


def _cut(scaled_BV: torch.Tensor, how: BatchSampling) -> torch.Tensor:
    """Removes tokens by min_p, then top_k, then top_p (vLLM's order); ties with the last kept token stay."""
    assert how.cut_rows is not None
    cut_CV = scaled_BV[how.cut_rows]
    if how.min_p is not None:
        floor_C1 = cut_CV.amax(-1, keepdim=True) + how.min_p.log()
        cut_CV = cut_CV.masked_fill(cut_CV < floor_C1, -torch.inf)
    if how.top_k is not None or how.top_p is not None:
        ranked_CV = cut_CV.sort(-1, descending=True).values
        least_C1 = torch.full_like(ranked_CV[:, :1], -torch.inf)
        if how.top_k is not None:
            least_C1 = ranked_CV.gather(-1, how.top_k - 1)
            ranked_CV = ranked_CV.masked_fill(ranked_CV < least_C1, -torch.inf)
        if how.top_p is not None:
            mass_CV = ranked_CV.softmax(-1)
            before_CV = mass_CV.cumsum(-1) - mass_CV
            kept_C1 = (before_CV < how.top_p).sum(-1, keepdim=True).clamp_(min=1)
            least_C1 = torch.maximum(least_C1, ranked_CV.gather(-1, kept_C1 - 1))
        cut_CV = cut_CV.masked_fill(cut_CV < least_C1, -torch.inf)
    return scaled_BV.index_copy(0, how.cut_rows, cut_CV)
