"""Versions over a bad internet: fetches that outlive it, and relays that cross it once."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from wan_rig import PERFECT, Line, Peer, Wan, open_wan

MIB, CHUNK = 2**20, 2 * 2**20
SIZE = 6 * MIB
SITE = Line(down_mbps=30.0, up_mbps=10.0, delay_s=0.02, loss=0.002, nat=True)


@pytest.fixture(scope="module")
def wan() -> Iterator[Wan]:
    with open_wan({"origin": PERFECT, "site": SITE}) as wan:
        yield wan


@pytest.fixture(scope="module")
def hub(wan: Wan) -> str:
    return f"{wan.addresses['origin']}:5000"


def test_a_fetch_outlives_a_black_hole_a_nat_that_forgets_and_the_hub(wan: Wan, hub: str, tmp_path: Path) -> None:
    serving = ("serve", hub, str(tmp_path), str(SIZE / MIB))
    origin = Peer(wan, "origin", *serving)
    origin.until("artifact_id")
    host = Peer(wan, "site", "fetch", hub, "4")
    host.until("ready")
    host.ask()
    host.until("chunks_left", SIZE // CHUNK - 1)
    wan.change("site", hole_s=1.0, forget=True)
    origin.end()
    origin = Peer(wan, "origin", *serving)
    done = host.until("seconds")
    assert done["num_bytes"] == SIZE
    assert done["again"] <= done["connections"] * CHUNK
    origin.ask()
    assert origin.until("sent")["sent"] <= SIZE - CHUNK + done["connections"] * CHUNK  # by the hub's second start
    host.end()
    origin.end()


def test_much_from_far_away_comes_over_new_connections_and_from_near_over_those_there_are(
    wan: Wan, hub: str, tmp_path: Path
) -> None:
    origin = Peer(wan, "origin", "serve", hub, str(tmp_path), str(SIZE / MIB))
    origin.until("artifact_id")
    near, far = Peer(wan, "origin", "fetch", hub, "1"), Peer(wan, "site", "fetch", hub, "2")

    def fetched_over(host: Peer) -> int:
        """How many connections had fetched by the time that this host had the version once more."""
        host.ask()
        assert host.until("seconds")["num_bytes"] == SIZE
        origin.ask()
        callers: int = origin.until("callers")["callers"]
        return callers

    near.until("ready")
    first = fetched_over(near)
    assert fetched_over(near) == first == 1
    far.until("ready")
    first = fetched_over(far)
    assert fetched_over(far) >= first + 2
    for each in (near, far, origin):
        each.end()


def test_an_upload_goes_over_several_connections_and_outlives_a_black_hole_and_the_hub(
    wan: Wan, hub: str, tmp_path: Path
) -> None:
    serving = ("serve", hub, str(tmp_path), "0.1")
    origin = Peer(wan, "origin", *serving)
    origin.until("artifact_id")
    host = Peer(wan, "site", "publish", hub, "3", str(SIZE / MIB), "1")
    host.until("ready")
    before = wan.change()["site"]["up"]
    host.ask()
    host.until("chunks_sent")
    wan.change("site", hole_s=1.0)
    origin.end()
    origin = Peer(wan, "origin", *serving)
    done = host.until("seconds")  # until the hub had all of it, and had sealed it
    assert (done["num_bytes"], done["connections"]) == (SIZE, 3)
    up = wan.change()["site"]["up"] - before
    assert up <= 1.1 * SIZE + done["connections"] * CHUNK  # with headers, and packets that were lost
    host.end()
    origin.end()


def test_a_relay_crosses_the_wan_once_for_its_site_and_can_be_lost(wan: Wan, hub: str, tmp_path: Path) -> None:
    origin = Peer(wan, "origin", "serve", hub, str(tmp_path), str(SIZE / MIB))
    origin.until("artifact_id")
    place = ["--server.host", "127.0.0.1", "--server.port", "5001", "--output-dir", str(tmp_path / "relay")]
    relay = wan.start("site", [sys.executable, "-m", "meshrl.weights.main", "--upstream", hub, *place])
    hosts = [Peer(wan, "site", "fetch", hub, "4", "127.0.0.1:5001") for _ in range(2)]
    for host in hosts:
        host.until("ready")
    for host in hosts:
        host.ask()
    for host in hosts:
        assert host.until("seconds")["num_bytes"] == SIZE
    origin.ask()
    sent = origin.until("sent")["sent"]
    assert SIZE <= sent <= 1.5 * SIZE  # not twice; a machine that stands still for seconds has some asked for again
    relay.kill()
    hosts[0].ask()
    assert hosts[0].until("seconds")["num_bytes"] == SIZE
    origin.ask()
    assert origin.until("sent")["sent"] >= sent + SIZE  # from the hub itself
    for each in (*hosts, origin):
        each.end()
