"""Processes out of a fork server, as those of vLLM on a GPU; needs no vLLM."""

import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from meshrl.core import torch_environment
from meshrl.core.torch_environment import may_have_gpu
from meshrl.inference.config import InferenceConfig
from meshrl.inference.vllm.processes import kept_variable

PROGRAM = """
import json, os, sys
from meshrl.inference.vllm import processes

def tell(sender, nested):
    facts = {"parent": os.getppid(), "late": os.environ.get("LATE"), "gone": "GONE" in os.environ,
             "preloaded": "heavy" in sys.modules, "torch": "torch" in sys.modules}
    if nested:
        receiver, inner = processes.ForkServer().Pipe(duplex=False)
        process = processes.ForkServer().Process(target=tell, args=(inner, False))
        process.start()
        facts["nested"] = receiver.recv()
        process.join(30)
    sender.send(facts)

if __name__ == "__main__":
    before = processes.imports_ahead()
    processes.PRELOADED = "heavy"
    os.environ["GONE"] = "1"
    processes.import_ahead(torch_threads=3)
    os.environ["LATE"] = os.environ["OMP_NUM_THREADS"]  # set after the fork server began
    del os.environ["GONE"]
    receiver, sender = processes.ForkServer().Pipe(duplex=False)
    process = processes.ForkServer().Process(target=tell, args=(sender, True))
    process.start()
    facts = receiver.recv()
    process.join(30)
    print(json.dumps({**facts, "before": before, "ahead": processes.imports_ahead(), "code": process.exitcode,
                      "own": "torch" in sys.modules}))
"""


def test_processes_have_the_starters_variables_and_come_out_of_one_server_that_has_imported_all(tmp_path: Path) -> None:
    (tmp_path / "heavy.py").touch()
    (tmp_path / "program.py").write_text(PROGRAM)
    ran = subprocess.run(
        [sys.executable, "program.py"], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True
    )
    facts = json.loads(ran.stdout)
    nested = facts.pop("nested")
    assert {name: facts[name] for name in ("before", "ahead", "code", "own")} == {
        "before": False, "ahead": True, "code": 0, "own": False,
    }  # fmt: skip
    for process in (facts, nested):
        assert (process["late"], process["gone"], process["preloaded"]) == ("3", False, True)
    assert nested["parent"] == facts["parent"]


@pytest.mark.parametrize(
    ("given", "ahead"),
    [
        ({}, True),
        ({"engine": "vllm", "vllm": {"tensor_parallel_size": 2}}, True),
        ({"engine": "embedded"}, False),
        ({"model": {"device": "cpu"}}, False),
        ({"engine": "vllm", "vllm": {"numa_bind": True}}, False),
    ],
)
def test_vllm_is_imported_ahead_where_it_may_run_on_a_gpu(given: dict[str, object], ahead: bool) -> None:
    assert InferenceConfig.model_validate(given).imports_vllm_ahead is ahead


def test_gpu_is_expected_with_a_driver_that_no_variable_hides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = tmp_path / "nvidiactl"
    monkeypatch.setattr(torch_environment, "GPU_DRIVERS", (driver,))
    assert not may_have_gpu({})
    driver.touch()
    assert may_have_gpu({})
    assert may_have_gpu({"CUDA_VISIBLE_DEVICES": "4,5"})
    assert not may_have_gpu({"CUDA_VISIBLE_DEVICES": ""})


@pytest.mark.parametrize("before", ["/cache/triton", None])
def test_variable_is_what_it_was(before: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    if before is not None:
        monkeypatch.setenv("TRITON_CACHE_DIR", before)
    with suppress(RuntimeError), kept_variable("TRITON_CACHE_DIR"):
        os.environ["TRITON_CACHE_DIR"] = "/cache/vllm/triton"
        raise RuntimeError
    assert os.environ.get("TRITON_CACHE_DIR") == before
