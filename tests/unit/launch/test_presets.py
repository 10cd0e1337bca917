"""An algorithm's name sets advantage and loss together; a component's own key wins."""

from pathlib import Path
from typing import Any, get_args

import pytest

from meshrl.core.config import dump_toml, load_config
from meshrl.launch.config import RLConfig
from meshrl.launch.config.presets import PRESETS, AlgorithmName
from meshrl.trainer.objectives import build_objective

TRAINS = ("--orchestrator.train.env.0.id", "reverse-text")


def load(*argv: str) -> RLConfig:
    return load_config(RLConfig, [*argv, *TRAINS], prog="rl", environ={})


def refusal(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    with pytest.raises(SystemExit) as leaving:
        load(*argv)
    assert leaving.value.code == 2
    return capsys.readouterr().err


def chosen(config: RLConfig) -> tuple[Any, ...]:
    loss = config.trainer.loss
    constants = tuple(value for value in loss.constants.values())
    return config.orchestrator.advantage.type, loss.type, loss.resolved_normaliser, constants


def file(folder: Path, text: str) -> tuple[str, str]:
    path = folder / "rl.toml"
    path.write_text(text)
    return "@", str(path)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("default", ("default", "default", "token", (0.2, 0.2, 1.0, 1e-3))),
        ("grpo", ("grpo", "grpo", "sequence", (0.2, 0.2))),
        ("dr_grpo", ("default", "grpo", "fixed", (0.2, 0.2))),
        ("dapo", ("grpo", "grpo", "token", (0.2, 0.28))),
        ("gspo", ("grpo", "gspo", "sequence", (3e-4, 4e-4))),
        ("opo", ("opo", "default", "token", (0.2, 0.2, 1.0, 0.0))),
        ("rloo", ("rloo", "default", "token", (0.2, 0.2, 1.0, 0.0))),
        ("cispo", ("grpo", "cispo", "token", (None, 4.0))),
        ("aipo", ("default", "aipo", "token", (4.0,))),
    ],
)
def test_a_name_sets_advantage_loss_and_normaliser(name: str, expected: tuple[Any, ...]) -> None:
    config = load("--algorithm", name)
    assert chosen(config) == expected
    assert build_objective(config.trainer.loss).normaliser.value == expected[2]


def test_every_name_has_a_preset() -> None:
    assert list(PRESETS) == list(get_args(AlgorithmName))


def test_an_unknown_name_is_an_error_that_lists_them(capsys: pytest.CaptureFixture[str]) -> None:
    message = refusal(capsys, "--algorithm", "ppo")
    assert "algorithm" in message
    assert "'ppo'" in message
    assert all(name in message for name in PRESETS)


def test_without_a_name_the_components_decide() -> None:
    config = load("--trainer.loss.type", "aipo", "--orchestrator.advantage.type", "rloo")
    assert chosen(config) == ("rloo", "aipo", "token", (4.0,))


@pytest.mark.parametrize("where", ["beside", "above"])
def test_a_components_own_key_wins_beside_or_above_the_name(where: str, tmp_path: Path) -> None:
    own = ("--trainer.loss.clip-high", "0.3", "--orchestrator.advantage.type", "rloo")
    named = ("--algorithm", "dapo") if where == "beside" else file(tmp_path, 'algorithm = "dapo"')
    assert chosen(load(*named, *own)) == ("rloo", "grpo", "token", (0.2, 0.3))


@pytest.mark.parametrize("name", ["dapo", "dr_grpo", "opo"])
@pytest.mark.parametrize("where", ["beside", "above"])
def test_another_loss_type_leaves_the_presets_loss_keys_out(where: str, name: str, tmp_path: Path) -> None:
    named = ("--algorithm", name) if where == "beside" else file(tmp_path, f'algorithm = "{name}"')
    config = load(*named, "--trainer.loss.type", "aipo")
    assert chosen(config) == (PRESETS[name].advantage, "aipo", "token", (4.0,))
    assert config.trainer.loss.fixed_length is None


def test_a_name_on_the_command_line_replaces_the_loss_of_a_file(tmp_path: Path) -> None:
    text = '[trainer.loss]\nkl_tau = 0.01\n[orchestrator.advantage]\ntype = "opo"\n'
    assert chosen(load(*file(tmp_path, text), "--algorithm", "grpo")) == ("grpo", "grpo", "sequence", (0.2, 0.2))
    own = 'type = "custom"\nimport_path = "a.b"\n'
    custom = f"[trainer.loss]\n{own}[orchestrator.advantage]\n{own}"
    assert chosen(load(*file(tmp_path, custom), "--algorithm", "aipo")) == ("default", "aipo", "token", (4.0,))


def test_a_length_penalty_stays_beside_a_name(tmp_path: Path) -> None:
    text = '[orchestrator.advantage.length_penalty]\ntype = "per_token"\nweight = 0.1\n'
    advantage = load(*file(tmp_path, text), "--algorithm", "dapo").orchestrator.advantage
    assert advantage.type == "grpo"
    assert advantage.length_penalty is not None


def test_dr_grpo_divides_by_the_most_that_may_be_sampled() -> None:
    fixed = ("--algorithm", "dr_grpo")
    assert load(*fixed, "--orchestrator.sampling.max-tokens", "40").trainer.loss.fixed_length == 40
    assert load(*fixed, "--seq-len", "64").trainer.loss.fixed_length == 64
    assert load(*fixed, "--orchestrator.seq-len", "128").trainer.loss.fixed_length == 128
    assert load(*fixed, "--trainer.loss.fixed-length", "7", "--seq-len", "64").trainer.loss.fixed_length == 7
    assert load(*fixed).trainer.loss.fixed_length == load().orchestrator.seq_len


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_the_resolved_configuration_loads_again(name: str, tmp_path: Path) -> None:
    resolved = load("--algorithm", name)
    dump_toml(resolved, tmp_path / "resolved.toml")
    assert load_config(RLConfig, ["@", str(tmp_path / "resolved.toml")], prog="rl", environ={}) == resolved


def test_a_key_of_another_loss_is_still_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    message = refusal(capsys, "--algorithm", "grpo", "--trainer.loss.kl-tau", "0.1")
    assert "loss.kl_tau belongs to loss.type default, not to grpo" in message
