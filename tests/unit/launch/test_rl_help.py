"""What `rl --help` and `rl --help-all` print."""

import pytest

from meshrl.core.config import load_config
from meshrl.launch.config import RLConfig
from run_config import refusal


def help_of(capsys: pytest.CaptureFixture[str], flag: str) -> str:
    with pytest.raises(SystemExit) as leaving:
        load_config(RLConfig, [flag], prog="rl", environ={})
    assert leaving.value.code == 0
    return capsys.readouterr().out


def test_help_shows_the_everyday_keys_by_group_and_names_the_rest(capsys: pytest.CaptureFixture[str]) -> None:
    text = help_of(capsys, "--help")
    for title, keys in RLConfig.everyday_keys.items():
        assert f"\n{title}:\n" in text
        assert [key for key in keys if f"  --{key.replace('_', '-')} <" not in text] == []
    assert '  --model.name <text>  (default: "Qwen/Qwen3-0.6B")\n' in text
    assert "--trainer.optim.weight-decay" not in text
    assert text.count("\n") < 140
    assert text.endswith("These are the everyday keys; 'rl --help-all' shows every key.\n")


def test_help_all_shows_every_key(capsys: pytest.CaptureFixture[str]) -> None:
    text = help_of(capsys, "--help-all")
    assert all(f"  --{key}" in text for key in ("max-steps <", "trainer.optim.weight-decay <"))
    assert text.count("\n  --") > 200


def test_a_mistake_points_to_every_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert refusal(capsys, "--max-stepss", "1").endswith("Run 'rl --help-all' for every key.\n")
