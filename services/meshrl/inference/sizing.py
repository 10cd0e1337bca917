"""Chooses vLLM's slots and share of memory from the GPU, the model and the context. Pure arithmetic.

Training wants as many sequences at once as the KV cache has room for: a step of a small model costs nearly the same for
1,000 sequences as for 100.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from meshrl.inference.config import AUTO_MODEL_LEN

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


GIB = 2**30
CPU_SLOTS = 64
UNKNOWN_SLOTS = 256
"""For a model whose cache is not keys and values of every token in every layer."""
SLOT_CHOICES = (16, 32, 64, 128, 256, 512, 1024)
TYPICAL_SHARE, TYPICAL_TOKENS = 1 / 4, 1024
"""Of the context that a rollout fills, and at most; the rollout service lets fewer run where they turn out longer."""
MOST_SHARE = 0.92
RESERVE_BYTES = 3 * GIB
"""Beside vLLM's share: buckets of broadcasts, CUDA graphs beyond vLLM's estimate, what allocators lose."""
ACTIVATION_BYTES = 2 * GIB
LARGE_GPU_BYTES, BATCHED_TOKENS = 70 * GIB, (2048, 8192)
"""Tokens of one step on a smaller and on a large GPU, as vLLM's own server has them."""
BYTES_PER_LOGIT = 12
"""Of each slot's logits: in single precision, as probabilities, and a copy that is sampled from."""


def auto_length(text_config: PreTrainedConfig) -> int:
    """`max_model_len` auto."""
    return min(AUTO_MODEL_LEN, getattr(text_config, "max_position_embeddings", None) or AUTO_MODEL_LEN)


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The sizes of a model that take memory. `kv_heads` None: its cache is not keys and values of each token."""

    parameters: int
    layers: int
    kv_heads: int | None
    head_dim: int
    vocab_size: int
    bytes_per_value: int = 2

    def weight_bytes(self, gpus: int = 1) -> int:
        return -(-self.parameters * self.bytes_per_value // gpus)

    def kv_bytes_per_token(self, gpus: int = 1) -> int | None:
        """On each GPU: heads are split, and repeated where there are fewer than GPUs. None where the cache has another
        form."""
        if self.kv_heads is None:
            return None
        return 2 * self.layers * max(1, self.kv_heads // gpus) * self.head_dim * self.bytes_per_value


def shape_of(config: PreTrainedConfig, *, parameters: int, bytes_per_value: int) -> ModelShape:
    heads: int = config.num_attention_heads
    kinds = set(getattr(config, "layer_types", None) or ("full_attention",))
    plain = kinds == {"full_attention"} and getattr(config, "kv_lora_rank", None) is None
    return ModelShape(
        parameters=parameters,
        layers=config.num_hidden_layers,
        kv_heads=(getattr(config, "num_key_value_heads", None) or heads) if plain else None,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        vocab_size=config.vocab_size,
        bytes_per_value=bytes_per_value,
    )


@dataclass(frozen=True, kw_only=True)
class EngineSize:
    max_num_seqs: int
    max_num_batched_tokens: int
    gpu_memory_utilization: float
    reason: str


def engine_size(
    model: ModelShape, *, gpu_bytes: int, max_model_len: int, gpus: int = 1, versions: bool, share: float | None = None
) -> EngineSize:
    """For each of `gpus`. `versions`: a second copy of the weights lies beside the first.

    `share` of the memory is for weights, their second copy, activations and KV cache; None chooses it.
    """
    weights = model.weight_bytes(gpus)
    copies = 2 if versions and fits(model, gpu_bytes=gpu_bytes, gpus=gpus) else 1
    if share is None:
        share = min(MOST_SHARE, int(100 * (gpu_bytes - RESERVE_BYTES) / gpu_bytes) / 100)
    per_token = model.kv_bytes_per_token(gpus)
    batched = BATCHED_TOKENS[gpu_bytes >= LARGE_GPU_BYTES]
    twice = ", twice for versions," if copies == 2 else ""
    held = f"{weights / GIB:.1f} GiB of weights{twice} on each of {gpus} GPU(s) of {gpu_bytes / GIB:.0f} GiB"
    if per_token is None:
        return EngineSize(
            max_num_seqs=UNKNOWN_SLOTS,
            max_num_batched_tokens=batched,
            gpu_memory_utilization=share,
            reason=f"{held}, and a cache that is not keys and values of every token",
        )
    typical = max(1, min(TYPICAL_TOKENS, int(max_model_len * TYPICAL_SHARE)))
    slots, tokens = SLOT_CHOICES[0], 0
    for choice in SLOT_CHOICES:
        logits = choice * model.vocab_size * BYTES_PER_LOGIT // gpus
        room = max(0, int(share * gpu_bytes) - copies * weights - ACTIVATION_BYTES - logits)
        if choice == SLOT_CHOICES[0] or room // per_token >= choice * typical:
            slots, tokens = choice, room // per_token
    reason = f"{held} leave about {tokens:,} tokens of KV cache at {per_token:,} bytes, {typical} a sequence"
    return EngineSize(max_num_seqs=slots, max_num_batched_tokens=batched, gpu_memory_utilization=share, reason=reason)


def graph_sizes(slots: int) -> list[int]:
    """The batch sizes of CUDA graphs, in order, up to all slots; vLLM's own list ends at 512.

    Without a graph launching kernels takes longer than running them; each takes half a second of the start. Beyond 256
    sequences no batch runs as one that is an eighth larger. A smaller one waits for the weights, however many rows it
    has.
    """
    grid = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, *range(128, 512, 32), *range(512, slots, 64))
    return [*(size for size in grid if size < slots), slots]


def fits(model: ModelShape, *, gpu_bytes: int, gpus: int = 1) -> bool:
    """Whether weights and their second copy leave room for anything else."""
    return 2 * model.weight_bytes(gpus) + RESERVE_BYTES + ACTIVATION_BYTES < gpu_bytes
