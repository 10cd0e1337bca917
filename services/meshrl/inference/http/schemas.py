"""Request bodies of the HTTP routes: checked, then turned into the engine's own request types.

Unknown keys are ignored, as OpenAI clients send more than an engine needs. A known key that this engine cannot honour
(such as response_format) is an error unless it is neutral: silently sampling otherwise would be wrong.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError, model_validator

from meshrl.inference.engine import SamplingParams
from meshrl.wire.errors import MeshError, Reason

MAX_COMPLETIONS = 128
MAX_ALTERNATIVES = 64
_SEED_STRIDE = 0x9E3779B97F4A7C15  # completions of one request draw from streams far apart

Body = TypeVar("Body", bound=BaseModel)
Bias = Annotated[float, Field(ge=-100.0, le=100.0, allow_inf_nan=False)]


class SamplingFields(BaseModel):
    """Sampling keys shared by every route, in vLLM's names and with its neutral values."""

    model_config = ConfigDict(extra="ignore")

    n: int = Field(default=1, ge=1, le=MAX_COMPLETIONS)
    temperature: float | None = Field(default=None, ge=0.0, allow_inf_nan=False)
    top_p: float | None = Field(default=None, gt=0.0, le=1.0)
    top_k: int | None = Field(default=None, ge=-1, le=2**31 - 1)
    min_p: float | None = Field(default=None, ge=0.0, le=1.0)
    min_tokens: int | None = Field(default=None, ge=0)
    max_tokens: int | None = Field(default=None, ge=1)
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    presence_penalty: float | None = Field(default=None, ge=-2.0, le=2.0, allow_inf_nan=False)
    frequency_penalty: float | None = Field(default=None, ge=-2.0, le=2.0, allow_inf_nan=False)
    repetition_penalty: float | None = Field(default=None, gt=0.0, le=10.0, allow_inf_nan=False)
    logit_bias: dict[int, Bias] | None = None
    prompt_logprobs: int | None = Field(default=None, ge=0, le=MAX_ALTERNATIVES)
    extra_args: dict[str, JsonValue] | None = None

    @property
    def stop_strings(self) -> tuple[str, ...]:
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return tuple(text for text in stops if text)

    def params(self, *, room: int, index: int, logprobs: bool, top_logprobs: int = 0) -> SamplingParams:
        """Parameters of the index-th completion; `room` is how many tokens still fit behind the prompt.

        max_tokens beyond the room is lowered to it; without max_tokens the completion may fill the room. An engine
        that nobody asks for `logprobs` may be much faster.
        """
        raw_logprobs = bool((self.extra_args or {}).get("raw_logprobs"))
        return SamplingParams(
            max_tokens=room if self.max_tokens is None else min(self.max_tokens, room),
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=max(self.top_k or 0, 0),
            min_p=self.min_p or 0.0,
            min_tokens=self.min_tokens or 0,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            repetition_penalty=1.0 if self.repetition_penalty is None else self.repetition_penalty,
            logit_bias=self.logit_bias or {},
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=self.ignore_eos,
            seed=None if self.seed is None else (self.seed + index * _SEED_STRIDE) % 2**64,
            logprobs=logprobs or raw_logprobs,
            top_logprobs=top_logprobs,
            prompt_logprobs=self.prompt_logprobs,
            raw_logprobs=raw_logprobs,
        )


class TokenSampling(SamplingFields):
    """`sampling_params` of the token-in route. `logprobs` 1 reports the sampled token, k > 1 also k alternatives; so do
    `prompt_logprobs` for the tokens of the prompt."""

    logprobs: int | None = Field(default=None, ge=0, le=MAX_ALTERNATIVES)

    @property
    def alternatives(self) -> int:
        return self.logprobs if self.logprobs is not None and self.logprobs > 1 else 0

    @property
    def packed_only(self) -> bool:
        """Whether the caller reads `completion_logprobs` and wants no JSON entry a token."""
        return bool((self.extra_args or {}).get("packed_logprobs"))

    @property
    def fits_a_frame(self) -> bool:
        """Whether a completion frame can carry all that is asked for."""
        return self.alternatives == 0 and self.prompt_logprobs is None


class GenerateBody(BaseModel):
    """POST /inference/v1/generate: token ids in, token ids out."""

    model_config = ConfigDict(extra="ignore")

    model: str | None = None
    request_id: str | None = None
    token_ids: list[int]
    sampling_params: TokenSampling = TokenSampling()
    stream: bool = False
    return_token_ids: bool = False
    features: dict[str, JsonValue] | None = None
    content_parts: list[JsonValue] | None = None

    @model_validator(mode="after")
    def _text_only(self) -> Self:
        if self.features or self.content_parts:
            raise ValueError("features and content_parts carry images or audio; this engine serves text models only")
        if self.sampling_params.stop_strings:
            raise ValueError("sampling_params.stop needs text, this route speaks token ids; use stop_token_ids")
        return self


class StreamOptions(BaseModel):
    """What a stream carries besides its text."""

    model_config = ConfigDict(extra="ignore")

    include_usage: bool = False


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
        if self.response_format not in (None, {"type": "text"}) or self.structured_outputs:
            raise ValueError(
                "response_format and structured_outputs are not supported: this engine does not constrain what it "
                "samples; leave them out, ask for the format in the prompt and check the answer"
            )
        return self

    def limited(self, *, room: int, index: int, logprobs: bool, top_logprobs: int) -> SamplingParams:
        limit = self.max_tokens or self.max_completion_tokens
        limited = self if limit == self.max_tokens else self.model_copy(update={"max_tokens": limit})
        return limited.params(room=room, index=index, logprobs=logprobs, top_logprobs=top_logprobs)


class FunctionDefinition(BaseModel):
    """What a model may call; the chat template shows it whole."""

    model_config = ConfigDict(extra="allow")

    name: str = Field(min_length=1)


class ToolDefinition(BaseModel):
    """A tool of a chat request, as OpenAI's API has it."""

    model_config = ConfigDict(extra="allow")

    type: Literal["function"]
    function: FunctionDefinition


class ChatBody(_TextBody):
    """POST /v1/chat/completions."""

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
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    @model_validator(mode="after")
    def _tools_as_this_engine_can(self) -> Self:
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
        own = {} if self.chat_template is None else {"chat_template": self.chat_template}
        return {**(self.chat_template_kwargs or {}), **own}


class CompletionBody(_TextBody):
    """POST /v1/completions."""

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
