"""Request bodies of the HTTP routes: checked, then turned into the engine's own request types.

The routes read the keys that have a field here. `request_keys` decides about all others: a key that would change the
samples is refused unless its value is neutral. A key of no known API is refused in `sampling_params`, and logged on the
text routes, whose clients send more than an engine needs.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError, model_validator

from meshrl.inference.engine import SamplingParams
from meshrl.inference.http.request_keys import CHAT_KEYS, UNCONSTRAINED, no_such_key, refusals, unknown
from meshrl.wire.errors import MeshError, Reason

MAX_COMPLETIONS = 128
MAX_ALTERNATIVES = 64
_SEED_STRIDE = 0x9E3779B97F4A7C15  # completions of one request draw from streams far apart

_AS_THEY_ARE = (
    "temperature", "top_p", "min_p", "min_tokens", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "logit_bias", "ignore_eos", "prompt_logprobs",
)  # fmt: skip
"""Keys that requests and `SamplingParams` have in the same form."""

Body = TypeVar("Body", bound=BaseModel)
Bias = Annotated[float, Field(ge=-100.0, le=100.0, allow_inf_nan=False)]


def _refuse_constraints(response_format: JsonValue, structured_outputs: JsonValue) -> None:
    if response_format not in (None, {"type": "text"}):
        raise ValueError(f"response_format is not supported: {UNCONSTRAINED}")
    if structured_outputs:
        raise ValueError(f"structured_outputs is not supported: {UNCONSTRAINED}")


class RequestBody(BaseModel):
    """A part of a request whose other keys are kept, to be checked. A null key has its default."""

    model_config = ConfigDict(extra="allow")

    @model_validator(mode="before")
    @classmethod
    def _null_is_the_default(cls, keys: Any) -> Any:
        if not isinstance(keys, dict):
            return keys
        defaults = {name: field.default for name, field in cls.model_fields.items() if not field.is_required()}
        nullable = {"max_tokens"}  # without a limit, which is not the default of every route
        return {
            name: value
            for name, value in keys.items()
            if value is not None or name in nullable or defaults.get(name, ...) in (None, ...)
        }

    @property
    def other_keys(self) -> dict[str, JsonValue]:
        return self.model_extra or {}


class SamplingFields(RequestBody):
    """Sampling keys shared by every route, in vLLM's names and with its neutral values."""

    n: int = Field(default=1, ge=1, le=MAX_COMPLETIONS)
    temperature: float = Field(default=1.0, ge=0.0, allow_inf_nan=False)
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    top_k: int = Field(default=0, ge=-1, le=2**31 - 1)
    min_p: float = Field(default=0.0, ge=0.0, le=1.0)
    min_tokens: int = Field(default=0, ge=0)
    max_tokens: int | None = Field(default=None, ge=1)
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    presence_penalty: float = Field(default=0.0, ge=-2.0, le=2.0, allow_inf_nan=False)
    frequency_penalty: float = Field(default=0.0, ge=-2.0, le=2.0, allow_inf_nan=False)
    repetition_penalty: float = Field(default=1.0, gt=0.0, le=10.0, allow_inf_nan=False)
    logit_bias: dict[int, Bias] = {}
    prompt_logprobs: int | None = Field(default=None, ge=0, le=MAX_ALTERNATIVES)
    extra_args: dict[str, JsonValue] | None = None

    @model_validator(mode="after")
    def _samples_as_asked(self) -> Self:
        if found := refusals(self.other_keys, n=self.n):
            raise ValueError("; ".join(found))
        return self

    @property
    def stop_strings(self) -> tuple[str, ...]:
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return tuple(text for text in stops if text)

    def params(
        self, *, most: int, index: int, logprobs: bool, top_logprobs: int, routes_from: int | None = None
    ) -> SamplingParams:
        """Parameters of the index-th completion, without max_tokens for `most` tokens.

        Without `logprobs` an engine may be much faster.
        """
        raw_logprobs = bool((self.extra_args or {}).get("raw_logprobs"))
        return SamplingParams(
            **{name: getattr(self, name) for name in _AS_THEY_ARE},
            max_tokens=self.max_tokens or most,
            top_k=max(self.top_k, 0),
            stop_token_ids=tuple(self.stop_token_ids),
            seed=None if self.seed is None else (self.seed + index * _SEED_STRIDE) % 2**64,
            logprobs=logprobs or raw_logprobs,
            top_logprobs=top_logprobs,
            raw_logprobs=raw_logprobs,
            routed_experts_prompt_start=routes_from,
        )


class TokenSampling(SamplingFields):
    """`sampling_params` of the token-in route. `logprobs` 1 reports the sampled token, k > 1 also k alternatives; so do
    `prompt_logprobs` for the tokens of the prompt."""

    logprobs: int | None = Field(default=None, ge=0, le=MAX_ALTERNATIVES)
    routed_experts_prompt_start: int | None = Field(default=None, ge=0)
    response_format: JsonValue = None
    structured_outputs: JsonValue = None

    @model_validator(mode="after")
    def _known(self) -> Self:
        _refuse_constraints(self.response_format, self.structured_outputs)
        if refused := refusals(self.other_keys, table=CHAT_KEYS):
            raise ValueError("; ".join(refused))
        if found := unknown(self.other_keys.keys() - CHAT_KEYS):
            raise ValueError("; ".join(no_such_key(name, type(self).model_fields) for name in found))
        return self

    @property
    def alternatives(self) -> int:
        return self.logprobs if self.logprobs is not None and self.logprobs > 1 else 0

    @property
    def packed_only(self) -> bool:
        """Whether the caller reads `completion_logprobs` and wants no JSON entry a token."""
        return bool((self.extra_args or {}).get("packed_logprobs"))

    @property
    def fits_a_frame(self) -> bool:
        """Whether a completion frame can carry the whole answer."""
        return self.alternatives == 0 and self.prompt_logprobs is None


