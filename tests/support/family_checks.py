"""Holds the trainer and the embedded engine against a family's plain eager forward pass, one sequence at a time.

Used by the test of every family and by the benchmark that prints its table.

Shapes: S samples, T tokens of a sample, V vocabulary.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from meshrl.inference.embedded.engine import EmbeddedEngine
from meshrl.inference.embedded.runner import SlotRunner
from meshrl.inference.engine import GenerateRequest, SamplingParams, TokenChunk
from meshrl.models.attention import PackedLayout
from meshrl.models.families import REFUSED_TYPES, attention_implementation, refusal
from meshrl.models.logprobs import PackedPolicy, PackedRow
from tiny_families import VOCAB, tiny_config, tiny_model

SAMPLE_LENGTHS = (13, 3, 19, 1, 14)  # of one packed row; all but the short ones are longer than three windows
PROMPT_LENGTHS = (2, 17, 1, 12)
COMPLETION_TOKENS = 6
ATOL_NATS = 1e-4  # float32, sums in another order
SENSITIVE_NATS = 0.01  # what a lost token must move at least, so that a difference means something
DEADLINE_S = 60.0
CPU = torch.device("cpu")

Way = Literal["slots", "recomputed", "packed", "padded", "refused"]


@dataclass(frozen=True, kw_only=True)
class Result:
    """How a part runs a family, and its largest distance from the plain forward pass in nats; or why it does not."""

    way: Way
    apart: float = 0.0
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class FamilyResult:
    """One line of the table."""

    family: str
    engine: Result
    trainer: Result


def check_family(family: str) -> FamilyResult:
    """Runs a tiny model of the family in both parts, each loaded with the attention that `meshrl.models.load` takes."""
    if (reason := REFUSED_TYPES.get(family)) is not None or (reason := refusal(tiny_config(family))) is not None:
        refused = Result(way="refused", reason=reason)
        return FamilyResult(family=family, engine=refused, trainer=refused)
    plain = tiny_model(family)
    _check_sensitive(plain)
    attn = attention_implementation(plain.config)
    try:
        trainer = trainer_result(tiny_model(family, attn), plain)
    except ValueError as error:
        trainer = Result(way="refused", reason=str(error))
    return FamilyResult(family=family, engine=engine_result(tiny_model(family, attn), plain), trainer=trainer)


def _check_sensitive(plain: PreTrainedModel) -> None:
    """The model's logprobs depend on earlier tokens: else whatever loses those would pass for right."""
    token_ids = list(range(2, 16))
    moved = plain_logprobs(plain, token_ids)[1:] - plain_logprobs(plain, [40, *token_ids[1:]])[1:]
    assert float(moved.abs().max()) > SENSITIVE_NATS, "the tiny model does not look at its past"


@torch.no_grad()
def plain_logprobs(model: PreTrainedModel, token_ids: Sequence[int]) -> torch.Tensor:
    """(T - 1,) logprobs of each token but the first, by one forward pass over this sequence alone."""
    token_ids_T = torch.tensor(list(token_ids), device=model.device)
    logits_TV = model(input_ids=token_ids_T[None], use_cache=False).logits[0]
    return logits_TV[:-1].log_softmax(-1).gather(1, token_ids_T[1:, None])[:, 0]


def trainer_result(model: PreTrainedModel, plain: PreTrainedModel) -> Result:
    """Logprobs of a row of several samples, in training mode, and whether every gradient is finite."""
    rng = np.random.default_rng(0)
    samples = [rng.integers(2, VOCAB, length) for length in SAMPLE_LENGTHS]
    expected = torch.cat([plain_logprobs(plain, sample.tolist()) for sample in samples])
    policy = PackedPolicy(model).train()
    found, _ = policy(packed_row(samples, policy))
    (found * torch.linspace(-1, 1, len(found))).sum().backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert gradients, "no parameter has a gradient"
    assert all(bool(gradient.isfinite().all()) for gradient in gradients), "a gradient is not finite"
    return Result(way="packed" if policy.packed else "padded", apart=float((found - expected).abs().max()))


def packed_row(samples: Sequence[NDArray[np.int64]], policy: PackedPolicy, device: torch.device = CPU) -> PackedRow:
    """The samples one after another, all of their tokens but the first predicted."""
    offsets = np.cumsum([0, *(len(sample) for sample in samples)]).astype(np.int64)
    positions = torch.from_numpy(np.concatenate([np.arange(len(sample)) for sample in samples])).to(device)
    predicted = (positions > 0).nonzero()[:, 0]
    return PackedRow(
        token_ids=torch.from_numpy(np.concatenate(samples)).to(device),
        position_ids=positions,
        layout=PackedLayout.from_offsets(offsets, device, policy.kernels),
        predicted=predicted,
        sources=predicted - 1,
        temperatures=torch.ones(len(predicted), device=device),
    )


def engine_result(model: PreTrainedModel, plain: PreTrainedModel) -> Result:
    """Logprobs of what the engine samples for several requests at once, some of which share a long prefix."""
    engine = EmbeddedEngine(model, max_model_len=64, num_slots=3, max_num_batched_tokens=11, seed=0)
    rng = np.random.default_rng(1)
    shared = rng.integers(2, VOCAB, 9).tolist()
    prompts = [rng.integers(2, VOCAB, length).tolist() for length in PROMPT_LENGTHS]
    prompts += [[*shared, 5, 6], [*shared, 7]]
    completions = complete_all(engine, prompts)
    apart = 0.0
    for prompt, completion in zip(prompts, completions, strict=True):
        expected = plain_logprobs(plain, [*prompt, *completion.token_ids.tolist()])[len(prompt) - 1 :]
        apart = max(apart, float((torch.from_numpy(completion.logprobs) - expected).abs().max()))
    return Result(way="slots" if isinstance(engine._steps.runner, SlotRunner) else "recomputed", apart=apart)


def complete_all(engine: EmbeddedEngine, prompts: Sequence[Sequence[int]]) -> list[TokenChunk]:
    """Starts the engine, samples a completion of each prompt at once, and closes it."""
    return asyncio.run(_complete(engine, prompts))


async def _complete(engine: EmbeddedEngine, prompts: Sequence[Sequence[int]]) -> list[TokenChunk]:
    async def one(index: int, prompt: Sequence[int]) -> TokenChunk:
        params = SamplingParams(max_tokens=COMPLETION_TOKENS, seed=index, ignore_eos=True)
        request = GenerateRequest(request_id=str(index), prompt_ids=tuple(prompt), sampling=params)
        return [chunk async for chunk in engine.generate(request)][-1]

    engine.start()
    try:
        async with asyncio.timeout(DEADLINE_S):
            return await asyncio.gather(*(one(index, prompt) for index, prompt in enumerate(prompts)))
    finally:
        await engine.close()
