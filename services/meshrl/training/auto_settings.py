"""Chooses the settings that are `auto`, by model, row length and memory, before a learner is built.

Activation checkpointing: the least with which a row of seq_len tokens fits beside weights, gradients, optimizer and a
version's snapshot. Where there is room beside that, shorter rows go through together, and parameters stay gathered
over a step. Compilation: for large models on a GPU. Logits: in pieces that leave room for the rest.

A block keeps of a token so many elements of the compute dtype, with hidden size h, MLP size i, q and k elements of all
query and key-value heads:

    none       4 h + 3 q + 3 k + 4 i      inputs of norms and products, attention before and after rotation, the MLP
               + 3 e h                    with e experts a token: its copy for each, what comes back, and that weighted
    selective  2 h + 1.5 q + k + i        its input, attention's output, every second product
    attention  h + q                      its input and attention's output
    full       h                          its input

and one block at a time, while it is computed again, as much as with none. i is the sum over a token's experts, and a
mean where layers differ. Measured peaks (Qwen3 0.6B and 4B on an H200, 16k and 64k tokens) are within 10%, for which
RESERVE leaves room.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from loguru import logger
from torch import nn
from transformers import PreTrainedModel

from meshrl.models.experts import Experts, expert_layers
from meshrl.models.load import empty_model, resolve_dtype
from meshrl.models.logprobs import KEPT_SHARE, LOGITS_CPU, LOGITS_GPU
from meshrl.training.config import OptimConfig
from meshrl.training.memory_estimate import MemoryNeed, available_bytes, check_fits, memory_need
from meshrl.training.model_config import (
    AcMode,
    ActivationCheckpointConfig,
    CompileConfig,
    LoraConfig,
    TrainerModelConfig,
)
from meshrl.training.parallel.check import context_reason
from meshrl.training.parallel.experts import experts_reason
from meshrl.training.parallel.fsdp import transformer_blocks
from meshrl.training.parallel.plan import ParallelPlan
from meshrl.training.parallel.rank_group import RankGroup
from meshrl.training.parallel.tensor import divides_attention, divides_vocabulary

RESERVE = 0.9  # of the free memory may be planned for
COMPILE_FROM = 100_000_000  # parameters; 0.6B trains 1.6 times as fast compiled, layers of 30B-A3B 1.5 times
LOGITS_LEAST = 2**26  # bytes of the float32 logits that are there at once
PASS_TOKENS = 16384  # of each rank; rows of 4k of 30B-A3B's layers train 2.2 times as fast so, longer passes 1.04 more
LOGITS_SHARE = 32  # at most one in so many bytes of what the model leaves free


@dataclass(frozen=True, kw_only=True)
class BlockShape:
    layers: int
    hidden: int
    mlp: float  # of all experts that a token goes through
    queries: int  # heads times head size
    keys: int  # key-value heads times head size
    vocab: int
    experts: float = 0.0  # that a token goes through, beside those that all go through

    @classmethod
    def of(cls, model: PreTrainedModel, tp: int = 1) -> BlockShape:
        """Of a model, which may be without storage; of what `tp` ranks divide, the sizes of one."""
        text = model.config.get_text_config()
        hidden = int(text.hidden_size)
        heads = int(getattr(text, "num_attention_heads", 0) or 1)
        head_size = int(getattr(text, "head_dim", None) or hidden // heads)
        key_heads = int(getattr(text, "num_key_value_heads", None) or heads)
        mlp = getattr(text, "intermediate_size", None) or getattr(text, "n_inner", None) or 4 * hidden
        layers = int(text.num_hidden_layers)
        routed, widths, mixed = 0, 0.0, 0
        for block in transformer_blocks(model) if expert_layers(model, model.config) else ():
            if own := expert_layers(block, model.config):
                mixed += 1
                routed += max(experts.per_token for experts in own)
                widths += _width(own, block, hidden)
        by_heads = tp if tp > 1 and divides_attention(model) else 1
        return cls(
            layers=layers,
            hidden=hidden,
            mlp=(widths + max(0, layers - mixed) * int(mlp)) / layers / tp,
            queries=heads * head_size // by_heads,
            keys=key_heads * head_size // by_heads,
            vocab=int(text.vocab_size) // (tp if divides_vocabulary(model) else 1),
            experts=routed / layers / tp,
        )

    def kept(self, mode: AcMode | None) -> float:
        h, q, k, i = self.hidden, self.queries, self.keys, self.mlp
        return {
            None: 4 * h + 3 * q + 3 * k + 4 * i + 3 * self.experts * h,
            "selective": 2 * h + 1.5 * q + k + i,
            "attention": h + q,
            "full": h,
        }[mode]

    def activation_bytes(self, mode: AcMode | None, *, tokens: int, itemsize: int) -> int:
        again = 0.0 if mode is None else self.kept(None)
        return int((self.kept(mode) * self.layers + again) * tokens * itemsize)


@dataclass(frozen=True, kw_only=True)
class Chosen:
    ac: AcMode | None
    compiled: bool
    logits_bytes: int
    activation_bytes: int
    fits: bool  # what was planned for, at this checkpointing
    gathered: bool  # whether all parameters fit as well, with their gradients


def choose(
    shape: BlockShape,
    need: MemoryNeed,
    *,
    seq_len: int,
    on_gpu: bool,
    free_bytes: int | None,
    itemsize: int,
    given: AcMode | Literal["auto"] | None = "auto",
    beside_engine: bool = False,
) -> Chosen:
    """The least checkpointing that fits, or the `given` one, with its settings. `free_bytes`: before the model is
    loaded, of which an engine takes some if `beside_engine`; None is unknown, and everything fits."""
    most, room = (LOGITS_GPU if on_gpu else LOGITS_CPU), None
    if free_bytes is not None:
        # Embeddings and head are gathered whole in the compute dtype.
        room = int(RESERVE * free_bytes) - need.total - 2 * shape.vocab * shape.hidden * itemsize
        most = min(most, max(LOGITS_LEAST, room // LOGITS_SHARE)) if on_gpu else most
    logits = max(1, min(most, seq_len * shape.vocab * 4))
    order: tuple[AcMode | None, ...] = (None, "selective", "attention", "full")
    planned: Mapping[AcMode | None, int] = {
        mode: shape.activation_bytes(mode, tokens=seq_len, itemsize=itemsize) for mode in order
    }
    order = order if given == "auto" else (given,)
    fitting = [mode for mode in order if room is None or planned[mode] + 2 * logits <= room]
    mode = fitting[0] if fitting else order[-1]
    whole = need.parameters * itemsize + need.unsharded
    gathered = room is None or planned[mode] + 2 * logits + whole <= room
    # Where gradients of a row's logits fit as well, the head keeps them for the backward pass; a frozen one makes none.
    kept = math.ceil(seq_len * shape.vocab * itemsize / KEPT_SHARE)
    taken = planned[mode] + max(kept, 2 * logits) + whole * gathered
    if fitting and not need.of_set and not beside_engine and (room is None or taken <= room):
        logits = max(logits, kept)
    return Chosen(
        ac=mode,
        compiled=on_gpu and need.parameters >= COMPILE_FROM,
        logits_bytes=logits if on_gpu else most,
        activation_bytes=planned[mode],
        fits=bool(fitting),
        gathered=gathered,
    )


def choose_layout(config: TrainerModelConfig, environment: Mapping[str, str], *, seq_len: int) -> dict[str, int]:
    """The layout for RankGroup.start: as configured, but for an `ep` of "auto".

    FSDP gathers a layer's experts about four times a step, beside computing. Tokens are sent to experts about six
    times, and not beside it. So ep is taken if the latter is less than a quarter of the former, or tp needs it. Raises
    ModelError when there is no such model, and ValueError if the sizes do not divide the ranks.
    """
    layout = {"dp_replicate": config.dp_replicate, "cp": config.cp, "tp": config.tp}
    if config.ep != "auto":
        return layout | {"ep": config.ep}
    plan = ParallelPlan.from_environment(environment, **layout)
    model = empty_model(config, dtype=torch.bfloat16)
    layers = expert_layers(model, model.config)
    ep = 1
    if layers:
        gathered = 4 * sum(parameter.numel() for parameter in layers[0].module.parameters())
        hidden = int(model.config.get_text_config().hidden_size)
        exchanged = 6 * math.ceil(seq_len / plan.cp / plan.tp) * layers[0].per_token * hidden
        ranks = math.gcd(plan.shards, plan.local_world_size)
        fitting = [n for n in range(2, ranks + 1) if ranks % n == n % plan.tp == 0 and experts_reason(model, n) is None]
        ep = max(fitting, default=1) if 4 * exchanged < gathered or plan.tp > 1 else 1
    if plan.leads:
        logger.info("auto: model.ep {} for rows of {} tokens on {} ranks", ep, seq_len, plan.world_size)
    return layout | {"ep": ep}


def resolve_auto(
    config: TrainerModelConfig,
    optim: OptimConfig,
    parallel: RankGroup,
    *,
    seq_len: int,
    max_logits_mib: int | None,
    publishes: bool = False,
    beside_engine: bool = False,
) -> tuple[TrainerModelConfig, int]:
    """The configuration with every `auto` resolved, and the bytes of logits at once. Collective.

    Arguments as in `memory_need` and `choose`. Raises ModelError when there is no such model or it does not fit in
    memory, and ValueError for unsuitable adapters.
    """
    row_tokens, seq_len = seq_len, -(-seq_len // parallel.plan.cp)
    on_gpu = parallel.device.type == "cuda"
    dtype = resolve_dtype(config)
    need, there = memory_need(config, optim, parallel, publishes=publishes), available_bytes(parallel.device)
    check_fits(config.name, need, there, parallel)
    free = np.zeros(parallel.plan.world_size, dtype=np.int64)
    free[parallel.plan.rank] = there or 0
    ranks = 1 if on_gpu else parallel.plan.world_size  # processes that share this memory
    least = int(parallel.sum(free).min()) // ranks or None  # where nothing reports it
    model = empty_model(config, dtype=torch.bfloat16)
    shape = BlockShape.of(model, parallel.plan.tp)
    planned = functools.partial(
        choose, shape, on_gpu=on_gpu, free_bytes=least, itemsize=dtype.itemsize, beside_engine=beside_engine
    )
    given = config.ac.mode if isinstance(config.ac, ActivationCheckpointConfig) else config.ac
    chosen = planned(need, seq_len=seq_len, given=given)
    if config.ac == "auto" and not chosen.fits and parallel.plan.leads:

        def fits(config: TrainerModelConfig, times: int, tokens: int) -> bool:
            return planned(memory_need(config, optim, parallel, publishes=publishes).over(times), seq_len=tokens).fits

        ways = ways_to_fit(config, model, parallel.plan, row_tokens, fits)
        logger.warning(
            "a row of {} tokens takes more memory than is free, with model.ac full, too; {}", row_tokens,
            f"what would fit: {'; or '.join(ways)}" if ways else "take a smaller model or more memory",
        )  # fmt: skip
    changes: dict[str, object] = {}
    decisions: list[str] = []
    if config.ac == "auto":
        changes["ac"] = None if chosen.ac is None else ActivationCheckpointConfig(mode=chosen.ac)
        kept = f"{chosen.activation_bytes / 2**30:.1f} GiB of activations a row"
        decisions.append(
            f"model.ac {chosen.ac or 'off'} ({kept}{'' if chosen.fits else ', more than there is room for'})"
        )
    if config.compile == "auto":
        changes["compile"] = CompileConfig() if chosen.compiled else None
        decisions.append(f"model.compile {'on' if chosen.compiled else 'off'}")
    if config.pass_tokens == "auto":
        changes["pass_tokens"] = None
        times = PASS_TOKENS // seq_len if on_gpu and not beside_engine else 1
        while times > 1:
            more = planned(need, seq_len=times * seq_len, given=given)
            if more.fits and more.ac == chosen.ac:
                changes["pass_tokens"], chosen = times * row_tokens, more
                decisions.append(f"model.pass_tokens {times * row_tokens}")
                break
            times //= 2
    if config.reshard_after_forward == "auto":
        gathered = parallel.mesh is not None and chosen.gathered
        changes["reshard_after_forward"] = not gathered
        if gathered:
            decisions.append("model.reshard_after_forward off")
    logits_bytes = max_logits_mib * 2**20 if max_logits_mib is not None else chosen.logits_bytes
    if max_logits_mib is None:
        decisions.append(f"max_logits_mib {logits_bytes // 2**20}")
    if decisions and parallel.plan.leads:
        free_words = "unknown" if least is None else f"{least / 2**30:.0f} GiB"
        logger.info(
            "auto: {} for {} tokens of a row on each rank, {} free on {}",
            ", ".join(decisions), seq_len, free_words, parallel.device,
        )  # fmt: skip
    return config.model_copy(update=changes), logits_bytes


def ways_to_fit(
    config: TrainerModelConfig,
    model: PreTrainedModel,
    plan: ParallelPlan,
    row_tokens: int,
    fits: Callable[[TrainerModelConfig, int, int], bool],
) -> list[str]:
    """The keys to change so that a row fits, if any helps: `cp`, the number of GPUs, `lora`, the length of rows.

    `fits` gets a configuration, how many times as many ranks hold a copy, and the tokens of a row on each.
    """
    ways = []
    for times in (1, 2, 4, 8, 16):
        ranks = plan.dp_shard * plan.cp * times
        shared = [
            n for n in range(plan.cp + 1, ranks + 1) if ranks % n == 0 and context_reason(model, n, plan.tp) is None
        ]
        enough = [n for n in shared if fits(config, times, -(-row_tokens // n))]
        if enough:
            ways.append(f"model.cp = {enough[0]}")
            if times > 1:
                ways[-1] += f" with deployment.num_train_gpus = {plan.world_size * times}"
            break
    if config.lora is None:
        adapters = config.model_copy(update={"lora": LoraConfig()})
        if fits(adapters, 1, -(-row_tokens // plan.cp)):
            ways.append("model.lora.rank = 16")
    shorter = [tokens for tokens in (row_tokens >> n for n in range(1, 12)) if fits(config, 1, -(-tokens // plan.cp))]
    return [*ways, f"rows of {shorter[0]} tokens"] if shorter and shorter[0] else ways


def _width(own: Sequence[Experts], block: nn.Module, hidden: int) -> float:
    """MLP size of a block's experts, shared ones too; an expert has three matrices of hidden size times its own."""
    a_token = sum(experts.share * sum(p.numel() for p in experts.module.parameters()) for experts in own)
    shared = {
        parameter: parameter.numel()
        for name, module in block.named_modules()
        if "shared" in name.rsplit(".", 1)[-1] and "gate" not in name.rsplit(".", 1)[-1]
        for parameter in module.parameters()
    }
    return float(a_token + sum(shared.values())) / (3 * hidden)
