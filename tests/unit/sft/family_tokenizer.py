"""A tokenizer of bytes with the special tokens of published families, and the chat templates that TRL's wheel ships."""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path

import renderers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

BAR, UNDER = "\uff5c", "\u2581"  # the wide bar and the low block of DeepSeek's tokens
DEEPSEEK_END = f"<{BAR}end{UNDER}of{UNDER}sentence{BAR}>"
NOT_IN_RENDERERS = ("<|end|>", "<start_of_turn>", "<end_of_turn>", "<bos>", "<eos>", "[INST]", "[/INST]", "</s>")


def special_tokens() -> list[str]:
    """Special strings that the renderers of the package ask a tokenizer for, and those of families without one."""
    text = "".join(path.read_text(encoding="utf-8") for path in Path(renderers.__file__).parent.glob("*.py"))
    found = set(re.findall(r'_token_id\(\s*"([^"]+)"', text))
    found |= set(re.findall(rf'"(<[|{BAR}][^"\s|<>{BAR}]{{1,40}}[|{BAR}]>)"', text))
    named = re.findall(r'_get_special_token\(\s*f?"([^"]+)"', text)
    found |= {f"<{BAR}{name.replace('{_US}', UNDER)}{BAR}>" for name in named} | set(NOT_IN_RENDERERS)
    return sorted(found, key=lambda token: (-len(token), token))


def family_tokenizer(chat_template: str, *, eos_token: str, bos_token: str | None = None) -> PreTrainedTokenizerFast:
    """A token for each byte and each special string."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={byte: index for index, byte in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in special_tokens()])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=eos_token,
        bos_token=bos_token,
        chat_template=chat_template,
        clean_up_tokenization_spaces=False,
    )


def published_template(name: str) -> str:
    """The text of a chat template as TRL ships it."""
    return files("trl").joinpath("chat_templates", f"{name}.jinja").read_text(encoding="utf-8")
