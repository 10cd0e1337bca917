"""What --help prints."""

from typing import Any

import pytest

from config_kit import Sample
from meshrl.core.config.schema import every_key


@pytest.fixture
def text(load: Any, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as leaving:
        load("--max-steps", "wrong", "--unknown", "--help")
    captured = capsys.readouterr()
    assert (leaving.value.code, captured.err) == (0, "")
    return captured.out


def test_help_names_every_key(text: str) -> None:
    missing = []
    always_on = {("model",), ("server",), ("loss",), ("log",), ("env", "0", "sampling"), ("env", "0", "deadlines")}
    for path in every_key(Sample):
        flag = "--" + ".".join("N" if part == "0" else part for part in path).replace("_", "-")
        if path not in always_on and f"  {flag} <" not in text:
            missing.append(flag)
    assert missing == []


@pytest.mark.parametrize(
    "lines",
    [
        '  --model.name <text>  (default: "Qwen/Qwen3-0.6B")\n      Folder with a Hugging Face model, or its name',
        '  --model.dtype <"auto" | "float32" | "bfloat16">  (default: "auto")\n',
        "  --server.port <int, >= 0, <= 65535>  (default: 50052)\n",
        "  --ckpt <section or None>  (default: None)\n      Checkpoints; None means off.\n",
        "[ckpt] Checkpoints; None means off.\n  --ckpt.interval <int or None>  (default: None)\n",
        "  --wandb.log-extras.distributions <true | false>  (default: true)\n",
        "  --env.N.id <text>  (required)\n",
        "  --env.N.args <table>  (default: {})\n",
        "  --gpu-ids <list of int or None>  (default: None)\n",
        "  --group-size <int, >= 1>  (default: 8; also: rollouts-per-example)\n      Rollouts per task.\n",
        "[loss] The loss.\n",
        '  --output-dir <path>  (default: "outputs")\n',
        "usage: prog [@ file.toml]...",
        "A program.\n",
    ],
)
def test_help_gives_type_default_and_meaning(text: str, lines: str) -> None:
    assert lines in text
