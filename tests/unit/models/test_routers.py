"""Routers of mixtures of experts: what they chose, given to them again, is what they choose."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel

from meshrl.models.routers import NARROW, UNKNOWN, RouterChoice, Routers
from tiny_families import tiny_model

# Routers of their own class, gates, and blocks that choose themselves; groups of experts, biases, experts without work.
REPLAYED = (
    *("afmoe", "aria_text", "dbrx", "deepseek_v2", "deepseek_v3", "dots1", "ernie4_5_moe", "flex_olmo", "glm4_moe"),
    *("gpt_oss", "granitemoe", "hunyuan_v1_moe", "inkling_text", "jamba", "jetmoe", "lfm2_moe", "llama4_text"),
    *("longcat_flash", "minimax_m2", "mixtral", "nemotron_h", "olmoe", "qwen2_moe", "qwen3_5_moe_text", "qwen3_moe"),
    *("qwen3_next", "solar_open"),
)
TOKENS = 12


def model_of(family: str) -> tuple[PreTrainedModel, Routers, list[RouterChoice]]:
    model = tiny_model(family)
    routers, seen = Routers(model), []
    routers.watchers.append(seen.append)
    return model, routers, seen


def logits_and_gradients(model: PreTrainedModel, ids: torch.Tensor) -> list[torch.Tensor | None]:
    model.zero_grad()
    logits = model(input_ids=ids, use_cache=False).logits
    logits.square().sum().backward()
    return [logits.detach(), *(None if each.grad is None else each.grad.clone() for each in model.parameters())]


def same(one: list[torch.Tensor | None], other: list[torch.Tensor | None]) -> bool:
    return all(
        left is right is None or (left is not None and right is not None and torch.equal(left, right))
        for left, right in zip(one, other, strict=True)
    )


def routes_of(routers: Routers, seen: list[RouterChoice]) -> torch.Tensor:
    assert routers.shape is not None
    routes = torch.full((TOKENS, routers.shape.layers, routers.shape.per_token), UNKNOWN, dtype=torch.int16)
    for choice in seen:
        routes[:, choice.router] = choice.chosen.to(torch.int16)
    return routes


SCORING = [family for family in REPLAYED if family != "inkling_text"]  # by a linear layer


@pytest.mark.parametrize(
    ("family", "pure"), [*((family, True) for family in SCORING), ("qwen3_moe", False), ("deepseek_v3", False)]
)
def test_wide_routers_do_not_round_their_logits(family: str, pure: bool) -> None:
    """With parameters in bfloat16, as FSDP computes, and with float32 ones under autocast."""
    model, seen = tiny_model(family), []
    if pure:
        model.bfloat16()
    Routers(model, wide=True).watchers.append(seen.append)
    ids = torch.randint(2, 60, (1, TOKENS), generator=torch.Generator().manual_seed(2))
    with torch.autocast("cpu", torch.bfloat16, enabled=not pure):
        model(input_ids=ids, use_cache=False).logits.float().square().sum().backward()
    logits = seen[0].logits
    assert logits is not None
    rounded = torch.equal(logits.float(), logits.bfloat16().float())
    assert rounded == (family in NARROW)


@pytest.mark.parametrize("family", REPLAYED)
def test_own_choices_given_again_change_no_bit_and_others_do(family: str) -> None:
    model, routers, seen = model_of(family)
    ids = torch.randint(2, 60, (2, TOKENS // 2), generator=torch.Generator().manual_seed(2))
    free = logits_and_gradients(model, ids)
    assert routers.shape is not None
    assert len(seen) == routers.shape.layers
    routes = routes_of(routers, seen)
    assert int(routes.min()) >= 0
    with routers.replaying(routes):
        replayed = logits_and_gradients(model, ids)
    assert same(free, replayed)

    seen.clear()
    moved = (routes + 1) % routers.shape.experts
    with routers.replaying(moved):
        other = logits_and_gradients(model, ids)
    assert not torch.equal(free[0], other[0])
    for choice in seen:
        assert torch.equal(choice.chosen.to(torch.int16), moved[:, choice.router])
    with routers.replaying(torch.full_like(routes, UNKNOWN)):
        assert same(free, logits_and_gradients(model, ids))


def test_the_router_learns_from_choices_that_it_did_not_make() -> None:
    model, routers, seen = model_of("qwen3_moe")
    ids = torch.randint(2, 60, (2, TOKENS // 2), generator=torch.Generator().manual_seed(2))
    logits_and_gradients(model, ids)
    assert routers.shape is not None
    with routers.replaying((routes_of(routers, seen) + 1) % routers.shape.experts):
        logits_and_gradients(model, ids)
    gate = model.model.layers[0].mlp.gate.weight.grad
    assert gate is not None
    assert float(gate.abs().max()) > 0.0


@pytest.mark.parametrize("family", ["phimoe", "zaya"])
def test_a_router_without_topk_refuses_a_choice_that_is_not_its_own(family: str) -> None:
    model, routers, seen = model_of(family)
    ids = torch.randint(2, 60, (2, TOKENS // 2), generator=torch.Generator().manual_seed(2))
    free = logits_and_gradients(model, ids)
    assert routers.shape is not None
    routes = routes_of(routers, seen)
    with routers.replaying(routes):
        assert same(free, logits_and_gradients(model, ids))
    with (
        routers.replaying((routes + 1) % routers.shape.experts),
        pytest.raises(ValueError, match=r"without torch\.topk"),
    ):
        model(input_ids=ids, use_cache=False)


def test_routes_of_other_tokens_are_refused() -> None:
    model, routers, _ = model_of("mixtral")
    with (
        routers.replaying(torch.zeros((5, 2, 2), dtype=torch.int16)),
        pytest.raises(ValueError, match="routes are for"),
    ):
        model(input_ids=torch.arange(2, 8)[None], use_cache=False)
