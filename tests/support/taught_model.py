"""A tiny Qwen3 over bytes that has learned two answers by heart: with a thought, with tool calls.

Its greedy completions are known beforehand, on any engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from chatml_tokenizer import chatml_tokenizer

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "find", "strict": True, "parameters": {"type": "object", "properties": {}}},
}
QUESTION = {"role": "user", "content": "Where?"}
THOUGHT = "<think>\nLook.\n</think>\n\n"
CALLS = "".join(
    f'<tool_call>\n{{"name": "find", "arguments": {{"word": "{word}"}}}}\n</tool_call>\n' for word in ("né", "b")
)
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }}\n{% endfor %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n"
)
ROWS: Sequence[tuple[dict[str, str], list[dict[str, Any]] | None, str]] = (
    (QUESTION, None, f"{THOUGHT}Here."),
    (QUESTION, [TOOL], THOUGHT + CALLS.strip()),
)


@cache
def taught_model() -> PreTrainedModel:
    """Answers each question of ROWS as it is written there, and ends its turn. Do not change it."""
    tokenizer = chatml_tokenizer(TEMPLATE)
    rows = []
    for question, tools, said in ROWS:
        prompt = tokenizer.apply_chat_template([question], tools=tools, add_generation_prompt=True, return_dict=False)
        reply = tokenizer.encode(f"{said}<|im_end|>", add_special_tokens=False)
        rows.append((torch.tensor([prompt + reply]), torch.tensor([[-100] * len(prompt) + reply])))
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=1024, tie_word_embeddings=True,
        initializer_range=0.05, eos_token_id=tokenizer.eos_token_id, bos_token_id=None,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    worst = 1.0
    for _ in range(600):
        losses = [model(input_ids=tokens, labels=labels).loss for tokens, labels in rows]
        worst = float(torch.stack(losses).max().detach())
        if worst < 0.02:
            break
        sum(losses).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert worst < 0.02
    return model.eval()