class GenerateBody(RequestBody):
    model: str | None = None
    request_id: str | None = None
    token_ids: list[int]
    sampling_params: TokenSampling = TokenSampling()
    stream: bool = False
    return_token_ids: bool = False
    features: dict[str, JsonValue] | None = None
    content_parts: list[JsonValue] | None = None

    @model_validator(mode="after")
    def _samples_as_asked(self) -> Self:
        misplaced = [name for name in self.other_keys if name in TokenSampling.model_fields]
        found = [f"{name}: belongs into sampling_params" for name in misplaced] + refusals(self.other_keys)
        if found:
            raise ValueError("; ".join(found))
        return self

    @model_validator(mode="after")
    def _text_only(self) -> Self:
        if self.features or self.content_parts:
            raise ValueError("features and content_parts carry images or audio; this engine serves text models only")
        if self.sampling_params.stop_strings:
            raise ValueError("sampling_params.stop needs text, this route speaks token ids; use stop_token_ids")
        return self


class StreamOptions(RequestBody):
    """What a stream carries besides its text."""

    include_usage: bool = False
    include_obfuscation: bool = False  # nothing is added to events, so there is nothing to leave out
    continuous_usage_stats: Literal[False] = False


class _TextBody(SamplingFields):
    """What chat and plain completions share."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    max_completion_tokens: int | None = Field(default=None, ge=1)
    response_format: JsonValue = None
    structured_outputs: JsonValue = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens):
            raise ValueError("max_tokens and max_completion_tokens differ; send one of them")
        if self.prompt_logprobs is not None:
            raise ValueError("prompt_logprobs is answered by /inference/v1/generate only; leave it out here")
        self.max_tokens = self.max_tokens or self.max_completion_tokens
        _refuse_constraints(self.response_format, self.structured_outputs)
        return self


class FunctionDefinition(BaseModel):
    """What a model may call; the chat template shows it whole."""

    model_config = ConfigDict(extra="allow")

    name: str = Field(min_length=1)


class ToolDefinition(BaseModel):
    model_config = ConfigDict(extra="allow")

    type: Literal["function"]
    function: FunctionDefinition


class ChatBody(_TextBody):
    messages: list[dict[str, JsonValue]] = Field(min_length=1)
    tools: list[ToolDefinition] | None = None
    tool_choice: JsonValue = None
    parallel_tool_calls: bool | None = None
    functions: JsonValue = None
    function_call: JsonValue = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_ALTERNATIVES)
    chat_template: str | None = None
    chat_template_kwargs: dict[str, JsonValue] | None = None
    reasoning_effort: str | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    echo: Literal[False] = False
    add_special_tokens: Literal[False] = False  # the template writes those that it wants

    @model_validator(mode="after")
    def _tools_as_this_engine_can(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs: needs logprobs true; send it as well, or leave top_logprobs out")
        if self.functions or self.function_call not in (None, "none", "auto"):
            raise ValueError("functions and function_call are what tools and tool_choice were before; send those")
        if self.tool_choice not in (None, "none", "auto"):
            raise ValueError(
                f"tool_choice {self.tool_choice!r} is not supported: this engine does not constrain what it samples, so"
                " it cannot have the model call a tool; leave it out or send auto or none, and check the answer"
            )
        return self

    @property
    def offered_tools(self) -> list[dict[str, JsonValue]]:
        """The tools that the model may call in this request."""
        offered = [] if self.tool_choice == "none" else self.tools or []
        return [tool.model_dump(exclude_unset=True) for tool in offered]

    @property
    def template_arguments(self) -> dict[str, JsonValue]:
        """What the request gives to the chat template beside its messages."""
        own = {"chat_template": self.chat_template, "reasoning_effort": self.reasoning_effort}
        return {**(self.chat_template_kwargs or {}), **{name: each for name, each in own.items() if each is not None}}


class CompletionBody(_TextBody):
    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: int | None = Field(default=None, ge=0, le=MAX_ALTERNATIVES)
    max_tokens: int | None = Field(default=16, ge=1)  # OpenAI's default of this route
    echo: Literal[False] = False
    suffix: None = None
    add_special_tokens: bool = True


class WeightsBody(BaseModel):
    """POST /update_weights: a Hugging Face checkpoint folder, under either name, and what to call it."""

    model_config = ConfigDict(extra="ignore")

    weight_dir: str | None = None
    path: str | None = None
    version: int | None = Field(default=None, ge=0)


def parse(kind: type[Body], raw: bytes) -> Body:
    """Raises: MeshError INVALID_REQUEST that lists every violation with its key."""
    try:
        return kind.model_validate_json(raw)
    except ValidationError as error:
        found = [
            f"{'.'.join(str(part) for part in each['loc']) or 'body'}: {each['msg'].removeprefix('Value error, ')}"
            for each in error.errors(include_url=False, include_input=False)
        ]
        raise MeshError(Reason.INVALID_REQUEST, "; ".join(found[:10])) from error
