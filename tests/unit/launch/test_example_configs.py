"""Every file in configs/ is read as the command that it is for reads it, files on top of others with those."""

from pathlib import Path

import pytest

from meshrl.core.config import load_config
from meshrl.eval.config import EvaluationConfig
from meshrl.launch.config import RLConfig
from meshrl.sft.config import SFTConfig

ROOT = Path(__file__).parents[3]
FILES = sorted(path.relative_to(ROOT) for path in (ROOT / "configs").glob("*/**/*.toml"))
COMMANDS: dict[str, type[SFTConfig | RLConfig | EvaluationConfig]] = {
    "sft": SFTConfig,
    "teacher": SFTConfig,
    "rl": RLConfig,
    "gpu": RLConfig,
    "vllm": RLConfig,
    "qwen3_30b_a3b": RLConfig,
    "gpt_oss_20b": RLConfig,
    "eval": EvaluationConfig,
}
"""By the name of a file; what lies in a folder `eval` is for `eval`."""
ON_TOP_OF_RL = {"gpu", "vllm", "qwen3_30b_a3b", "gpt_oss_20b"}


@pytest.mark.parametrize("file", FILES, ids=str)
def test_a_file_is_read_by_its_command(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    kind = "eval" if file.parent.name == "eval" else file.stem
    below = [file.parent / "rl.toml"] if kind in ON_TOP_OF_RL else []
    arguments = [part for path in (*below, file) for part in ("@", str(path))]
    config = load_config(COMMANDS[kind], arguments, prog=kind, environ={})
    assert config.output_dir.parts[0] == "outputs"
    assert f"@ {' @ '.join(map(str, (*below, file)))}" in file.read_text()  # its first lines say how it is used


def test_every_example_has_a_warm_up_a_run_and_an_evaluation() -> None:
    examples = {file.parent for file in FILES if file.name == "rl.toml"}
    assert {path.name for path in examples} >= {"letter_sort", "distillation", "nim", "two_algorithms"}
    for folder in examples:
        assert {"sft.toml", "rl.toml", "eval.toml"} <= {file.name for file in FILES if file.parent == folder}
