"""`meshrl run init`, `meshrl token` and `meshrl join` on the command line; core's tests have them over a network."""

from __future__ import annotations

import fcntl
import json
import re
import stat
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from meshrl.cli.main import main
from meshrl.cli.run_folder import RunFolder
from meshrl.client.authority import Authority
from meshrl.client.credentials import FileCredentials
from meshrl.client.trust import Role

HASH = f"sha256:{'0' * 64}"


def meshrl(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


def test_a_run_gets_an_authority_and_tokens_and_takes_them_back(tmp_path: Path) -> None:
    folder = ("-o", str(tmp_path / "run"))
    made = meshrl("run", "init", *folder, "--run-id", "r1")
    assert made.exit_code == 0, made.output
    authority = Authority(tmp_path / "run" / "credentials")
    assert authority.run == "r1"
    assert authority.fingerprint in made.output
    assert stat.S_IMODE((authority.folder / "ca.key").stat().st_mode) == 0o600
    created = meshrl("token", "create", *folder, "--role", "agent", "--ttl", "1h").output.split()
    assert created[0::2] == ["token", "ca-hash"]
    assert created[3] == authority.fingerprint
    id_, _, secret = created[1].partition(".")
    trust = authority.trust.read()
    assert trust.tokens[id_].role is Role.AGENT
    assert trust.why_not(id_, secret, 0.0) == ""
    authority.trust.note_member(Role.AGENT, "e1", id_)
    revoked = meshrl("token", "revoke", *folder, id_)
    assert revoked.output == f"revoked: token {id_}, agent/e1\n"
    assert authority.trust.read().why_not(id_, secret, 0.0) == "is revoked"
    credentials = RunFolder(tmp_path / "run").credentials()  # what every other command then calls with
    assert isinstance(credentials, FileCredentials)
    assert credentials.mutual


def test_tokens_are_listed_with_their_members_and_without_their_secrets(tmp_path: Path) -> None:
    folder = ("-o", str(tmp_path / "run"))
    meshrl("run", "init", *folder)
    trust = Authority(tmp_path / "run" / "credentials").trust
    engine = trust.add_token(Role.AGENT, 3600.5, hosts=["10.1.0.0/16"])
    team, late = trust.add_token(Role.TENANT, runs=["team-a-*"]), trust.add_token(Role.ROLLOUT, -1.0)
    for name in ("e1", "e2"):
        trust.note_member(Role.AGENT, name, engine.partition(".")[0])
    trust.revoke("agent/e1")
    listed = meshrl("token", "list", *folder)
    assert listed.exit_code == 0, listed.output
    header, *rows = [[cell.strip() for cell in re.split(r"\s{2,}", line)] for line in listed.output.splitlines()]
    assert header == ["TOKEN", "ROLE", "STATE", "HOSTS", "RUNS", "MEMBERS"]
    assert sorted(rows) == sorted([
        [engine.partition(".")[0], "agent", "valid for 1h00m", "10.1.0.0/16", "all", "agent/e1 (revoked), agent/e2"],
        [team.partition(".")[0], "tenant", "valid", "-", "team-a-*", "-"],
        [late.partition(".")[0], "rollout", "expired", "-", "all", "-"],
    ])  # fmt: skip
    as_json = json.loads(meshrl("token", "list", "--json", *folder).output)
    by_id = {each["id"]: each for each in as_json}
    assert by_id[engine.partition(".")[0]]["members"] == [
        {"role": "agent", "name": "e1", "revoked": True}, {"role": "agent", "name": "e2", "revoked": False},
    ]  # fmt: skip
    assert not any(made.partition(".")[2] in listed.output + json.dumps(as_json) for made in (engine, team, late))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("run", "init", "--run-id", "a b"), "a member's name has 1 to 63 letters"),
        (("token", "create", "--role", "agent", "--ttl", "soon"), "'soon' is no duration; write it as 30m, 1h or 7d"),
        (("token", "create", "--role", "king"), "'king' is not one of"),
        (("token", "create", "--role", "agent"), "name its folder with -o, as its owner"),
        (("token", "list"), "name its folder with -o, as its owner"),
        (("token", "revoke", "x"), "name its folder with -o, as its owner"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line(tmp_path: Path, arguments: tuple[str, ...], said: str) -> None:
    answer = meshrl(*arguments, "-o", str(tmp_path / "none"))
    assert answer.exit_code in (1, 2)
    assert said in answer.output
    assert "Traceback" not in answer.output


def test_a_variable_that_names_no_file_is_said_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHRL_TLS_TOKEN", str(tmp_path / "none"))
    answer = meshrl("weights", "engines", "--address", "127.0.0.1:1", "-o", str(tmp_path))
    assert answer.exit_code == 1
    assert answer.output.startswith("Error: tls.token '")
    assert "cannot be read; give the path of a file that is there" in answer.output


def test_an_authority_is_not_made_for_programs_that_run_without_it(tmp_path: Path) -> None:
    (tmp_path / "rl.lock").touch()
    with (tmp_path / "rl.lock").open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        answer = meshrl("run", "init", "-o", str(tmp_path))
    assert answer.exit_code == 1
    assert "goes on, and its programs take certificates at their start alone: end it first" in answer.output
    assert not (tmp_path / "credentials").exists()


@pytest.mark.parametrize(
    ("address", "ca_hash", "words"),
    [
        ("127.0.0.1", HASH, "expected HOST:PORT with a port from 1 to 65535"),
        ("127.0.0.1:1", "sha256:0", "--ca-hash: expected sha256: and 64 hexadecimal digits, got 'sha256:0'"),
    ],
)
def test_joining_with_what_cannot_be_is_refused_before_anybody_is_called(
    tmp_path: Path, address: str, ca_hash: str, words: str
) -> None:
    answer = meshrl("join", address, "--token", "a.b", "--ca-hash", ca_hash, "--folder", str(tmp_path / "c"))
    assert answer.exit_code == 2
    assert words in answer.output


def test_joining_nobody_is_said_with_what_to_name(tmp_path: Path) -> None:
    answer = meshrl("join", "127.0.0.1:1", "--token", "a.b", "--ca-hash", HASH, "--folder", str(tmp_path / "c"))
    assert answer.exit_code == 1
    assert "no TLS server answers at 127.0.0.1:1" in answer.output
    assert "name the hub's enrollment port" in answer.output
