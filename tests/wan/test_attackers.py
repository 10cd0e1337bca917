"""Somebody with tokens of a run, in a namespace of its own, against a hub and its members; every try is refused.

MESHRL_TRIES_LOG names a file that the tries, and how they ended, are appended to.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trustme

import impostor
from attempts import Attempts
from impostor import OTHERS_HOSTS, SPELLINGS_OF_THE_HUB
from meshrl.client.authority import Authority
from meshrl.client.trust import Role
from wan_rig import PERFECT, Wan, open_wan

pytestmark = pytest.mark.timeout(600)
DEADLINE_S, SHORT_S = 120.0, 5
HUB, ENTRY, EVIL = 50053, 50060, 50053


@pytest.fixture
def wan() -> Iterator[Wan]:
    with open_wan({"hub": PERFECT, "victim": PERFECT, "evil": PERFECT}) as wan:
        yield wan


class Mesh:
    """A run whose hub is at the site `hub`, and what is done at the sites."""

    def __init__(self, wan: Wan, folder: Path) -> None:
        self.wan, self.folder, self.out = wan, folder, folder / "out"
        self.authority = Authority.create(self.out / "credentials", "main")
        self.hub, self.evil = wan.addresses["hub"], wan.addresses["evil"]
        listen = ["--server.host", self.hub, "--server.port", str(HUB), "--enrollment-port", str(ENTRY)]
        hub = [sys.executable, "-m", "meshrl.weights.main", "--output-dir", str(self.out), *listen]
        with (folder / "hub.txt").open("w") as console:
            wan.start("hub", hub, stdout=console, stderr=subprocess.STDOUT)
        end_s = time.monotonic() + DEADLINE_S
        while "serving WeightSync" not in (folder / "hub.txt").read_text():
            assert time.monotonic() < end_s, (folder / "hub.txt").read_text()
            time.sleep(0.1)

    def meshrl(self, site: str, *arguments: str, tls: Path | None = None, token: str = "") -> tuple[bool, str]:
        """Whether a `meshrl` command at a site succeeds, and what it prints."""
        environ = {name: value for name, value in os.environ.items() if not name.startswith("MESHRL_")}
        environ |= {"MESHRL_TLS_FOLDER": str(tls)} if tls is not None else {}
        environ |= {"MESHRL_JOIN_TOKEN": token} if token else {}
        command = [sys.executable, "-m", "meshrl.cli.main", *arguments]
        process = self.wan.start(site, command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        said, _ = process.communicate(timeout=DEADLINE_S)
        return process.returncode == 0, " ".join(said.split())

    def join(self, site: str, name: str, token: str, *, address: str = "") -> tuple[bool, str]:
        """Joins the run, or who answers at an address in its place, from a site."""
        at = address or f"{self.hub}:{ENTRY}"
        known = ["--ca-hash", self.authority.fingerprint, "--name", name, "--folder", str(self.folder / site / name)]
        return self.meshrl(site, "join", at, *known, token=token)

    def call(
        self, site: str, address: str, *more: str, tls: Path | None, method: str = "ListEngines", deadline_s: int = 60
    ) -> tuple[bool, str]:
        """Calls the weight hub, or who answers in its place; one with whom there is no handshake for `deadline_s`."""
        wanted = ["--address", address, "--deadline", str(deadline_s)]
        return self.meshrl(site, "call", "weights", method, *wanted, *more, tls=tls)

    def serve_at_evil(self, folder: Path) -> subprocess.Popen[str]:
        """Serves WeightSync at the attacker's address with the certificate in a folder."""
        command = [sys.executable, impostor.__file__, "serve", str(folder), f"{self.evil}:{EVIL}"]
        server = self.wan.start("evil", command, stdout=subprocess.PIPE)
        assert server.stdout is not None
        assert server.stdout.readline() == "serves\n"
        return server


