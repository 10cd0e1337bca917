"""Tokens and masks of `sft` against implementations that share no code with it, over generated conversations.

    python tests/benchmarks/bench_sft_masks.py [--templates FOLDER] [--conversations 200]

Tokens: the stock chat template of the model's family, rendered by transformers. FOLDER holds templates as TRL ships
them (`trl/chat_templates`); families without one there are compared by their masks alone. Masks: read off the markup.
What follows an assistant's header up to and with the end of its turn is learned, and nothing else. Tokenizers are of
bytes, with the special tokens of all families.

Then losses: packed rows against one conversation at a time, and against transformers' own loss.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import renderers
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from meshrl.sft.data.conversations import Conversation, DataError
from meshrl.sft.data.rendering import Renderers
from meshrl.sft.data.tokenization import render

LEARNED = frozenset({"assistant"})
CHATML = (("<|im_start|>assistant\n",), ("<|im_end|>",))
LLAMA = (("<|start_header_id|>assistant<|end_header_id|>\n\n",), ("<|eot_id|>", "<|eom_id|>"))
GLM = (("<|assistant|></think>", "<|assistant|><think>"), ("<|user|>", "<|observation|>", "<|endoftext|>"))
BAR, UNDER = "\uff5c", "\u2581"  # the wide bar and the low block of DeepSeek's tokens
TOOLS_END = f"<{BAR}tool{UNDER}outputs{UNDER}end{BAR}>"  # after which it goes on without a header
DEEPSEEK = ((f"<{BAR}Assistant{BAR}>", TOOLS_END), (f"<{BAR}end{UNDER}of{UNDER}sentence{BAR}>",))
DEEPSEEK_V4 = tuple(f"<{BAR}Assistant{BAR}>{mark}" for mark in ("</think>", "<think>"))
KIMI = (("<|im_assistant|>assistant<|im_middle|>",), ("<|im_end|>",))
HY = ":opensource"  # of every token of its family
HY3 = tuple(f"<{BAR}hy_Assistant{HY}{BAR}><think{HY}>{end}" for end in (f"</think{HY}>", ""))


@dataclass(frozen=True)
class Family:
    """A renderer, the stock template that it stands for, and how an assistant's turn begins and ends."""

    renderer: str
    template: str | None
    headers: tuple[str, ...]
    ends: tuple[str, ...]


FAMILIES = (
    Family("qwen3", "qwen3", *CHATML),
    Family("prime-qwen3", None, *CHATML),
    Family("qwen3.5", "qwen3_5_think", *CHATML),
    Family("qwen3.6", "qwen3_6", *CHATML),
    Family("qwen3.8", "qwen3_8", *CHATML),
    Family("nemotron-3", "nemotron_3_nano", *CHATML),
    Family("nemotron-3-ultra", "nemotron_3_ultra", *CHATML),
    Family("llama-3", "llama3_2", *LLAMA),
    Family("glm-4.5", "glm4moe", ("<|assistant|>\n",), GLM[1]),
    Family("glm-5", None, *GLM),
    Family("glm-5.1", None, *GLM),
    Family("deepseek-v3", "deepseekv3", *DEEPSEEK),
    Family("deepseek-r1", None, *DEEPSEEK),
    Family("kimi-k2", None, *KIMI),
    Family("kimi-k2.5", None, *KIMI),
    Family("minimax-m2", None, ("]~b]ai\n",), ("[e~[",)),
    Family("laguna-xs.2", None, ("<assistant>\n",), ("</assistant>",)),
    Family("laguna-m.1", None, ("<assistant>\n",), ("</assistant>",)),
    Family("laguna-xs-2.1", None, ("<assistant></think>", "<assistant><think>"), ("</assistant>",)),
    Family("laguna-s-2.1", None, ("<assistant></think>", "<assistant><think>"), ("</assistant>",)),
    Family("qwen3-vl", None, *CHATML),
    Family("nemotron-3.5", None, *CHATML),
    Family("glm-5.3", None, *GLM),
    Family("glm-5.3-flash", None, *GLM),
    Family("deepseek-v4", None, DEEPSEEK_V4, DEEPSEEK[1]),
    Family("hy3", None, HY3, (f"<{BAR}hy_eos{HY}{BAR}>",)),
    Family("gemma4", None, ("<|turn>model\n", "<tool_response|>"), ("<turn|>", "<|tool_response>")),
    Family("inkling", None, ("<|message_model|>",), ("<|content_model_end_sampling|>",)),
    Family("muse-glimmer", None, ("<|start|>assistant",), ("<|eot|>",)),
)
"""Every renderer of the package but gpt-oss, which downloads its vocabulary, and those that need a template."""

