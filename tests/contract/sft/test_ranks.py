"""`sft` as two processes that it starts itself: the same training as one, and an orderly end."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from meshrl.core.config import dump_toml
from meshrl.sft.config import DataConfig, SFTConfig, SFTDeploymentConfig
from meshrl.sft.program import train
from meshrl.training.parallel.rank_group import RankGroup
from sft_kit import configure, records


def two_ranks(folder: Path, output_dir: Path, **changes: Any) -> SFTConfig:
    return configure(folder, output_dir, deployment=SFTDeploymentConfig(num_train_gpus=2), **changes)


@contextmanager
def started(config: SFTConfig, *, by: Sequence[str] = (), **environ: str) -> Iterator[subprocess.Popen[bytes]]:
    """`sft`, which is killed at the end of the block if it still runs; its ranks end with it."""
    config.output_dir.mkdir(exist_ok=True)
    dump_toml(config, config.output_dir / "sft.toml")
    with (config.output_dir / "console.txt").open("wb") as out:
        process = subprocess.Popen(
            [*by, sys.executable, "-m", "meshrl.sft.main", "@", str(config.output_dir / "sft.toml")],
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1", **environ},
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def wait_for_step(process: subprocess.Popen[bytes], output_dir: Path, step: int) -> None:
    end = time.monotonic() + 120
    while len(records(output_dir)) < step:
        assert process.poll() is None, (output_dir / "console.txt").read_text()
        assert time.monotonic() < end
        time.sleep(0.05)


def test_two_processes_which_nohup_protects_train_as_one(folder: Path, tmp_path: Path) -> None:
    """The two read with a process of its own, below a temporary folder too deep for Unix sockets."""
    one, two, deep = tmp_path / "one", tmp_path / "two", tmp_path / ("scratch-" * 12)
    deep.mkdir()
    data = DataConfig(name=str(folder / "train.jsonl"), batch_size=2, seq_len=256, num_workers=1)
    with (
        tempfile.TemporaryDirectory(dir="/tmp") as short,
        started(two_ranks(folder, two, data=data), by=["nohup"], TMPDIR=str(deep), XDG_RUNTIME_DIR=short) as process,
    ):
        wait_for_step(process, two, 1)
        process.send_signal(signal.SIGHUP)
        train(configure(folder, one), (), RankGroup())
        assert process.wait(180) == 0, (two / "console.txt").read_text()
        end = time.monotonic() + 60
        while list(Path(short).iterdir()):
            assert time.monotonic() < end
            time.sleep(0.05)
    for ours, theirs in zip(records(two), records(one), strict=True):
        assert ours["step"] == theirs["step"]
        for name in ("loss/mean", "optim/grad_norm", "entropy/all/mean", "progress/num_tokens"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-4), (ours["step"], name)
    assert records(two)[-1]["val/loss"] == pytest.approx(records(one)[-1]["val/loss"], rel=1e-4)
    ours, theirs = (load_file(path / "weights" / "final" / "model.safetensors") for path in (two, one))
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        np.testing.assert_allclose(tensor, theirs[name], atol=1e-5, err_msg=name)
    assert sorted(path.name for path in two.glob("logs/sft/torchrun/*/attempt_0/*")) == ["0", "1"]
    assert "SIGHUP" not in (two / "logs/sft.log").read_text()


@pytest.fixture
def hangups_end_programs() -> Iterator[None]:
    """Also where the tests themselves were started with nohup, whose children ignore hangups as well."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("hangups_end_programs")
def test_a_hangup_saves_what_there_is_ends_in_order_and_is_named(folder: Path, tmp_path: Path) -> None:
    with started(two_ranks(folder, tmp_path, max_steps=100_000)) as process:
        wait_for_step(process, tmp_path, 1)
        process.send_signal(signal.SIGHUP)
        assert process.wait(120) == 0, (tmp_path / "console.txt").read_text()
    assert (tmp_path / "weights" / "final" / "model.safetensors").is_file()
    for log in ("console.txt", "logs/sft.log"):
        text = (tmp_path / log).read_text()
        assert "SIGHUP: rank 0 gets SIGTERM, on which it drains" in text
        assert re.search(r"SIGTERM: training ends after step \d+ of 100000", text)
