"""The plain model that an engine is held against, in float32: one forward pass over the whole sequence.

A tiny Qwen3, or one of another family.

Shapes: P prompt tokens, T completion tokens, V tokens of the vocabulary. What the engine sampled is fed back, so one
flipped near-tie does not make everything after it incomparable.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from meshrl.models.lora import adapted_layers
from meshrl.models.state import ROUTER_BIASES, hf_state
from meshrl.wire.types import VersionProbe
from trained import apply_lora

VOCAB = 64
EOS = 0
MAX_POSITIONS = 2048
PROBE_TOKENS = 48
RANK, ALPHA, TARGETS = 4, 6.0, ("q_proj", "down_proj")
SHAPE: Mapping[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": MAX_POSITIONS,
    "tie_word_embeddings": True,
    "initializer_range": 0.2,
    "eos_token_id": EOS,
    "bos_token_id": None,
}
FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "qwen3": {},
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 64},
    "minimax_m2": {
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "intermediate_size": 64,
        "tie_word_embeddings": False,
        "rotary_dim": 32,  # this and the next two are keys of the published files that vLLM reads
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
    },
}


def _empty_model(family: str) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(family, **{**SHAPE, **FAMILIES[family]})
    )
    return model


@cache
def plain_model(seed: int, *, family: str = "qwen3") -> PreTrainedModel:
    """Random weights that bfloat16 can hold, so engines of either dtype serve the very same model. Do not change it."""
    torch.manual_seed(seed)
    model = _empty_model(family).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # but not the buffers: the rotary frequencies are float32 everywhere
            parameter.copy_(parameter.bfloat16())
        for name, buffer in model.named_buffers():
            if name.rpartition(".")[2] in ROUTER_BIASES:  # which are zero to begin with
                buffer.normal_(std=0.1)
    return model


def plain_state(seed: int, dtype: torch.dtype, *, family: str = "qwen3") -> dict[str, torch.Tensor]:
    """What a trainer publishes of it."""
    return hf_state(plain_model(seed, family=family), dtype)


@cache
def adapted_model(base_seed: int, seed: int) -> PreTrainedModel:
    """The plain model with LoRA adapters of `seed` beside its layers."""
    model = copy.deepcopy(plain_model(base_seed))
    apply_lora(model, rank=RANK, alpha=ALPHA, dropout=0.0, target_modules=TARGETS)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for layer in adapted_layers(model).values():
            layer.lora_A.normal_(std=0.2, generator=generator)
            layer.lora_B.normal_(std=0.2, generator=generator)
    return model


def save_model(folder: Path, seed: int, dtype: torch.dtype, *, family: str = "qwen3") -> Path:
    """Writes the folder of a checkpoint with its tokenizer."""
    model = _empty_model(family).to(dtype)
    model.load_state_dict(plain_model(seed, family=family).state_dict())
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes: letters, digits and some signs, ids 1 to 63; 0 ends a text."""
    letters = [chr(code) for code in (*range(ord("a"), ord("z") + 1), *range(ord("A"), ord("X")))]
    byte_names = ["</s>", *letters, *"0123456789", ":", "Ċ", ".", "Ġ"]
    vocabulary = {name: index for index, name in enumerate(byte_names)}
    assert len(vocabulary) == VOCAB
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
    tokenizer.chat_template = (
        "{% for message in messages %}{{ message.role[0] }}:{{ message.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}a:{% endif %}"
    )
    return tokenizer


@torch.no_grad()
def logits_of(model: PreTrainedModel, prompt: Sequence[int], completion: Sequence[int]) -> torch.Tensor:
    """(T, V) float32 logits that each token of the completion was sampled from."""
    logits_1SV = model(torch.tensor([[*prompt, *completion]])).logits
    return logits_1SV[0, len(prompt) - 1 : -1]


@cache
def plain_probe(seed: int, *, family: str = "qwen3") -> VersionProbe:
    """What a trainer gives with it."""
    return probe_of(plain_model(seed, family=family))


