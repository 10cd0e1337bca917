"""The tokenizer of a fine-tuning run, its chat template, and the renderer that may take the template's place."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from meshrl.models.load import ModelError, load_tokenizer
from meshrl.models.renderers import RendererError, make_renderer
from meshrl.sft.config import TextSettings
from meshrl.sft.data.conversations import Conversation

TEMPLATES = Path(__file__).with_name("templates")


def load_sft_tokenizer(text: TextSettings) -> PreTrainedTokenizerBase:
    """Raises ModelError for a tokenizer or chat template that cannot be loaded."""
    named = text.tokenizer.name
    tokenizer = load_tokenizer(text.model if named is None else text.model.model_copy(update={"name": named}))
    if text.tokenizer.chat_template is not None:
        tokenizer.chat_template = _chat_template(text.tokenizer.chat_template)
    return tokenizer


def _chat_template(given: str) -> str:
    shipped = TEMPLATES / f"{given}.jinja"
    if given.isidentifier() and shipped.is_file():
        return shipped.read_text(encoding="utf-8")
    if "{" in given:
        return given
    path = Path(given).expanduser()
    if not path.is_file():
        known = ", ".join(sorted(file.stem for file in TEMPLATES.glob("*.jinja")))
        raise ModelError(
            f"tokenizer.chat_template {given!r} is neither a template that comes with sft ({known}), nor a file, nor"
            " the text of a Jinja template"
        )
    return path.read_text(encoding="utf-8")


class Renderers:
    def __init__(self, tokenizer: PreTrainedTokenizerBase, options: Mapping[str, object]) -> None:
        """Raises ModelError for options that name no renderer, or one that does not fit the tokenizer."""
        self._tokenizer, self._options = tokenizer, options
        self._made: dict[str, object] = {}
        try:
            self.of({})
        except RendererError as error:
            raise ModelError(
                f"{error}; name the renderer of the model's family, or leave [renderer] out and use its chat template"
            ) from error

    @property
    def name(self) -> str:
        return type(self.of({})).__name__

    def of(self, template_options: Mapping[str, object]) -> object:
        """Raises RendererError for unknown options."""
        key = json.dumps(template_options, sort_keys=True, default=str)
        if key not in self._made:
            self._made[key] = make_renderer(
                self._tokenizer, self._options, key="renderer", template_options=template_options
            )
        return self._made[key]


class MatchingRenderers:
    """Renderers that make the tokens of a chat template, for where that gives no mask."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._fitting: list[Renderers] | None = None

    def of(self, conversation: Conversation, token_ids: list[int]) -> Renderers | None:
        """The first whose tokens of the conversation are `token_ids`: that of the tokenizer's model, or of any family
        whose special tokens it has."""
        if self._fitting is None:
            from renderers.base import MODEL_RENDERER_MAP

            of_model = MODEL_RENDERER_MAP.get(self._tokenizer.name_or_path)
            self._fitting = []
            for name in dict.fromkeys(([of_model] if of_model else []) + sorted(set(MODEL_RENDERER_MAP.values()))):
                try:
                    self._fitting.append(Renderers(self._tokenizer, {"name": name}))
                except Exception:  # noqa: BLE001  # of another family, or one that needs a download
                    continue
        messages = [dict(message) for message in conversation.messages]
        tools = [dict(tool) for tool in conversation.tools] or None
        for renderers in self._fitting:
            try:
                renderer: Any = renderers.of(conversation.template_options)
                rendered = list(renderer.render(messages, tools=tools).token_ids)
            except Exception:  # noqa: BLE001  # a renderer with other needs of a message is none for this one
                continue
            if rendered == token_ids:
                return renderers
        return None
