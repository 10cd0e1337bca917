"""Builds the renderer that turns chat messages into the policy's tokens and back; used once, by `main`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from loguru import logger
from pydantic import TypeAdapter, ValidationError
from renderers import RendererConfig, create_renderer
from renderers.base import load_tokenizer
from renderers.configs import DefaultRendererConfig

from meshrl.core.config import ConfigError


def load_renderer(tokenizer: str, options: Mapping[str, Any]) -> Any:
    """The renderer for a tokenizer (name or folder). Blocks: it may read many megabytes.

    Without options the renderer made for the model is taken, and the tokenizer's own chat template where there is none.
    Raises ConfigError when the tokenizer cannot be loaded or the options do not name a renderer.
    """
    try:
        loaded = load_tokenizer(tokenizer)
    except (OSError, ValueError) as error:
        raise ConfigError(f"rollout.tokenizer: cannot load {tokenizer!r}: {error}") from error
    if options:
        try:
            return create_renderer(loaded, TypeAdapter(RendererConfig).validate_python(dict(options)))
        except (ValidationError, ValueError, AssertionError) as error:
            raise ConfigError(f"rollout.renderer {dict(options)} does not fit {tokenizer!r}: {error}") from error
    try:
        return create_renderer(loaded)
    except (OSError, ValueError, AssertionError) as error:
        if not getattr(loaded, "chat_template", None):
            raise ConfigError(
                f"no renderer knows {tokenizer!r} and its tokenizer has no chat template; set rollout.renderer"
            ) from error
        logger.info("no renderer is made for {}; its chat template renders", tokenizer)
        return create_renderer(loaded, DefaultRendererConfig())
