"""Makes the chat renderer of a tokenizer. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter, ValidationError

if TYPE_CHECKING:
    from renderers import Renderer


class RendererError(ValueError):
    """No renderer can be made; the message names the key, the options and the tokenizer, `why` the rest alone."""

    def __init__(self, message: str, why: str) -> None:
        super().__init__(f"{message}: {why}")
        self.why = why


def make_renderer(
    tokenizer: Any,
    options: Mapping[str, object],
    *,
    key: str,
    name: str = "",
    template_options: Mapping[str, object] | None = None,
) -> Renderer:
    """The renderer of the options; without any, the one for the tokenizer's model.

    `key` holds the options in the configuration, and `name` is the tokenizer's there. Raises RendererError for options
    that name no renderer, or one that does not fit.
    """
    from renderers import RendererConfig, create_renderer  # takes a second, and is not in every environment

    try:
        config = TypeAdapter(RendererConfig).validate_python(dict(options)) if options else None
        return create_renderer(tokenizer, config, chat_template_kwargs=template_options or None)
    except (ValidationError, ValueError, OSError, AssertionError) as error:
        why = "; ".join(each["msg"] for each in error.errors()) if isinstance(error, ValidationError) else error
        name = name or tokenizer.name_or_path
        raise RendererError(f"{key} {dict(options)} does not fit the tokenizer {name!r}", str(why)) from error
