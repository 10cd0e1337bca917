"""The bytes that each token of a vocabulary stands for; the text routes report them, and join them to text.

Byte-level vocabularies map each byte to a letter, as GPT-2's does; those with byte fallback have tokens such as
`<0xF0>` beside words in which U+2581 stands for a space.
"""

from __future__ import annotations

import json
import re
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

_SPACE_MARK = "\u2581"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_PLAIN_STEPS = frozenset({"Replace", "Fuse", "Strip", "Metaspace"})


_LETTERS = {letter: byte for byte, letter in bytes_to_unicode().items()}


class TokenBytes:
    """`joins`: whether the text of tokens is their bytes read as UTF-8.

    For other vocabularies (WordPiece, or tokenizers that clean spaces up) only the tokenizer itself decodes, and a
    token's bytes are those of its own text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, bytes] = {}
        steps = _decoder_steps(tokenizer)
        kinds = {str(step["type"]) for step in steps}
        self._byte_level = kinds == {"ByteLevel"}
        self._fallback = "ByteFallback" in kinds and kinds - {"ByteFallback"} <= _PLAIN_STEPS
        self.joins = (self._byte_level or self._fallback) and not getattr(
            tokenizer, "clean_up_tokenization_spaces", False
        )
        self.strips_first_space = bool(kinds & {"Strip", "Metaspace"})
        """Whether a text does not begin with the space that its first word carries."""
        self.special = frozenset(number for number, token in tokenizer.added_tokens_decoder.items() if token.special)

    def of(self, token_id: int) -> bytes:
        """Empty for an id without a token, as rows that pad an embedding have it."""
        if token_id not in self._known:
            self._known[token_id] = self._read(token_id)
        return self._known[token_id]

    def _read(self, token_id: int) -> bytes:
        name: str | None = self._tokenizer.convert_ids_to_tokens(token_id)
        if name is None:
            return b""
        if self._byte_level and all(letter in _LETTERS for letter in name):
            return bytes(_LETTERS[letter] for letter in name)
        if self._fallback:
            byte = _BYTE_TOKEN.fullmatch(name)
            return bytes([int(byte[1], 16)]) if byte else name.replace(_SPACE_MARK, " ").encode(errors="replace")
        if self._byte_level:  # an added token, whose text is written as it is
            return name.encode(errors="replace")
        return str(self._tokenizer.decode([token_id])).encode(errors="replace")


def _decoder_steps(tokenizer: PreTrainedTokenizerBase) -> list[dict[str, Any]]:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or backend.decoder is None:
        return []
    decoder = json.loads(backend.decoder.__getstate__())
    return list(decoder["decoders"]) if decoder["type"] == "Sequence" else [decoder]
