"""What `rl` gives the programs of a run to know each other by."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from meshrl.client.authority import Authority
from meshrl.client.trust import Role, TrustFile
from meshrl.core.config import ConfigError, load_config
from meshrl.launch.compose import Part, compose
from meshrl.launch.config import RLConfig
from meshrl.launch.credentials import credentials_for, with_engine_key

OUTSIDE = ("--orchestrator.services.rollout", "127.0.0.1:9", "--weights.server.port", "8")
"""A rollout service that runs already, and knows the hub by its port."""


def made(folder: Path, *flags: str, environ: dict[str, str] | None = None) -> tuple[RLConfig, tuple[Part, ...]]:
    """A run's configuration with its engines' key, and its programs."""
    argv = ["--output-dir", str(folder), "--orchestrator.train.env.0.id", "reverse_text", *flags]
    config = with_engine_key(load_config(RLConfig, argv, prog="rl", environ={}), environ or {})
    return config, compose(config, lambda host: 7)


def test_each_program_gets_the_token_of_its_role_and_the_servers_know_all_by_hash(tmp_path: Path) -> None:
    config, parts = made(tmp_path, "--inference")
    given = credentials_for(config, parts, {})
    roles = {name: Path(variables["MESHRL_TLS_TOKEN"]).name for name, variables in given.items()}
    assert roles == {
        "weights": "hub.token", "inference": "agent.token", "trainer": "publisher.token", "rollout": "rollout.token",
        "orchestrator": "orchestrator.token",
    }  # fmt: skip
    trust = TrustFile(tmp_path / "credentials" / "trust.sqlite").read()
    for role in set(Role) - {Role.TENANT}:
        id_, _, secret = (tmp_path / "credentials" / f"{role}.token").read_text().strip().partition(".")
        assert trust.why_not(id_, secret, 0.0) == ""
        assert trust.tokens[id_].role is role
    assert {stat.S_IMODE(file.stat().st_mode) for file in (tmp_path / "credentials").iterdir()} == {0o600}
    assert config.inference is not None
    assert config.inference.api_key is not None
    key = config.inference.api_key.get_secret_value()
    assert (tmp_path / "credentials" / "engine.key").read_text() == key + "\n"
    assert {part.name for part in parts if key in part.environ.values()} == {"inference", "rollout"}


def test_tokens_of_the_launch_before_no_longer_count(tmp_path: Path) -> None:
    config, parts = made(tmp_path)
    credentials_for(config, parts, {})
    before = (tmp_path / "credentials" / "operator.token").read_text().strip().partition(".")
    credentials_for(config, parts, {})
    trust = TrustFile(tmp_path / "credentials" / "trust.sqlite").read()
    assert trust.why_not(before[0], before[2], 0.0) == "is none of this run"


@pytest.mark.parametrize(
    ("flags", "environ"),
    [
        ((), {"MESHRL_TLS_FOLDER": "/certs"}),
        (("--tls.token", "/token"), {}),
        (("--trainer.tls.token", "/token"), {}),
    ],
)
def test_credentials_that_somebody_names_are_left_alone(
    tmp_path: Path, flags: tuple[str, ...], environ: dict[str, str]
) -> None:
    config, parts = made(tmp_path, "--inference", *flags, environ=environ)
    assert credentials_for(config, parts, environ) == {}
    assert config.inference is not None
    assert config.inference.api_key is None
    assert not (tmp_path / "credentials").exists()


def test_a_run_with_an_authority_gets_no_tokens(tmp_path: Path) -> None:
    Authority.create(tmp_path / "credentials", "main")
    config, parts = made(tmp_path, "--inference")
    assert set(map(str, credentials_for(config, parts, {}).values())) == {"{}"}
    assert not (tmp_path / "credentials" / "operator.token").exists()
    assert (tmp_path / "credentials" / "engine.key").exists()


def test_engines_of_rollout_services_that_run_already_want_a_key_for_admin_routes_alone(tmp_path: Path) -> None:
    config, parts = made(tmp_path, "--inference", *OUTSIDE)
    given = credentials_for(config, parts, {})
    assert config.inference is not None
    assert config.inference.api_key is None
    assert given["inference"]["MESHRL_ADMIN_KEY"] == (tmp_path / "credentials" / "engine.key").read_text().strip()
    assert "MESHRL_ADMIN_KEY" not in given["trainer"]
    assert {name for name, variables in given.items() if "MESHRL_TLS_TRUST" not in variables} == {"weights"}


def test_a_key_in_the_environment_is_the_engines(tmp_path: Path) -> None:
    config, parts = made(tmp_path, "--inference", environ={"MESHRL_API_KEY": "k"})
    assert config.inference is not None
    assert config.inference.api_key is None
    assert "MESHRL_ADMIN_KEY" not in credentials_for(config, parts, {"MESHRL_API_KEY": "k"})["inference"]
    assert not (tmp_path / "credentials" / "engine.key").exists()


NODES = ("--deployment.type", "multi_node")


def test_a_job_of_several_nodes_gets_an_authority_once_and_a_key_for_its_engines(tmp_path: Path) -> None:
    config, parts = made(tmp_path, "--inference", *NODES)
    given = credentials_for(config, parts, {"SLURM_JOB_ID": "17"})
    assert set(map(str, given.values())) == {"{}"}  # programs have certificates, by the authority
    authority = Authority(tmp_path / "credentials")
    assert authority.run == "job-17"
    credentials_for(config, parts, {"SLURM_JOB_ID": "18"})  # which goes on in the same folder
    assert Authority(tmp_path / "credentials").fingerprint == authority.fingerprint
    assert not (tmp_path / "credentials" / "operator.token").exists()
    assert (tmp_path / "credentials" / "engine.key").exists()
    assert stat.S_IMODE((tmp_path / "credentials").stat().st_mode) == 0o700


def test_a_job_that_wants_none_gets_none(tmp_path: Path) -> None:
    config, parts = made(tmp_path, "--inference", *NODES, "--deployment.insecure")
    assert credentials_for(config, parts, {}) == {}
    assert not (tmp_path / "credentials").exists()


def test_a_job_with_certificates_refuses_services_that_cannot_know_them(tmp_path: Path) -> None:
    config, parts = made(tmp_path, "--inference", *NODES, *OUTSIDE)
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1:9 ran before this job .* or set deployment\.insecure"):
        credentials_for(config, parts, {})
