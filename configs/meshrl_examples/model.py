"""Makes the examples' model: a Qwen3 of about 1.3 million random parameters with a byte-level tokenizer."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3MoeConfig
from transformers.utils.logging import disable_progress_bar

END_OF_TURN = "<|im_end|>"
PADDING = "<|endoftext|>"
ROLES = ("system", "user", "assistant", "tool")
HEADERS = tuple(f"<|im_start|>{role}\n" for role in ROLES)
"""The opening of a turn is one token a role, so that a prompt of the example stays short."""

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""ChatML. A conversation's tokens are a prefix of the longer conversation's."""

TOOL_MARKS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
TOOLS_HEADER = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>"
)
TOOLS_FOOTER = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
    "<tool_call></tool_call> XML tags:\n<tool_call>\n"
    '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
)
TOOL_JSON = (
    '{"type": "function", "function": {"name": "', '", "description": "',
    '", "parameters": {"type": "object", "properties": {"',
    '": {"title": "', '", "type": "string"}}, "required": ["', '"], "title": "', 'Arguments"}}}',
    '\n{"name": "', '", "arguments": {"', '": "', '"}}\n',
)  # fmt: skip
"""What Qwen3 writes around tools. A token each, like the headers: a tool would fill the example's prompt otherwise."""

TOOL_TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>system\n' }}"
    "{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] + '\n\n' }}{% endif %}{{ "
    + repr(TOOLS_HEADER)
    + " }}{% for tool in tools %}{{ '\n' + (tool | tojson) }}{% endfor %}{{ "
    + repr(TOOLS_FOOTER)
    + " + '<|im_end|>\n' }}{% endif %}"
    "{% for message in messages %}"
    "{% if message['role'] == 'system' and loop.first and tools %}"
    "{% elif message['role'] == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1]['role'] != 'tool' %}{{ '<|im_start|>user' }}{% endif %}"
    "{{ '\n<tool_response>\n' + message['content'] + '\n</tool_response>' }}"
    "{% if loop.last or messages[loop.index0 + 1]['role'] != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}"
    "{% else %}{{ '<|im_start|>' + message['role'] + '\n' + (message['content'] or '') }}"
    "{% for call in message['tool_calls'] or [] %}"
    "{% if not loop.first or message['content'] %}{{ '\n' }}{% endif %}"
    "{{ '<tool_call>\n{\"name\": \"' + call['function']['name'] + '\", \"arguments\": ' }}"
    "{% if call['function']['arguments'] is string %}{{ call['function']['arguments'] }}"
    "{% else %}{{ call['function']['arguments'] | tojson }}{% endif %}{{ '}\n</tool_call>' }}"
    "{% endfor %}{{ '<|im_end|>\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""How Qwen3 shows tools, their calls and their results, without its thinking."""


def create_tokenizer(*, tool_calls: bool = False) -> PreTrainedTokenizerFast:
    """A token for each byte and each special string: any text round-trips.

    `tool_calls` adds the marks and the template with which Qwen3 calls tools.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={byte: index for index, byte in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = (PADDING, "<|im_start|>", END_OF_TURN, *HEADERS)
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in special])
    if tool_calls:
        texts = (*TOOL_MARKS, TOOLS_HEADER, TOOLS_FOOTER, *TOOL_JSON)
        tokenizer.add_tokens([AddedToken(text, normalized=False) for text in texts])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TURN,
        pad_token=PADDING,
        chat_template=TOOL_TEMPLATE if tool_calls else CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def create_model(
    folder: Path,
    *,
    seed: int,
    hidden_size: int = 160,
    num_layers: int = 4,
    num_heads: int = 4,
    num_key_value_heads: int = 2,
    head_dim: int | None = None,
    num_experts: int = 0,
    tool_calls: bool = False,
) -> None:
    """Writes config, float32 weights and tokenizer to `folder`; the same seed gives the same weights.

    `head_dim` is that of each attention head; None divides `hidden_size` among the heads. With `num_experts` each layer
    has so many, of which a token goes through two. `tool_calls`: the tokenizer has Qwen3's format of tools.
    """
    tokenizer = create_tokenizer(tool_calls=tool_calls)
    experts = {"num_experts": num_experts, "num_experts_per_tok": 2, "moe_intermediate_size": hidden_size}
    config = (Qwen3MoeConfig if num_experts else Qwen3Config)(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_key_value_heads,
        head_dim=head_dim or hidden_size // num_heads,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **(experts if num_experts else {}),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the example's model.")
    parser.add_argument("folder", type=Path, help="where to write it")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights (default: 0)")
    parser.add_argument("--head-dim", type=int, help="of each attention head (default: 40); vLLM on a CPU takes 32")
    parser.add_argument("--hidden-size", type=int, default=160, help="of each layer (default: 160)")
    parser.add_argument("--num-layers", type=int, default=4, help="layers (default: 4)")
    parser.add_argument("--num-experts", type=int, default=0, help="of each layer (default: 0, a dense model)")
    parser.add_argument("--tool-calls", action="store_true", help="with Qwen3's format of tools and their calls")
    arguments = parser.parse_args()
    disable_progress_bar()  # the file is written in an instant
    create_model(
        arguments.folder,
        seed=arguments.seed,
        hidden_size=arguments.hidden_size,
        num_layers=arguments.num_layers,
        head_dim=arguments.head_dim,
        num_experts=arguments.num_experts,
        tool_calls=arguments.tool_calls,
    )


if __name__ == "__main__":
    main()