STOCK = {
    "llama-3": {"bos_token": "<|begin_of_text|>", "date_string": "26 Jul 2024"},
    "deepseek-v3": {"bos_token": f"<{BAR}begin{UNDER}of{UNDER}sentence{BAR}>"},
}
"""What a stock template wants to be told."""

AS_JSON = ("deepseek-v3",)
"""Whose stock templates take arguments as JSON text alone."""

GEMMA = "<bos> <eos> <|turn> <turn|> <|channel> <channel|> <|tool> <tool|> <|tool_call> <tool_call|> <|tool_response>"
GEMMA += " <tool_response|> <|image> <image|>"
HY_MARKS = "think tool_calls tool_call arg_key arg_value tool_responses tool_response"

TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks a word up.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
    },
}


def special_tokens() -> list[str]:
    """Every special string that a renderer of the package asks its tokenizer for."""
    folder = Path(renderers.__file__).parent
    text = "".join(path.read_text(encoding="utf-8") for path in folder.glob("*.py"))
    found = set(re.findall(r'_token_id\(\s*"([^"]+)"', text))
    found |= set(re.findall(rf'"(<[|{BAR}][^"\s|<>{BAR}]{{1,40}}[|{BAR}]>)"', text))
    named = re.findall(r'_get_special_token\(\s*f?"([^"]+)"', text)
    found |= {f"<{BAR}{name.replace('{_US}', UNDER)}{BAR}>" for name in named}
    found |= set(GEMMA.split()) | {f"{BAR}DSML{BAR}"}
    found |= {f"<{BAR}{name}{HY}{BAR}>" for name in ("hy_begin_of_sentence", "hy_eos", "hy_User", "reasoning_mode")}
    found |= {f"<{slash}{name}{HY}>" for name in HY_MARKS.split() for slash in ("", "/")} | {f"<tool_sep{HY}>"}
    return sorted(found, key=lambda token: (-len(token), token))


def byte_tokenizer() -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={byte: index for index, byte in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in special_tokens()])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)


def conversation(source: random.Random, number: int) -> Conversation:
    """Two to five user turns; a system prompt, thinking and one or two tool calls come and go."""

    def text() -> str:
        return " ".join(source.choice(("alpha", "beta", "x = 1", "né", "42.")) for _ in range(source.randint(1, 8)))

    with_tools, thinks = source.random() < 0.5, source.random() < 0.6
    messages: list[dict[str, Any]] = [{"role": "system", "content": text()}] if source.random() < 0.6 else []
    for _ in range(source.randint(2, 5)):
        messages.append({"role": "user", "content": text()})
        thought = {"reasoning_content": text()} if thinks and source.random() < 0.7 else {}
        if with_tools and source.random() < 0.5:
            calls = [
                {
                    "id": f"call_{index}",
                    "type": "function",
                    "function": {"name": "look_up", "arguments": {"word": text()}},
                }
                for index in range(source.randint(1, 2))
            ]
            messages.append({"role": "assistant", "content": text(), "tool_calls": calls, **thought})
            messages += [
                {"role": "tool", "content": text(), "tool_call_id": call["id"], "name": "look_up"} for call in calls
            ]
            messages.append({"role": "assistant", "content": text()})
        else:
            messages.append({"role": "assistant", "content": text(), **thought})
    return Conversation(row=f"row {number}", messages=tuple(messages), tools=(TOOL,) if with_tools else ())


def as_text(arguments: object) -> str:
    """JSON as a template's tojson and the renderers write it: letters beyond ASCII as they are."""
    return json.dumps(arguments, ensure_ascii=False)


def calls_once(given: Conversation) -> bool:
    """Whether there is one call at most in the whole conversation."""
    return sum(len(message.get("tool_calls", ())) for message in given.messages) <= 1


