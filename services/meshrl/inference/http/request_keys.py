"""The treatment of every request key of OpenAI's and vLLM's APIs: honoured, neutral, or refused with a 400.

`schemas` reads the honoured keys and checks all others against this table, of which docs/requests.md is made. A key
that would change the samples is never passed over.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from pydantic import JsonValue

LEAVE_OUT = "leave it out"
UNCONSTRAINED = (
    "this engine does not constrain what it samples; leave it out, ask for the format in the prompt and check the "
    "answer"
)


@dataclass(frozen=True)
class OtherKey:
    """`neutral` are the values that ask for nothing; None if every value does, as the key changes neither samples nor
    answer. `advice` follows the refusal of any other value."""

    neutral: tuple[JsonValue, ...] | None
    advice: str = LEAVE_OUT

    def takes(self, value: JsonValue) -> bool:
        return self.neutral is None or value is None or value in self.neutral


def _each(names: str, neutral: tuple[JsonValue, ...] | None, advice: str = LEAVE_OUT) -> dict[str, OtherKey]:
    return {name: OtherKey(neutral, advice) for name in names.split()}


OTHER_KEYS: Mapping[str, OtherKey] = {
    # bookkeeping and hints for a cache, a queue or a bill
    **_each("user metadata store service_tier safety_identifier prediction request_id session_id priority", None),
    **_each("prompt_cache_key prompt_cache_options prompt_cache_retention cache_salt", None),
    **_each("skip_reading_prefix_cache stream_interval detokenize flat_logprobs output_kind skip_clone", None),
    **_each("spaces_between_special_tokens truncation_side mm_payload", None),
    # other media and services
    "modalities": OtherKey((["text"],), "this is a text model; leave it out"),
    **_each("audio moderation web_search_options", (), "this engine serves a text model alone; leave it out"),
    **_each("media_io_kwargs mm_processor_kwargs", ({},), "this is a text model; leave it out"),
    **_each("return_mm_kwargs", (False,), "this is a text model; leave it out"),
    "prompt_embeds": OtherKey((), "send text or token ids"),
    "verbosity": OtherKey(("medium",), "no chat template reads it; ask for it in the prompt"),
    "echo": OtherKey((False,), "prompt_logprobs of /inference/v1/generate scores a prompt"),
    "suffix": OtherKey((), "this engine only goes on from a prompt; put it there"),
    # constraints on what is sampled
    **_each("guided_json guided_regex guided_choice guided_grammar guided_decoding_backend", (), UNCONSTRAINED),
    **_each("guided_whitespace_pattern structural_tag", (), UNCONSTRAINED),
    "bad_words": OtherKey(([],), "use logit_bias -100 for the tokens that must not be sampled"),
    "allowed_token_ids": OtherKey((), "use logit_bias for the tokens that are wanted"),
    "logits_processors": OtherKey(([],)),
    # other ways of sampling
    "best_of": OtherKey((1,), "send n, and choose among the completions by their logprobs"),
    "use_beam_search": OtherKey((False,), "this engine samples; leave it out"),
    **_each("length_penalty early_stopping", None),  # of beams alone
    "num_beams": OtherKey((1,), "this engine samples; send n"),
    "do_sample": OtherKey((True,), "send temperature 0 for the likeliest tokens"),
    **_each("typical_p tfs", (1,), "use top_p, top_k or min_p"),
    "top_a": OtherKey((0,), "use top_p, top_k or min_p"),
    **_each("no_repeat_ngram_size epsilon_cutoff eta_cutoff mirostat_mode", (0,), "use repetition_penalty or min_p"),
    "penalty_alpha": OtherKey((0,), "use repetition_penalty or min_p"),
    **_each("thinking_token_budget repetition_detection trace_decode_token_ids vllm_xargs", ({},)),
    "watermarking": OtherKey((False,)),
    # prompts that are cut, and what else vLLM reports or moves
    "truncate_prompt_tokens": OtherKey((), "send a prompt that fits"),
    "documents": OtherKey(([],), "send it in chat_template_kwargs"),
    **_each("prompt_logprob_token_ids prompt_logprob_start logprob_token_ids", (), "use logprobs and prompt_logprobs"),
    "routed_experts_prompt_start": OtherKey((0,), "/inference/v1/generate reports them"),
    **_each("return_token_offsets return_prompt_text include_stop_str_in_output", (False,)),
    "include_reasoning": OtherKey((True,), "it is reasoning_content of the message"),
    **_each("kv_transfer_params ec_transfer_params", ({},), "this engine keeps its KV cache to itself; leave it out"),
}
"""Keys of the `openai` package, of vLLM's requests and SamplingParams, and of other engines."""


CHAT_KEYS: Mapping[str, OtherKey] = {
    "tool_choice": OtherKey(("auto", "none"), UNCONSTRAINED),
    **_each("parallel_tool_calls reasoning_effort return_token_ids return_tokens_as_token_ids", None),
}
"""Keys of the chat route that callers of the token route, who render and parse themselves, may pass through."""


def refusals(keys: Mapping[str, JsonValue], *, n: int = 1, table: Mapping[str, OtherKey] = OTHER_KEYS) -> list[str]:
    """A sentence for each of these keys whose value is not neutral; `n` is that of the request."""
    return [
        f"{name}: {value!r:.60} is not supported; {table[name].advice}"
        for name, value in keys.items()
        if name in table and not table[name].takes(value) and not (name == "best_of" and value == n)
    ]


def unknown(keys: Iterable[str]) -> list[str]:
    return [name for name in keys if name not in OTHER_KEYS]


def no_such_key(name: str, read: Collection[str]) -> str:
    near = difflib.get_close_matches(name, sorted(read), n=1)
    return f"{name}: no such key" + (f"; did you mean {near[0]}?" if near else f"; {LEAVE_OUT}")
