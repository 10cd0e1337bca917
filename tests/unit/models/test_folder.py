"""The table of docs/training.md on what a model's folder may hold: each of its lines, tried before the first step."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from loguru import logger
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

import checkpoint_kit as kit
from chatml_tokenizer import chatml_tokenizer
from meshrl.models.load import ModelError, eos_token_ids, load_model, load_tokenizer
from meshrl.models.state import gather_state
from meshrl.training.checkpoints.checkpointer import Checkpointer, CheckpointError
from meshrl.training.model_config import TrainerModelConfig
from tiny_families import tiny_model

PAGE = Path(__file__).parents[3] / "docs" / "training.md"
TOKEN_IDS = torch.arange(2, 20)[None]
INVALID = b'{"eos_token_id": [7, 3], "temperature": 0.6,\n "top_p": 0.9, "ours": 1}'  # save_pretrained would refuse it

Tensors = dict[str, torch.Tensor]
Check = Callable[[Path], None]
Change = Callable[[Path], object]


@pytest.fixture
def base(tmp_path: Path) -> Path:
    kit.save_model(tmp_path / "base", tie_word_embeddings=False)
    return tmp_path / "base"


def model_config(folder: Path, **keys: Any) -> TrainerModelConfig:
    return TrainerModelConfig(name=str(folder), device="cpu", **keys)


def load(folder: Path, **keys: Any) -> Any:
    return load_model(model_config(folder, **keys))


def write(folder: Path, *, tokenizer: PreTrainedTokenizerBase | None = None, **keys: Any) -> Path:
    """Trains the folder's model for no step and writes it."""
    trained = kit.build(str(folder), keys)
    checkpointer = Checkpointer(*trained, folder.parent, tokenizer=tokenizer, base=model_config(folder, **keys))
    return checkpointer.save(weights_only=True)


# --- what is done to a folder --------------------------------------------------------------------------


def rewrite(change: Callable[[Tensors], Tensors]) -> Change:
    def run(folder: Path) -> None:
        tensors = change(load_file(folder / "model.safetensors"))
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    return run


def without(*names: str) -> Change:
    return rewrite(lambda found: {name: found[name] for name in found if not name.startswith(names)})


def configure(**keys: Any) -> Change:
    def run(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **keys}))

    return run


def both(*changes: Change) -> Change:
    return lambda folder: [change(folder) for change in changes]


def put(name: str, content: str | bytes) -> Change:
    return lambda folder: (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)


def split(folder: Path) -> None:
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(folder, max_shard_size="20KB")
    (folder / "model.safetensors").unlink()


def lose(pattern: str) -> Change:
    return lambda folder: next(iter(sorted(folder.glob(pattern)))).unlink()


def as_torch(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


# --- and what comes of it ------------------------------------------------------------------------------


def refused(change: Change, message: str) -> Check:
    """By the trainers as by the embedded engine."""

    def check(folder: Path) -> None:
        change(folder)
        with pytest.raises(ModelError, match=message):
            load(folder)
        with pytest.raises(ModelError, match=message):
            kit.build(str(folder))

    return check


def used(change: Change, **keys: Any) -> Check:
    """As plain transformers uses it, and written as a folder that it reads to the same bits."""

    def check(folder: Path) -> None:
        change(folder)
        trusted = {"trust_remote_code": True} if keys else {}
        plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **trusted).eval()
        assert torch.equal(load(folder, **keys)(TOKEN_IDS).logits, plain(TOKEN_IDS).logits)
        written = AutoModelForCausalLM.from_pretrained(write(folder, **keys), **trusted)
        assert torch.equal(written(TOKEN_IDS).logits, plain(TOKEN_IDS).logits)

    return check


def logged(check: Check, words: str) -> Check:
    def run(folder: Path) -> None:
        lines: list[str] = []
        sink = logger.add(lines.append, level="WARNING")
        check(folder)
        logger.remove(sink)
        assert any(words in line for line in lines)

    return run


def config_keys(folder: Path) -> None:
    used(configure(made_by="us", max_position_embeddings=77))(folder)
    written = json.loads((folder.parent / "weights/step_0/config.json").read_text())
    assert (written["made_by"], written["max_position_embeddings"]) == ("us", 77)


def dtypes(folder: Path) -> None:
    configure(dtype="bfloat16")(folder)
    rewrite(lambda found: {name: tensor.bfloat16() for name, tensor in found.items()})(folder)
    trained = kit.build(str(folder))
    assert {tensor.dtype for tensor in gather_state(trained.model).values()} == {torch.float32}
    checkpointer = Checkpointer(*trained, folder.parent, tokenizer=None, snapshot_dtype=torch.bfloat16)
    written = checkpointer.save(weights_only=True)
    kit.assert_same(load_file(written / "model.safetensors"), load_file(folder / "model.safetensors"))
    assert json.loads((written / "config.json").read_text())["dtype"] == "bfloat16"