def with_json(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message with the arguments of its calls as JSON text."""
    calls = [
        {**call, "function": {**call["function"], "arguments": as_text(call["function"]["arguments"])}}
        for call in message.get("tool_calls", ())
    ]
    return {**message, "tool_calls": calls} if calls else dict(message)


def by_markup(tokenizer: Any, family: Family, tokens: Sequence[int]) -> list[bool]:
    """The mask that the markup alone tells."""
    headers = [tokenizer.encode(header, add_special_tokens=False) for header in family.headers]
    ends = {tokenizer.convert_tokens_to_ids(end) for end in family.ends}
    mask, at = [False] * len(tokens), 0
    while at < len(tokens):
        header = next((each for each in headers if list(tokens[at : at + len(each)]) == each), None)
        if header is None:
            at += 1
            continue
        at += len(header)
        if at < len(tokens) and tokens[at] in ends:  # another result of a tool: nothing was said
            continue
        while at < len(tokens):
            mask[at] = True
            at += 1
            if tokens[at - 1] in ends:
                break
    return mask


def compare(family: Family, templates: Path | None, conversations: Sequence[Conversation]) -> tuple[str, str]:
    """How many conversations have the tokens of the stock template, and the mask of the markup.

    Where some have others, how many there are with one call at most, and how many of those are the same.
    """
    tokenizer = byte_tokenizer()
    made = Renderers(tokenizer, {"name": family.renderer})
    file = None if templates is None or family.template is None else templates / f"{family.template}.jinja"
    tokenizer.chat_template = None if file is None else file.read_text()
    stops = set(made.of({}).get_stop_token_ids())
    same_tokens = same_masks = compared = single = same_single = 0
    for given in conversations:
        try:
            sample = render(given, made, learned_roles=LEARNED)
        except DataError:  # such as two tool calls for a family that takes one
            continue
        compared += 1
        ours = sample.token_ids.tolist()
        same_masks += sample.loss_mask.tolist() == by_markup(tokenizer, family, ours)
        if file is not None:
            messages = [with_json(each) if family.renderer in AS_JSON else dict(each) for each in given.messages]
            told = STOCK.get(family.renderer, {})
            stock = tokenizer.apply_chat_template(messages, tools=list(given.tools) or None, return_dict=False, **told)
            same = ours == stock or (ours[:-1] == stock and ours[-1] in stops)
            same_tokens += same
            single += calls_once(given)
            same_single += same and calls_once(given)
    masks = f"{same_masks}/{compared}"
    if file is None:
        return "no template", masks
    apart = "" if same_tokens == compared else f" ({same_single}/{single} with one call at most)"
    return f"{same_tokens}/{compared}{apart}", masks


def losses(conversations: Sequence[Conversation]) -> None:
    """Packed rows, one conversation at a time, and transformers' own loss, of the same conversations."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from meshrl.algorithms.losses import cross_entropy_loss
    from meshrl.algorithms.objective import Objective
    from meshrl.algorithms.packing import pack_samples
    from meshrl.training.build import build_learner
    from meshrl.training.config import OptimConfig, SchedulerConfig
    from meshrl.training.model_config import TrainerModelConfig
    from meshrl.training.parallel.rank_group import RankGroup

    tokenizer = byte_tokenizer()
    made = Renderers(tokenizer, {"name": "qwen3"})
    samples = [render(each, made, learned_roles=LEARNED) for each in conversations[:32]]
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        config = Qwen3Config(
            vocab_size=len(tokenizer), hidden_size=64, intermediate_size=192, num_hidden_layers=3,
            num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        )  # fmt: skip
        model = Qwen3ForCausalLM(config)
        model.save_pretrained(folder)
        learner = build_learner(
            TrainerModelConfig(name=folder, device="cpu", ac=None, compile=None),
            objective=Objective(loss=cross_entropy_loss, name="cross_entropy"),
            optim=OptimConfig(),
            scheduler=SchedulerConfig(),
            max_steps=None,
            parallel=RankGroup(),
        )
        packed = learner.evaluate(pack_samples(samples, seq_len=8192).micro_batches).logprobs
        alone = [learner.evaluate(pack_samples([each], seq_len=8192).micro_batches).logprobs for each in samples]
    total = sum(len(each) for each in alone)
    theirs = 0.0
    with torch.no_grad():
        for each in samples:
            tokens = torch.from_numpy(each.token_ids.astype("int64"))[None]
            labels = tokens.masked_fill(~torch.from_numpy(each.loss_mask)[None], -100)
            learned = int(each.loss_mask[1:].sum())
            theirs += float(model(input_ids=tokens, labels=labels).loss) * learned
    ours_packed = -float(packed.mean(dtype="float64"))
    ours_alone = -sum(float(each.sum(dtype="float64")) for each in alone) / total
    print(f"\nloss of {len(samples)} conversations, {total} learned tokens")
    print(f"packed {ours_packed:.8f}, one at a time {ours_alone:.8f}, transformers {theirs / total:.8f}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare tokens, masks and losses of sft with other implementations.")
    parser.add_argument("--templates", type=Path, help="folder of stock chat templates, such as trl/chat_templates")
    parser.add_argument("--conversations", type=int, default=200, help="how many (default 200)")
    parser.add_argument("--only", nargs="+", help="renderers to compare (default: all)")
    read = parser.parse_args()
    source = random.Random(0)
    conversations = [conversation(source, number) for number in range(read.conversations)]
    print("| renderer | tokens of the stock template | mask of the markup |\n|---|---|---|")
    for family in FAMILIES if read.only is None else [each for each in FAMILIES if each.renderer in read.only]:
        tokens, masks = compare(family, read.templates, conversations)
        print(f"| {family.renderer} | {tokens} | {masks} |", flush=True)
    losses(conversations)


if __name__ == "__main__":
    main()
