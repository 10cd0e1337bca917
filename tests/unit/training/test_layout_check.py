"""Layouts that a model cannot be trained in are refused, each in a sentence with the key and the way out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.distributed.mixin import DistributedMixin

from meshrl.models.load import empty_model
from meshrl.training.model_config import TrainerModelConfig
from meshrl.training.parallel.check import check_layout
from meshrl.training.parallel.plan import ParallelPlan
from tiny_families import tiny_config


@pytest.mark.parametrize(
    ("family", "changes", "sizes", "told"),
    [
        ("qwen3", {}, {"cp": 2}, None),
        ("qwen3", {"num_key_value_heads": 1}, {"cp": 4}, None),
        ("gpt_oss", {}, {"cp": 2}, None),
        ("qwen3", {}, {"cp": 8}, r"4 attention heads and 2 key-value heads; set model\.cp to one of \[1, 2, 4\]"),
        (
            "qwen3", {"num_attention_heads": 12, "num_key_value_heads": 3}, {"cp": 4},
            r"12 attention heads and 3 key-value heads; set model\.cp to one of \[1, 3, 6, 12\]",
        ),
        ("qwen3_moe", {}, {"ep": 4}, None),
        ("deepseek_v3", {}, {"ep": 2}, None),
        ("qwen3", {}, {"ep": 2}, r"divide the experts of .*: it has no experts; set model\.ep = 1"),
        ("qwen3_moe", {}, {"ep": 3}, r"it has 4 experts, no multiple of 3; set model\.ep to a divisor"),
        ("granitemoe", {}, {"ep": 2}, r"transformers \S+ has no plan for its experts; set model\.ep = 1"),
        ("llama4_text", {}, {"ep": 2}, r"transformers \S+ has no plan for its experts; set model\.ep = 1"),
        ("qwen3_next", {}, {"cp": 2}, r"it has layers of linear_attention, which needs all tokens .* model\.cp = 1"),
        ("mamba2", {}, {"cp": 2}, r"needs all tokens of a sample in one place; set model\.cp = 1"),
        (
            "llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, {"cp": 2},
            r"its rotary embeddings depend on the longest sample beyond 128 tokens; set model\.cp = 1",
        ),
        ("qwen3", {}, {"tp": 2}, None),
        ("qwen3", {}, {"tp": 2, "cp": 2}, None),
        ("qwen3_moe", {}, {"tp": 2, "ep": 4}, None),
        ("deepseek_v3", {"num_attention_heads": 3}, {"tp": 2, "ep": 2}, None),  # whose attention is not divided
        ("qwen3", {}, {"tp": 4}, r"4 attention heads and 2 key-value heads; set model\.tp to one of \[1, 2\]"),
        (
            "qwen3", {}, {"tp": 2, "cp": 4},
            r"2 attention heads and 1 .* on each of 2 ranks; set model\.cp to one of \[1, 2\]",
        ),
        ("qwen3", {"intermediate_size": 49}, {"tp": 2}, r"gate_proj\.weight has 49 rows, .* model\.tp to a divisor"),
        ("qwen3", {"vocab_size": 63}, {"tp": 2}, r"embed_tokens\.weight has 63 rows, .* model\.tp to a divisor"),
        ("qwen3_moe", {}, {"tp": 2}, r"divide its experts as well; set model\.ep to a multiple of 2"),
        ("gpt_oss", {}, {"tp": 2, "ep": 2}, r"has no plan that divides its layers; set model\.tp = 1"),
        ("apertus", {}, {"tp": 2}, r"mlp\.act_fn\.alpha_\w lies between divided layers .*; set model\.tp = 1"),
        ("phi3", {}, {"tp": 2}, r"has no plan that divides its layers; set model\.tp = 1"),
        ("mimo_v2_flash", {}, {"tp": 2}, r"has 'colwise' for .*sinks, which is not supported; set model\.tp = 1"),
        ("qwen3_next", {}, {"tp": 2}, r"layers of linear_attention, and such models .*; set model\.tp = 1"),
    ],
)  # fmt: skip
def test_a_layout_is_taken_or_refused(
    family: str, changes: dict[str, Any], sizes: dict[str, Any], told: str | None, tmp_path: Path
) -> None:
    tiny_config(family, **changes).save_pretrained(tmp_path)
    config = TrainerModelConfig.model_validate({"name": str(tmp_path), "device": "cpu"} | sizes)
    model, plan = (
        empty_model(config, dtype=torch.float32),
        ParallelPlan(dp_shard=sizes.get("ep", 1), **{key: sizes[key] for key in ("cp", "tp", "ep") if key in sizes}),
    )
    if told is None:
        check_layout(model, config, plan)
        return
    with pytest.raises(ValueError, match=told):
        check_layout(model, config, plan)


def test_a_transformers_without_plans_for_experts_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before 5.19 its models have none."""
    tiny_config("qwen3_moe").save_pretrained(tmp_path)
    config = TrainerModelConfig(name=str(tmp_path), device="cpu", ep=2)
    model = empty_model(config, dtype=torch.float32)
    monkeypatch.delattr(DistributedMixin, "ep_plan", raising=False)
    with pytest.raises(ValueError, match=r"transformers \S+ has no plan for its experts; set model\.ep = 1"):
        check_layout(model, config, ParallelPlan(dp_shard=2, ep=2))
