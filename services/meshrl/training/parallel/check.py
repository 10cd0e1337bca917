"""Refuses layouts that a model cannot be trained in, before its weights are loaded."""

from __future__ import annotations

from transformers import PreTrainedModel

from meshrl.models.families import positions_grow_beyond, unpacked_reason
from meshrl.training.model_config import TrainerModelConfig
from meshrl.training.parallel.experts import experts_reason
from meshrl.training.parallel.plan import ParallelPlan
from meshrl.training.parallel.tensor import attention_heads, divides_attention, tensor_reason


def check_layout(model: PreTrainedModel, config: TrainerModelConfig, plan: ParallelPlan) -> None:
    """Raises ValueError if the model, which may be without storage, cannot be divided by the plan."""
    if plan.tp > 1 and (reason := tensor_reason(model, plan.tp, plan.ep)) is not None:
        raise ValueError(f"model.tp is {plan.tp}, but ranks cannot share products of {config.name!r}: {reason}")
    if plan.cp > 1 and (reason := context_reason(model, plan.cp, plan.tp)) is not None:
        raise ValueError(f"model.cp is {plan.cp}, but ranks cannot share rows of {config.name!r}: {reason}")
    if plan.ep > 1 and (reason := experts_reason(model, plan.ep)) is not None:
        raise ValueError(f"model.ep is {plan.ep}, but ranks cannot divide the experts of {config.name!r}: {reason}")


def context_reason(model: PreTrainedModel, cp: int, tp: int = 1) -> str | None:
    """Why `cp` ranks cannot share a row, and what to do instead; None when they can. `tp` ranks share the heads."""
    text = model.config.get_text_config()
    if (reason := unpacked_reason(model)) is not None:
        return f"{reason}, which needs all tokens of a sample in one place; set model.cp = 1, and model.ac for memory"
    if (limit := positions_grow_beyond(text)) is not None:
        return (
            f"its rotary embeddings depend on the longest sample beyond {limit} tokens; set model.cp = 1, or rope_type "
            "yarn in its config.json"
        )
    queries, keys = (count // (tp if divides_attention(model) else 1) for count in attention_heads(text))
    if queries % cp or (keys % cp and cp % keys):
        fitting = [n for n in range(1, queries + 1) if queries % n == 0 and (keys % n == 0 or n % keys == 0)]
        each = f" on each of {tp} ranks" if tp > 1 else ""
        return f"it has {queries} attention heads and {keys} key-value heads{each}; set model.cp to one of {fitting}"
    return None
