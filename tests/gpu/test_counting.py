"""`rl` counts GPUs without torch, as torch counts them."""

import os
import subprocess
import sys

import pytest

from meshrl.launch.gpus import visible

pytestmark = pytest.mark.gpu


def test_visible_gpus_are_those_that_torch_counts() -> None:
    everything = {key: value for key, value in os.environ.items() if key != "CUDA_VISIBLE_DEVICES"}
    count = "import torch; print(torch.cuda.device_count())"  # anew: this process has counted those that it was given
    said = subprocess.run([sys.executable, "-c", count], env=everything, check=True, capture_output=True, timeout=120)
    assert visible({}) == tuple(map(str, range(int(said.stdout))))