def generation_config(folder: Path) -> None:
    put("generation_config.json", INVALID)(folder)
    assert eos_token_ids(load(folder)) == (7, 3)
    written = write(folder)
    assert (written / "generation_config.json").read_bytes() == INVALID
    assert eos_token_ids(load(written)) == (7, 3)


def no_generation_config(folder: Path) -> None:
    lose("generation_config.json")(folder)
    assert not (write(folder) / "generation_config.json").exists()


def tokenizer_files(folder: Path) -> None:
    tokenizer = chatml_tokenizer("{{ messages[0]['content'] }}")
    tokenizer.save_pretrained(folder)
    put("additional_chat_templates/tools.jinja", "")  # of several templates, all are kept
    (folder / "additional_chat_templates").mkdir()
    put("additional_chat_templates/tools.jinja", "tools: {{ tools }}")(folder)
    written = write(folder, tokenizer=load_tokenizer(model_config(folder)))
    kept, read = AutoTokenizer.from_pretrained(folder), AutoTokenizer.from_pretrained(written)
    assert (
        kept.chat_template == read.chat_template == {"default": tokenizer.chat_template, "tools": "tools: {{ tools }}"}
    )
    assert read("a <think> b<|im_end|>").input_ids == kept("a <think> b<|im_end|>").input_ids
    assert (read.eos_token, read.pad_token, len(read)) == (kept.eos_token, kept.pad_token, len(kept))


def no_tokenizer(folder: Path) -> None:
    with pytest.raises(ModelError, match=r"holds no tokenizer; save one there \(tokenizer\.json or"):
        load_tokenizer(model_config(folder))


def without_a_router_bias(folder: Path) -> None:
    tiny_model("glm4_moe", None).save_pretrained(folder)
    change = rewrite(lambda found: {name: found[name] for name in found if "correction_bias" not in name})
    refused(change, r"has no weights for model\.layers\.1\.mlp\.gate\.e_score_correction_bias \(1 of")(folder)


def text_half(folder: Path) -> None:
    tiny_model("qwen3_5_text", None).save_pretrained(folder)
    rewrite(
        lambda found: {
            **{name.replace("model.", "model.language_model.", 1): tensor for name, tensor in found.items()},
            "model.visual.patch_embed.weight": torch.zeros(3),
        }
    )(folder)
    used(lambda folder: None)(folder)
    names = load_file(folder.parent / "weights/step_0/model.safetensors").keys()
    assert all(name.startswith(("model.language_model.", "lm_head.")) for name in names)


def experts(folder: Path) -> None:
    tiny_model("mixtral", None).save_pretrained(folder)
    stored = load_file(folder / "model.safetensors")
    assert any(".experts.0.w1." in name for name in stored)
    used(split)(folder)  # those of a layer are in several files
    kit.assert_same(load_file(folder.parent / "weights/step_0/model.safetensors"), stored)


def names_of_the_base(folder: Path) -> None:
    tiny_model("gpt2", None).save_pretrained(folder)
    used(rewrite(lambda found: {name.removeprefix("transformer."): tensor for name, tensor in found.items()}))(folder)


def a_missing_expert(folder: Path) -> None:
    tiny_model("mixtral", None).save_pretrained(folder)
    change = without("model.layers.1.block_sparse_moe.experts.2.w2.")
    message = (
        r"experts\.down_proj is of shape \(3, .* \(made of 3 tensors, first model\.layers\.1\.block_sparse_moe\.exp"
    )
    refused(change, message)(folder)


