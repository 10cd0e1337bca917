"""Our parts of vLLM against vLLM's own, in its interpreter and without an engine."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from engine_mesh import SOURCES
from tiny_qwen3 import save_tiny_qwen3

PROGRAM = Path(__file__).with_name("inside_vllm.py")
SUPPORT = Path(__file__).parents[2] / "support"
POSITIONS = 512  # fewer than max_model_len has by default: vLLM refuses a longer one


@pytest.fixture(scope="module")
def found(vllm: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    model = save_tiny_qwen3(tmp_path_factory.mktemp("scheduler") / "model", max_position_embeddings=POSITIONS)
    ran = subprocess.run(
        [vllm, PROGRAM, model],
        env={**os.environ, "PYTHONPATH": os.pathsep.join((*SOURCES, str(SUPPORT)))},
        capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-2000:]
    return json.loads(ran.stdout.splitlines()[-1])


def test_requests_and_blocks_are_chosen_as_vllm_chooses_them(found: Any) -> None:
    assert found["scheduler"]["difference"] == ""
    assert found["scheduler"]["preempted"] > 20, "blocks were short"


def test_alternatives_of_joined_pieces_of_a_stream_are_those_of_each_alone(found: Any) -> None:
    alone, joined = found["stream"]
    assert alone[1] == [[7, 4], [6, 5], [6, 5]]
    assert joined == alone


def test_engines_of_versions_and_of_adapters_have_a_worker_on_a_gpu(found: Any) -> None:
    assert found["workers"] == 2 * ["WeightsExtension.meshrl_open"]


def test_processes_out_of_the_fork_server_collect_nothing_that_it_has_imported(found: Any) -> None:
    before, after = found["left"]
    assert after < 10_000 < before


def test_heads_that_vllm_has_no_kernel_for_on_a_cpu_are_refused_at_the_start(found: Any) -> None:
    assert "has attention heads of size 8, and vLLM takes 32, 64, " in found["refused"]


def test_kernels_of_the_usual_sampling_alone_are_compiled_before_an_engine_serves(found: Any) -> None:
    usual, every = found["sampling"]
    assert usual == [0.0, 0, 0]
    assert min(every) > 0, "the rest of the process has vLLM's own"


def test_cuda_graphs_are_measured_at_the_first_start_of_a_configuration(found: Any) -> None:
    assert found["graphs"] == [[100, 100], [101, 101], [102, 103]], "workers that capture together measure each time"
