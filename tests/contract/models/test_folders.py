"""A folder in is a folder out: twenty families and every one with a router bias, and one of each kind on two ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import family_folders
import forked_ranks
from meshrl.models.families import attention_implementation
from meshrl.models.state import ROUTER_BIASES
from tiny_families import FAMILIES, tiny_config, tiny_model

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # of transformers, about attention that it does not set
    pytest.mark.timeout(1300),  # two programs that train every family, on a machine that may be busy
]

BIASED = (
    "afmoe", "axk1", "axk2", "deepseek_v3", "deepseek_v32", "dots1", "ernie4_5_moe", "exaone_moe", "glm4_moe",
    "glm4_moe_lite", "glm_moe_dsa", "hy_v3", "hy_v4", "inkling_text", "kimi_linear", "laguna", "lfm2_moe",
    "longcat_flash", "mimo_v2_flash", "minimax_m2", "minimax_m3_vl_text", "nemotron_h", "solar_open", "zaya",
)  # fmt: skip
"""Every family of transformers whose routers have a bias that no gradient trains.

Of these zaya cannot be shown against plain transformers, whose 5.19 sets its biases anew after it has read them.
"""
SHOWN = (
    "llama", "qwen3", "qwen2", "mistral", "phi3", "gemma2", "gemma3_text", "olmo2", "gpt2", "opt", "bloom", "falcon",
    "qwen3_moe", "mixtral", "olmoe", "gpt_oss", "granitemoe", "qwen3_5_text", "qwen3_next", "mamba", "deepseek_v3",
    "glm4_moe", "minimax_m2", "dots1", "lfm2_moe",
)  # fmt: skip
DIVIDED = (
    "qwen3", "phi3", "gemma3_text", "gpt2", "falcon", "qwen3_moe", "granitemoe", "gpt_oss", "qwen3_next", "mamba",
    "deepseek_v3", "lfm2_moe", "minimax_m2",
)  # fmt: skip
"""Those of SHOWN on two ranks: one of each kind of layers."""
ALL = [family for family in dict.fromkeys((*SHOWN, *BIASED)) if family in FAMILIES]  # of the transformers installed
ATOL_NATS = 1e-5
GENERATION = b'{"eos_token_id": [1, 2], "temperature": 0.6, "top_p": 0.9}'  # which save_pretrained would refuse
LAYOUTS = {"one process": (1, "cpu", ALL), "two ranks": (2, "cpu", DIVIDED)}
if torch.cuda.is_available():
    LAYOUTS["one GPU"] = (1, "cuda", ALL)
CELLS = [(family, layout) for layout, (_, _, families) in LAYOUTS.items() for family in families]


def has_generation_config(family: str) -> bool:
    return ALL.index(family) % 2 == 0


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bases")
    for family in ALL:
        tiny_model(family, None).save_pretrained(folder / family)
        (folder / family / "generation_config.json").unlink(missing_ok=True)
        if has_generation_config(family):
            (folder / family / "generation_config.json").write_bytes(GENERATION)
    return folder


@pytest.fixture(scope="module")
def written(bases: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The results of each layout, by its name."""
    results = {name: tmp_path_factory.mktemp(name.replace(" ", "_")) for name in LAYOUTS}
    for name, (ranks, device, families) in LAYOUTS.items():
        arguments = [str(bases), str(results[name]), device, *families]
        if ranks == 1:
            family_folders.write(*arguments)
            continue
        done = subprocess.run(
            [sys.executable, forked_ranks.__file__, str(ranks), family_folders.__file__, *arguments],
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True, text=True, timeout=600,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
    return results


def result(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "result.json").read_text())
    assert "failed" not in found, found["failed"]
    return found


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = load_file(folder / "model.safetensors")
    return found


@pytest.mark.parametrize(("family", "layout"), CELLS)
def test_no_step_writes_what_was_read(family: str, layout: str, bases: Path, written: dict[str, Path]) -> None:
    folder = written[layout] / family
    if "refused" in result(folder):
        assert family not in SHOWN
        return
    before, after = tensors(bases / family), tensors(folder / "weights/step_0")
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert after[name].dtype == tensor.dtype, name
        assert torch.equal(after[name], tensor), name
    kept = folder / "weights/step_0/generation_config.json"
    assert kept.is_file() == has_generation_config(family)
    if kept.is_file():
        assert kept.read_bytes() == GENERATION


@pytest.mark.parametrize(("family", "layout"), [cell for cell in CELLS if cell[0] in SHOWN])
def test_a_family_is_the_same_before_and_after(family: str, layout: str, bases: Path, written: dict[str, Path]) -> None:
    folder = written[layout] / family
    token_ids = torch.arange(2, 30)[None]
    attention = attention_implementation(tiny_config(family))
    with torch.no_grad():
        first, second = (
            AutoModelForCausalLM.from_pretrained(path, attn_implementation=attention)(input_ids=token_ids).logits
            for path in (bases / family, folder / "weights/step_0")
        )
    assert torch.equal(first, second)
    found = result(folder)
    assert found["apart"] <= ATOL_NATS
    assert found["loss"] == pytest.approx(result(written["one process"] / family)["loss"], rel=1e-4)
    before, after = (tensors(folder / f"weights/step_{step}") for step in (0, 1))
    assert before.keys() == after.keys()
    assert any(not torch.equal(before[name], after[name]) for name in before), "a step has trained nothing"


@pytest.mark.parametrize(("family", "layout"), [cell for cell in CELLS if cell[0] in BIASED])
def test_router_biases_reach_the_published_version_as_they_are(
    family: str, layout: str, bases: Path, written: dict[str, Path]
) -> None:
    folder = written[layout] / family
    if "refused" in result(folder):
        return
    stored = tiny_model(family, None)
    expected = {
        name: tensor for name, tensor in stored.state_dict().items() if name.rpartition(".")[2] in ROUTER_BIASES
    }
    assert expected
    published = load_file(folder / "published.safetensors")
    for name, bias in expected.items():
        assert bias.abs().max() > 0.01, "a bias of zeros would pass for one that was read"
        assert published[name].dtype == torch.float32, name
        assert torch.equal(published[name], bias), name
    assert torch.bfloat16 in {tensor.dtype for tensor in published.values()}
