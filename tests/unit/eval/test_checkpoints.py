"""Which weights are evaluated: base and all by default, else those that are asked for."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from meshrl.core.config import ConfigError, load_config
from meshrl.eval.checkpoints import weights_to_evaluate
from meshrl.eval.config import EvaluationConfig


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    for name in ("step_20", "step_5", "step_10", "step_30.partial", "final"):
        (tmp_path / name).mkdir()
    return tmp_path


def names(folder: Path | None, steps: list[int] | None = None, *, base: bool = True) -> list[str]:
    return [one.name for one in weights_to_evaluate(folder, steps, base=base)]


def test_base_and_every_checkpoint_by_step(weights: Path) -> None:
    assert names(weights) == ["base", "step_5", "step_10", "step_20"]
    assert [one.step for one in weights_to_evaluate(weights, None, base=True)] == [0, 5, 10, 20]


def test_some_steps_without_the_base(weights: Path) -> None:
    assert names(weights, [20, 5], base=False) == ["step_5", "step_20"]


def test_without_weights_dir_what_is_served() -> None:
    assert names(None) == ["base"]


def test_a_folder_of_sft_without_checkpoints_has_its_final_weights(tmp_path: Path) -> None:
    (tmp_path / "final").mkdir()
    assert names(tmp_path) == ["base", "final"]


def test_what_is_not_there_is_said_with_what_is(weights: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"steps 40 are not in .* it has 5, 10, 20"):
        names(weights, [10, 40])
    with pytest.raises(ConfigError, match="there is no such folder"):
        names(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="holds no folder step_N with weights"):
        names(tmp_path / "empty")


def load(*argv: str) -> EvaluationConfig:
    return load_config(EvaluationConfig, argv, prog="eval", environ={})


@pytest.mark.parametrize(
    ("flag", "value", "problem"),
    [("--workers", "-1", "workers"), ("--client.base-url", "127.0.0.1:8000", "client.base_url must hold URLs")],
)
def test_keys_of_its_rollout_service_are_checked_before_anything_starts(
    flag: str, value: str, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        load("--environment-ids", "math500", flag, value)
    assert f"eval: {problem}" in capsys.readouterr().err


def test_the_documents_commands_are_read_as_they_are() -> None:
    config = load(
        "--model.name", "m", "--environment-ids", "math500,aime2025", "--weights-dir", "outputs/weights",
        "--steps", "10,20,30,40,50", "--no-eval-base",
    )  # fmt: skip
    assert [env.resolved_name for env in config.environments] == ["math500", "aime2025"]
    assert (config.weights_dir, config.steps, config.eval_base) == (
        Path("outputs/weights"),
        [10, 20, 30, 40, 50],
        False,
    )
    config = load(
        "--client.base-url", "https://api.openai.com/v1", "--client.api-key-var", "OPENAI_API_KEY",
        "--model.name", "m", "--environment-ids", "math500", "--rollouts-per-example", "4",
    )  # fmt: skip
    assert (config.engine_urls, config.group_size) == (("https://api.openai.com",), 4)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ((), "needs at least one environment, got none"),
        (("--environment-ids", "a,a"), "distinct names, got a more than once"),
        (("--environment-ids", "a", "--steps", "1"), "weights_dir must say where they are"),
        (("--environment-ids", "a", "--no-eval-base"), "nothing to evaluate"),
        (
            ("--environment-ids", "a", "--inference", "--client.base-url", "http://h:1"),
            "names servers that run already, but \\[inference\\] starts one",
        ),
    ],
)
def test_what_does_not_fit_together_is_refused(
    argv: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        load(*argv)
    assert re.search(message, capsys.readouterr().err)
