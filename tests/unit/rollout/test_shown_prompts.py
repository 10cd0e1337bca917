"""The first prompts of a process, as its log has them."""

from __future__ import annotations

from pathlib import Path

from chatml_tokenizer import chatml_tokenizer
from meshrl.rollout.rendering.renderer import load_renderer
from meshrl.sft.data.rendering import TEMPLATES


def test_the_first_prompt_is_logged_with_its_messages_and_tokens(tmp_path: Path, said: list[str]) -> None:
    chatml_tokenizer((TEMPLATES / "qwen3.jinja").read_text(encoding="utf-8")).save_pretrained(tmp_path)
    renderer = load_renderer(str(tmp_path), {"name": "qwen3"}, show_rows=1)
    for text in ("Hi", "Ho"):
        renderer.render([{"role": "user", "content": text}], add_generation_prompt=True)
    (shown,) = said
    head, *parts = shown.splitlines()
    assert head == "a prompt of 21 tokens by Qwen3Renderer:"
    assert "message 0 (user), tokens 0 to 9: '<|im_start|>user\\nHi<|im_end|>\\n' [" in parts[0]
    assert "markup, tokens 10 to 20: '<|im_start|>assistant\\n'" in parts[-1]