CODE = """
from transformers import Qwen3Config, Qwen3ForCausalLM
class OwnConfig(Qwen3Config):
    model_type = "own_kind"
class OwnModel(Qwen3ForCausalLM):
    config_class = OwnConfig
"""
OWN_CODE = both(
    put("own.py", CODE),
    configure(model_type="own_kind", auto_map={"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}),
)


def trusted_code(folder: Path) -> None:
    used(OWN_CODE, trust_remote_code=True)(folder)
    assert "class OwnModel" in (folder.parent / "weights/step_0/own.py").read_text()


def other_files(folder: Path) -> None:
    put("README.md", "ours")(folder)
    assert not (write(folder) / "README.md").exists()


CHECKS: dict[str, Check] = {
    "`config.json`": config_keys,
    "`dtype`, `torch_dtype`": dtypes,
    "`generation_config.json`": generation_config,
    "no `generation_config.json`": no_generation_config,
    "`generation_config.json` that is no JSON": refused(
        put("generation_config.json", "{"), r"generation_config\.json cannot be read"
    ),
    "tokenizer files, chat templates": tokenizer_files,
    "no tokenizer": no_tokenizer,
    "`model.safetensors`": used(lambda folder: None),
    "`model.safetensors.index.json`": used(split),
    "a file of the index is missing": refused(
        both(split, lose("model-00002-*")), r"index\.json lists model-00002-of-0000\d\.safetensors, which is not there"
    ),
    "`pytorch_model.bin`": used(as_torch),
    "weights of other programs beside them": used(put("consolidated.safetensors", b"of another program")),
    "weights of other programs alone": refused(
        lambda folder: (folder / "model.safetensors").rename(folder / "model.gguf"),
        r"holds no weights: model\.safetensors or .* is needed, and model\.gguf is not read",
    ),
    "a torn file": refused(put("model.safetensors", b"\x10" * 100), r"model\.safetensors cannot be read"),
    "experts one by one": experts,
    "a missing expert": a_missing_expert,
    "names without the prefix of the base model": names_of_the_base,
    "the text half of an image model": text_half,
    "tensors that the model does not have": logged(
        used(rewrite(lambda found: {**found, "visual.patch.weight": torch.zeros(3)})),
        "1 tensors of the files are not used, first visual.patch.weight",
    ),
    "the same tensor under two names": refused(
        rewrite(lambda found: {**found, "norm.weight": torch.zeros(32)}),
        r"the files hold both model\.norm\.weight and norm\.weight, and each would be model\.norm\.weight",
    ),
    "missing tensors": refused(
        without("lm_head", "model.layers.1."),
        r"has no weights for lm_head\.weight, model\.layers\.1\..* \(12 of 25 tensors of Qwen3ForCausalLM\)$",
    ),
    "a missing router bias": without_a_router_bias,
    "names under a foreign prefix": refused(
        rewrite(lambda found: {f"policy.{name}": tensor for name, tensor in found.items()}),
        r"no weights for .*\(25 of 25 .*; its files hold policy\.lm_head\.weight, .*not have$",
    ),
    "a tensor of another shape": refused(
        rewrite(lambda found: {**found, "lm_head.weight": torch.zeros(49, 32)}),
        r"lm_head\.weight is of shape \(49, 32\) in the files and of \(48, 32\) by config\.json",
    ),
    "`tie_word_embeddings` and one of the two": used(
        both(configure(tie_word_embeddings=True), without("model.embed_tokens."))
    ),
    "`tie_word_embeddings` and two that are equal": used(
        both(
            configure(tie_word_embeddings=True),
            rewrite(lambda found: {**found, "lm_head.weight": found["model.embed_tokens.weight"].clone()}),
        )
    ),
    "`tie_word_embeddings` and two that differ": refused(
        configure(tie_word_embeddings=True),
        r"config\.json ties lm_head\.weight to model\.embed_tokens\.weight .*set tie_word_embeddings to false",
    ),
    "`quantization_config`": refused(
        configure(quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]}),
        r"weights that are quantised \(fp8\), .* dequantize=True",
    ),
    "`adapter_config.json`": refused(
        both(put("adapter_config.json", '{"base_model_name_or_path": "other"}'), lose("config.json")),
        r"holds adapter_config\.json, so it is an adapter beside another model; merge the two",
    ),
    "code of its own (`auto_map`)": refused(OWN_CODE, r"(?s)cannot load AutoConfig .*trust_remote_code"),
    "code of its own, `model.trust_remote_code`": trusted_code,
    "another file": other_files,
}


def lines_of_table() -> list[str]:
    text = PAGE.read_text(encoding="utf-8").partition("| in the folder | outcome |\n|---|---|\n")[2]
    return [line.split("|")[1].strip() for line in text.partition("\n\n")[0].splitlines()]


def test_the_page_has_a_line_for_each_check() -> None:
    assert lines_of_table() == list(CHECKS)


@pytest.mark.parametrize("line", CHECKS)
def test_a_folder_has_the_outcome_of_the_table(line: str, base: Path) -> None:
    CHECKS[line](base)


@pytest.mark.parametrize("method", ["mxfp4", "gptq", "awq"])
def test_every_quantisation_is_refused_by_its_name(method: str, base: Path) -> None:
    refused(configure(quantization_config={"quant_method": method}), rf"that are quantised \({method}\)")(base)


def test_what_cannot_be_written_is_known_before_the_first_step(base: Path) -> None:
    trained = kit.build(str(base))
    trained.model.config.temperature = 0.6  # which save_pretrained refuses in a model's configuration
    with pytest.raises(CheckpointError, match=r"snapshots of model\.name .* could not be written: .*temperature"):
        Checkpointer(*trained, base.parent, tokenizer=None)
    assert not (base.parent / "weights").exists()
