"""Texts of tokens from the tokenizer.json of the run's model on this machine, without a tokenizer library.

Byte-level vocabularies (Qwen, Llama 3, GPT-2) write each byte as one character, others a space as U+2581.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from meshrl.cli.run_folder import RunFolder
from meshrl.wire.values import JsonObject

_PROGRAMS = ("rollout", "inference", "trainer")
_HUB = Path.home() / ".cache" / "huggingface" / "hub"


class TokenPieces:
    """The vocabulary is read on first use."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._pieces: dict[int, str] | None = None

    def of(self, token_ids: Sequence[int]) -> list[str] | None:
        """Empty for an unknown token. None without a vocabulary."""
        if self._pieces is None:
            self._pieces = _read(self._folder)
        return [self._pieces.get(token, "") for token in token_ids] if self._pieces else None


def _read(folder: RunFolder) -> dict[int, str]:
    for program in _PROGRAMS:
        name = folder.config(program).get("model", {}).get("name")
        if not name:
            continue
        cached = sorted((_HUB / f"models--{name.replace('/', '--')}" / "snapshots").glob("*/tokenizer.json"))
        for path in (Path(name) / "tokenizer.json", *cached):
            try:
                return _vocabulary(json.loads(path.read_text(encoding="utf-8")))
            except (OSError, ValueError, LookupError, TypeError, AttributeError):  # of a kind that is not known here
                continue
    return {}


def _vocabulary(tokenizer: JsonObject) -> dict[int, str]:
    vocab, added = tokenizer["model"]["vocab"], tokenizer.get("added_tokens", [])
    entries = vocab.items() if isinstance(vocab, dict) else ((entry[0], place) for place, entry in enumerate(vocab))
    byte_level = '"ByteLevel"' in json.dumps([tokenizer.get("pre_tokenizer"), tokenizer.get("decoder")])
    characters = _byte_characters() if byte_level else {}
    pieces = {}
    for text, token in entries:
        if byte_level and all(character in characters for character in text):
            pieces[token] = bytes(characters[character] for character in text).decode(errors="replace")
        else:
            pieces[token] = text.replace("\u2581", " ")
    return pieces | {each["id"]: each["content"] for each in added}


def _byte_characters() -> dict[str, int]:
    """The character for each byte in byte-level vocabularies: itself if visible, else from 256 on."""
    seen = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    characters = {chr(byte): byte for byte in seen}
    for place, byte in enumerate(byte for byte in range(256) if byte not in seen):
        characters[chr(256 + place)] = byte
    return characters
