"""Which GPUs the programs of a run get."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from meshrl.core.config import ConfigError, load_config
from meshrl.launch.config import RLConfig
from meshrl.launch.gpus import Placement, place, visible

EIGHT = tuple("01234567")


def load(*argv: str) -> RLConfig:
    arguments = ["--orchestrator.train.env.0.id", "x", "--inference.max-model-len", "2048", *argv]
    return load_config(RLConfig, arguments, prog="rl", environ={})


def refusal(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    with pytest.raises(SystemExit):
        load(*argv)
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "engines", "trainer"),
    [
        ([], ["0"], "1"),
        (["--inference-gpu-ids", "0,1,2", "--trainer-gpu-ids", "3"], ["0", "1", "2"], "3"),
        (["--inference-gpu-ids", "[6, 7]", "--inference.tensor-parallel-size", "2"], ["67"], "0"),
        (["--deployment.num-infer-gpus", "6", "--deployment.num-train-gpus", "2"], list("012345"), "67"),
        (["--deployment.num-infer-gpus", "4", "--inference.tensor-parallel-size", "2"], ["01", "23"], "4"),
        (["--deployment.num-infer-gpus", "4", "--inference.data-parallel-size", "4"], ["0123"], "4"),
        (["--deployment.num-infer-gpus", "4", "--num-engines", "4", "--trainer-gpu-ids", "0"], list("1234"), "0"),
        (["--num-engines", "2", "--inference.tensor-parallel-size", "2"], ["01", "23"], "4"),
        (["--num-engines", "2", "--inference-gpu-ids", "5"], ["5", "5"], "0"),
        (["--no-inference", "--orchestrator.client.base-url", "http://h:1", "--deployment.num-train-gpus", "8"], [],
         "01234567"),
    ],
)  # fmt: skip
def test_lists_and_counts_become_gpus_engines_first(argv: list[str], engines: list[str], trainer: str) -> None:
    placed = place(load(*argv).gpu_demand, EIGHT)
    assert placed == Placement(engines=tuple(tuple(gpus) for gpus in engines), trainer=tuple(trainer))


def test_ids_count_the_gpus_that_were_left_visible() -> None:
    placed = place(load("--inference-gpu-ids", "0,1", "--trainer-gpu-ids", "2").gpu_demand, ("4", "GPU-a", "7"))
    assert placed == Placement(engines=(("4",), ("GPU-a",)), trainer=("7",))


def test_only_gpu_is_shared() -> None:
    placed = place(load().gpu_demand, ("5",))
    assert placed == Placement(engines=(("5",),), trainer=("5",))
    assert placed.shared(0)
    listed = place(load("--inference-gpu-ids", "0,1", "--trainer-gpu-ids", "1").gpu_demand, EIGHT)
    assert [listed.shared(engine) for engine in range(2)] == [False, True]


def test_without_gpus_lists_are_taken_as_they_are_and_nothing_else_is_placed() -> None:
    assert place(load("--deployment.num-train-gpus", "2").gpu_demand, ()) == Placement(engines=(None,))
    assert place(load("--inference-gpu-ids", "3", "--trainer-gpu-ids", "4,5").gpu_demand, ()) == Placement(
        engines=(("3",),), trainer=("4", "5")
    )


def test_a_trainer_that_runs_already_takes_none_of_the_gpus_here() -> None:
    running = ("--orchestrator.services.trainer", "h:1", "--orchestrator.services.weights", "h:2")
    placement = place(
        load(*running, "--deployment.num-infer-gpus", "2", "--deployment.num-train-gpus", "8").gpu_demand, ("0", "1")
    )
    assert (placement.engines, placement.trainer) == ((("0",), ("1",)), ())


@pytest.mark.parametrize(
    ("argv", "gpus", "message"),
    [
        (
            ["--deployment.num-infer-gpus", "6", "--deployment.num-train-gpus", "3"],
            EIGHT,
            r"inference takes 6 GPU\(s\) and training 3, but 8 are visible here; lower deployment.num_infer_gpus",
        ),
        (["--trainer-gpu-ids", "0,1"], ("0", "1"), r"inference takes 1 GPU\(s\) and training 2, but 2 are visible"),
        (["--inference.tensor-parallel-size", "2"], ("0",), r"inference takes 2 GPU\(s\) and training 1, but 1 are"),
        (["--trainer-gpu-ids", "4"], ("4", "5"), r"trainer_gpu_ids lists 4, but the GPUs visible here are 0 to 1; ids"),
        (["--deployment.num-infer-gpus", "1"], (), r"deployment.num_infer_gpus is 1 but no GPU is visible here"),
    ],
)
def test_gpus_that_are_not_there_are_refused(argv: list[str], gpus: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        place(load(*argv).gpu_demand, gpus)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ["--inference-gpu-ids", "0,1,2", "--inference.tensor-parallel-size", "2"],
            "inference_gpu_ids gives inference 3 GPU(s), but 1 engine(s) of 2 take 2; give 2, or change num_engines",
        ),
        (
            ["--deployment.num-infer-gpus", "4", "--num-engines", "2"],
            "deployment.num_infer_gpus gives inference 4 GPU(s), but 2 engine(s) of 1 take 2; give 2, or change",
        ),
        (
            ["--inference-gpu-ids", "0,1", "--deployment.num-infer-gpus", "1"],
            "deployment.num_infer_gpus is 1 but inference_gpu_ids lists 2 GPU(s); leave deployment.num_infer_gpus out",
        ),
        (
            ["--no-inference", "--deployment.num-infer-gpus", "1"],
            "deployment.num_infer_gpus is 1 but inference is off; add [inference] or leave it out",
        ),
    ],
)
def test_counts_that_contradict_each_other_are_refused(
    capsys: pytest.CaptureFixture[str], argv: list[str], message: str
) -> None:
    assert message in refusal(capsys, *argv)


@pytest.mark.parametrize(
    ("listed", "expected"), [("4,5", ("4", "5")), ("", ()), ("-1", ()), (" GPU-a , 1", ("GPU-a", "1"))]
)
def test_visible_gpus_are_those_that_the_caller_left(listed: str, expected: tuple[str, ...]) -> None:
    assert visible({"CUDA_VISIBLE_DEVICES": listed}) == expected


DRIVER = """
int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 3; return 0; }
"""
COUNTING = """
import sys
from pathlib import Path
from meshrl.core import torch_environment

torch_environment.GPU_DRIVERS = (Path(sys.executable),)
from meshrl.launch.gpus import visible

print(*visible({}), "torch" in sys.modules)
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_gpus_are_counted_without_the_import_of_torch(tmp_path: Path) -> None:
    (tmp_path / "driver.c").write_text(DRIVER)
    library = tmp_path / "libnvidia-ml.so.1"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, tmp_path / "driver.c"], check=True, timeout=60)
    environ = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}
    command = [sys.executable, "-c", COUNTING]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == ["0", "1", "2", "False"]
