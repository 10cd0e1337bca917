"""Request bodies of the text routes; `request_keys` has their other keys."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, JsonValue, model_validator

from meshrl.inference.engine import MAX_ALTERNATIVES
from meshrl.inference.http.runs import RequestBody, SamplingFields


class StreamOptions(RequestBody):
    include_usage: bool = False
    include_obfuscation: bool = False  # nothing is added to events, so there is nothing to leave out
    continuous_usage_stats: Literal[False] = False


class _TextBody(SamplingFields):
    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    max_completion_tokens: int | None = Field(default=None, ge=1)

    @property
    def most_tokens(self) -> int | None:
        return self.max_tokens or self.max_completion_tokens

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens):
            raise ValueError("max_tokens and max_completion_tokens differ; send one of them")
        if self.prompt_logprobs is not None:
            raise ValueError("prompt_logprobs is answered by /inference/v1/generate only; leave it out here")
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: is for streams alone; send stream true, or leave it out")
        return self


class FunctionDefinition(BaseModel):
    """The chat template shows it whole."""

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
    add_special_tokens: Literal[False] = False  # the template writes those that it wants

    @model_validator(mode="after")
    def _tools_as_this_engine_can(self) -> Self:
        if (
            self.continue_final_message
            and "add_generation_prompt" in self.model_fields_set
            and self.add_generation_prompt
        ):
            raise ValueError("add_generation_prompt: continue_final_message goes on without one; leave one of them out")
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
        offered = [] if self.tool_choice == "none" else self.tools or []
        return [tool.model_dump(exclude_unset=True) for tool in offered]

    @property
    def template_arguments(self) -> dict[str, JsonValue]:
        own = {"chat_template": self.chat_template, "reasoning_effort": self.reasoning_effort}
        return {**(self.chat_template_kwargs or {}), **{name: each for name, each in own.items() if each is not None}}


class CompletionBody(_TextBody):
    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: int | None = Field(default=None, ge=0, le=MAX_ALTERNATIVES)
    max_tokens: int | None = Field(default=16, ge=1)  # OpenAI's default of this route
    add_special_tokens: bool = True
