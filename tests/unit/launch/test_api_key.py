"""The engines' key under `rl`: it reaches the programs that need it and nothing that is written or shown."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from meshrl.core.config import ConfigError, dump_toml, load_config, to_toml
from meshrl.core.credentials.secret import read_secret
from meshrl.inference.config import InferenceConfig
from meshrl.launch.compose import Part, compose
from meshrl.launch.config import RLConfig
from meshrl.rollout.config import RolloutConfig

KEY = "open-sesame-4711"
BASE = ("--orchestrator.train.env", '[{"id": "reverse_text"}]', "--inference")


def parts(*argv: str) -> dict[str, Part]:
    config = load_config(RLConfig, [*BASE, *argv], environ={}, prog="rl")
    assert KEY not in repr(config) + to_toml(config)
    ports = iter(range(20000, 30000))
    made = {part.name: part for part in compose(config, lambda _host: next(ports))}
    assert all(KEY not in repr(part) + to_toml(part.config) for part in made.values())
    return made


def found(part: Part) -> str | None:
    """The key as a program finds it that reads its resolved configuration."""
    config: Any = part.config
    given = config if isinstance(config, InferenceConfig) else config.client
    return read_secret(
        "key",
        getattr(given, "api_key", None),
        file=given.api_key_file,
        variable=given.api_key_var,
        environ=part.environ,
    )


def test_key_of_the_configuration_reaches_engines_and_rollout_through_their_environment() -> None:
    made = parts("--inference.api-key", KEY)
    assert isinstance(made["inference"].config, InferenceConfig)
    assert made["inference"].config.api_key is None
    assert found(made["inference"]) == found(made["rollout"]) == KEY
    assert all(KEY not in part.environ.values() for name, part in made.items() if name not in ("inference", "rollout"))


def test_key_in_a_file_or_a_variable_of_another_name_is_read_by_both(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text(KEY + "\n")
    made = parts("--inference.api-key-file", str(file))
    assert found(made["inference"]) == found(made["rollout"]) == KEY
    made = parts("--inference.api-key-var", "ENGINE_KEY")
    assert isinstance(made["rollout"].config, RolloutConfig)
    assert made["rollout"].config.client.api_key_var == "ENGINE_KEY"
    made = parts("--inference.api-key-var", "ENGINE_KEY", "--rollout.client.api-key-var", "MY_KEY")
    assert isinstance(made["rollout"].config, RolloutConfig)
    assert made["rollout"].config.client.api_key_var == "MY_KEY"


def test_value_comes_before_the_file_and_the_file_before_the_variable(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("of-the-file")
    environ = {"VAR": "of-the-variable"}
    given = SecretStr("given")
    assert read_secret("k", given, file=None, variable="VAR", environ=environ) == "given"
    assert read_secret("k", None, file=file, variable="VAR", environ=environ) == "of-the-file"
    assert read_secret("k", None, file=None, variable="VAR", environ=environ) == "of-the-variable"
    assert read_secret("k", None, file=None, variable="VAR", environ={}) is None


@pytest.mark.parametrize("key", ["", "with space", "line\nbreak", "schlüssel"])
def test_key_that_no_header_carries_is_refused_without_showing_it(key: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read_secret("inference.api_key", SecretStr(key), file=None, variable="VAR", environ={})
    assert "inference.api_key" in str(refused.value)
    assert not key or key not in str(refused.value)


def test_key_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        read_secret("inference.api_key", None, file=tmp_path / "nowhere", variable="VAR", environ={})


def test_key_of_a_wrong_type_is_not_shown(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text("api_key = 47114711\n")
    with pytest.raises(SystemExit):
        load_config(InferenceConfig, ["@", str(tmp_path / "c.toml")], environ={}, prog="inference")
    message = capsys.readouterr().err
    assert "api_key" in message
    assert "47114711" not in message


def test_files_of_a_configuration_are_readable_by_their_owner_only(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        path = tmp_path / "inference.toml"
        dump_toml(InferenceConfig(api_key=SecretStr(KEY)), path)
        dump_toml(InferenceConfig(api_key=SecretStr(KEY)), path)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert "api_key_var" in path.read_text()
    assert KEY not in path.read_text()