def probe_of(model: PreTrainedModel) -> VersionProbe:
    """Logprobs of a fixed prompt."""
    first, *others = [index * 37 % VOCAB for index in range(PROBE_TOKENS)]
    logprobs_TV = logits_of(model, [first], others).log_softmax(-1)
    logprobs = logprobs_TV.gather(1, torch.tensor(others)[:, None])[:, 0]
    return VersionProbe(token_ids=(first, *others), logprobs=tuple(logprobs.tolist()))


@torch.no_grad()
def logits_across(
    before: PreTrainedModel,
    after: PreTrainedModel,
    prompt: Sequence[int],
    completion: Sequence[int],
    boundary: int,
) -> torch.Tensor:
    """As `logits_of`, where the weights change after `boundary` tokens and the KV cache made so far is kept."""
    sequence = [*prompt, *completion]
    kept = len(prompt) + boundary - 1  # the last token sampled by the old weights is the first that the new ones read
    first = before(torch.tensor([sequence[:kept]]), use_cache=True)
    second = after(
        torch.tensor([sequence[kept:-1]]),
        past_key_values=first.past_key_values,
        cache_position=torch.arange(kept, len(sequence) - 1),
        use_cache=True,
    )
    return torch.cat([first.logits[0, len(prompt) - 1 :], second.logits[0]])


@torch.no_grad()
def greedy_loop(model: PreTrainedModel, prompt: Sequence[int], count: int) -> list[int]:
    """`count` tokens, each the most likely one after a forward pass over everything before it."""
    sequence = list(prompt)
    for _ in range(count):
        sequence.append(int(model(torch.tensor([sequence])).logits[0, -1].argmax()))
    return sequence[len(prompt) :]


def reweighted(
    logits_TV: torch.Tensor, prompt: Sequence[int], completion: Sequence[int], *, logit_bias: Mapping[str, float],
    presence_penalty: float, frequency_penalty: float, repetition_penalty: float,
) -> torch.Tensor:  # fmt: skip
    """(T, V) logits after bias and penalties, token by token as OpenAI and vLLM define them."""
    changed_TV = logits_TV.clone()
    for place, row_V in enumerate(changed_TV):
        made = list(completion[:place])
        for token in range(len(row_V)):
            value = float(row_V[token]) + logit_bias.get(str(token), 0.0)
            if token in made or token in prompt:
                value = value / repetition_penalty if value > 0 else value * repetition_penalty
            row_V[token] = value - frequency_penalty * made.count(token) - presence_penalty * (token in made)
    return changed_TV


def processed_logprobs(
    logits_TV: torch.Tensor, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> torch.Tensor:
    """(T, V) logprobs of what is sampled from: temperature, then min_p, top_k and top_p, normalised again; float64."""
    scaled_TV = logits_TV.double() / temperature
    probs_TV = scaled_TV.softmax(-1)
    scaled_TV = scaled_TV.masked_fill(probs_TV < min_p * probs_TV.amax(-1, keepdim=True), -torch.inf)
    ranked = scaled_TV.sort(-1, descending=True)
    ranked_TV = ranked.values
    if top_k:
        ranked_TV[:, top_k:] = -torch.inf
    mass_TV = ranked_TV.softmax(-1)
    ranked_TV = ranked_TV.masked_fill(mass_TV.cumsum(-1) - mass_TV >= top_p, -torch.inf)
    kept_TV = torch.empty_like(ranked_TV).scatter_(-1, ranked.indices, ranked_TV)
    return kept_TV.log_softmax(-1)


def at(logprobs_TV: torch.Tensor, completion: Sequence[int]) -> list[float]:
    """(T,) the logprobs of the tokens themselves."""
    picked: list[float] = logprobs_TV.gather(-1, torch.tensor(list(completion))[:, None])[:, 0].tolist()
    return picked
