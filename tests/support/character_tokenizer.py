"""A tokenizer of single characters, in which a test can read tokens as text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL = ("<unk>", "<|im_start|>", "<|im_end|>")
END = SPECIAL.index("<|im_end|>")
ALPHABET = "".join(map(chr, range(32, 127))) + "\n"
"""Its characters; the token of the first is `len(SPECIAL)`."""


def save_character_tokenizer(
    folder: Path,
    chat_template: str,
    marks: Sequence[str] = (),
    *,
    special: Sequence[str] = (),
    words: Sequence[str] = (),
) -> PreTrainedTokenizerFast:
    """Writes it to a folder. After the characters come `special` tokens, `marks`, whole in a text, and then `words`."""
    names = [*SPECIAL, *ALPHABET, *special, *marks, *words]
    tokenizer = Tokenizer(models.WordLevel({name: number for number, name in enumerate(names)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>", *special],
    )
    fast.add_tokens([AddedToken(mark, special=False) for mark in marks])
    fast.chat_template = chat_template
    fast.save_pretrained(folder)
    return fast