def test_a_bearer_of_tokens_gets_nothing_that_was_not_meant_for_it(wan: Wan, tmp_path: Path) -> None:
    mesh, tries = Mesh(wan, tmp_path), Attempts("with TLS, between network namespaces")
    tokens = {role: mesh.authority.trust.add_token(role, hosts=[mesh.evil]) for role in (Role.ROLLOUT, Role.AGENT)}
    victims = mesh.authority.trust.add_token(Role.ROLLOUT)
    tries.control("the victim joins", *mesh.join("victim", "box", victims))
    box, hub, poses = tmp_path / "victim" / "box", f"{mesh.hub}:{HUB}", f"{mesh.evil}:{EVIL}"
    tries.control("the victim calls the hub", *mesh.call("victim", hub, tls=box))

    for role, token in tokens.items():
        asked = [json.dumps([host]) for host in (*SPELLINGS_OF_THE_HUB, *OTHERS_HOSTS, mesh.hub)]
        at = [f"{mesh.hub}:{ENTRY}", mesh.authority.fingerprint, token, "spells", *asked]
        trying = wan.start("evil", [sys.executable, impostor.__file__, "enroll", *at], stdout=subprocess.PIPE)
        said, _ = trying.communicate(timeout=DEADLINE_S)
        for line in map(json.loads, said.splitlines()):
            what = f"enrol by a token of {role} for the host {line['asked'][0]!r}"
            tries.refused(what, line["ended"] == "granted", line["ended"])
        assert len(said.splitlines()) == len(asked)
        tries.control(f"the attacker joins as {role}", *mesh.join("evil", str(role), token))

    tries.refused("enrol by a token that is made up", *mesh.join("evil", "made-up", "0123456789.secret"))
    tries.refused("enrol under the victim's name by its token, with another key", *mesh.join("evil", "box", victims))
    for name in ("BOX", "HUB.MESHRL."):
        tries.refused(f"enrol under the name {name!r}", *mesh.join("evil", name, victims))

    own = tmp_path / "own"
    own.mkdir()
    ca = trustme.CA()
    issued = ca.issue_cert("hub.meshrl", mesh.evil)
    ca.cert_pem.write_to_path(own / "ca.pem")
    issued.private_key_pem.write_to_path(own / "key.pem")
    issued.cert_chain_pems[0].write_to_path(own / "cert.pem")
    shown = {
        "rollout": tmp_path / "evil" / "rollout",
        "agent": tmp_path / "evil" / "agent",
        "an authority of its own": own,
    }
    for of, folder in shown.items():
        server = mesh.serve_at_evil(folder)
        tries.refused(
            f"pose as the hub to the victim with a certificate of {of}",
            *mesh.call("victim", poses, tls=box, deadline_s=SHORT_S),
        )
        tries.refused(
            f"pose as a relay with a certificate of {of}",
            *mesh.call("victim", poses, "--relay", tls=box, deadline_s=SHORT_S),
        )
        joining = mesh.join("victim", f"asks-{len(tries.lines)}", victims, address=poses)
        tries.refused(f"take a join token as the hub with a certificate of {of}", *joining)
        server.kill()
        server.wait(DEADLINE_S)

    tries.refused("call the hub without a certificate", *mesh.call("evil", hub, tls=None, deadline_s=SHORT_S))
    tries.refused(
        "call the hub with a certificate of its own authority", *mesh.call("evil", hub, tls=own, deadline_s=SHORT_S)
    )
    for role, method in ("rollout", "Register"), ("rollout", "CreateVersion"), ("agent", "ActivateVersion"):
        called = mesh.call("evil", hub, tls=tmp_path / "evil" / role, method=method)
        tries.refused(f"call {method} of the hub as {role}", *called)
        assert "may not call" in called[1], called[1]


def test_who_is_revoked_neither_calls_nor_is_called(wan: Wan, tmp_path: Path) -> None:
    mesh, tries = Mesh(wan, tmp_path), Attempts("after a revocation, between network namespaces")
    token = mesh.authority.trust.add_token(Role.RELAY, hosts=[mesh.evil])
    tries.control("a relay joins", *mesh.join("evil", "relay", token))
    relay, hub, at = tmp_path / "evil" / "relay", f"{mesh.hub}:{HUB}", f"{mesh.evil}:{EVIL}"
    server = mesh.serve_at_evil(relay)
    operator = ("-o", str(mesh.out))
    tries.control("an operator calls the relay", *mesh.call("hub", at, "--relay", *operator, tls=None))
    tries.refused(
        "pose as the hub with a relay's certificate", *mesh.call("hub", at, *operator, tls=None, deadline_s=SHORT_S)
    )
    tries.control("its token is revoked", *mesh.meshrl("hub", "token", "revoke", token.partition(".")[0], *operator))

    def called_on(site: str, address: str, *more: str, **how: Any) -> tuple[bool, str]:
        """The call once it is refused: servers read the file anew every second."""
        end_s = time.monotonic() + DEADLINE_S
        while (called := mesh.call(site, address, *more, **how))[0] and time.monotonic() < end_s:
            time.sleep(0.5)
        return called

    tries.refused("serve on as a relay", *called_on("hub", at, "--relay", *operator, tls=None, deadline_s=SHORT_S))
    tries.refused("call the hub on", *called_on("evil", hub, tls=relay, method="GetManifest"))
    tries.refused("join again by the token", *mesh.join("evil", "another", token))
    tries.refused("join again under the name", *mesh.join("evil", "relay", mesh.authority.trust.add_token(Role.RELAY)))
    server.kill()
