"""Resolved TOML loads back as the same configuration."""

import tomllib
from pathlib import Path
from typing import Any

from config_kit import Sample
from meshrl.core.config import dump_toml, to_toml


def test_dump_loads_back_identically(load: Any, tmp_path: Path) -> None:
    lists = ["--gpu-ids", "1,2", '--tags=["a,b", "\\u00e9\\n\\""]', "--env.1.id", "y", "--env.0.id", "x"]
    tables = ["--env.0.args", '{"a b": [1, {"c": null}]}', "--options.deep.er", "1e-9", "--loss.type", "aipo"]
    switches = ["--wandb", "--no-wandb.log-extras", "--no-max-norm", "--rollouts-per-example", "2"]
    config = load(*lists, *tables, *switches)
    assert config.loss.type == "aipo"
    path = tmp_path / "configs" / "sample.toml"
    dump_toml(config, path)
    assert load("@", str(path)) == config
    assert sorted(path.parent.iterdir()) == [path]


def test_dump_is_not_changed_by_variables(load: Any, tmp_path: Path) -> None:
    path = tmp_path / "sample.toml"
    dump_toml(load(), path)
    environ = {"PRIME_WANDB": "true", "PRIME_MAX_STEPS": "5", "PRIME_ENV__0__ID": "x", "PRIME_CKPT__INTERVAL": "5"}
    assert load("@", str(path), environ=environ) == load()


def test_dump_writes_every_key_and_none_as_text(load: Any) -> None:
    values = tomllib.loads(to_toml(load()))
    assert sorted(values) == sorted(Sample.model_fields)
    assert (values["ckpt"], values["max_norm"], values["server"]["port"]) == ("None", 1.0, 50052)


def test_dump_replaces_an_older_file(load: Any, tmp_path: Path) -> None:
    path = tmp_path / "sample.toml"
    path.write_text("not toml")
    dump_toml(load("--max-steps", "5"), path)
    assert load("@", str(path)).max_steps == 5
