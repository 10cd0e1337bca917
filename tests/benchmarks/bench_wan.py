"""How versions cross a bad internet: 100 ms there and back, 1% lost, 100 Mb/s, cubic, between network namespaces.

    python tests/benchmarks/bench_wan.py [--mib 24] [--hole-s 60] [--only rate|breaks|relay] [--beside CHECKOUT]

Prints the useful rate of a fetch over one connection and over as many as pay, beside that of plain sockets; what a
fetch that is broken off costs; and what leaves the hub for a site with a relay. Needs root, `ip` and /dev/net/tun.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "support"))
from wan_rig import BAD, PERFECT, Line, Peer, Wan, open_wan, why_not

MIB = 2**20
CHUNK = 2 * MIB
SOCKETS = """
import socket, sys, threading, time
address, count, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
if count == 0:
    listener = socket.create_server(("0.0.0.0", 5002))
    print("ready", flush=True)
    def pour(line):
        try:
            while True:
                line.sendall(bytes(65536))
        except OSError:
            pass
    while True:
        threading.Thread(target=pour, args=(listener.accept()[0],), daemon=True).start()
got = [0] * count
def drink(number):
    with socket.create_connection((address, 5002)) as line:
        while time.monotonic() < end_s:
            got[number] += len(line.recv(65536))
end_s = time.monotonic() + seconds
threads = [threading.Thread(target=drink, args=(number,)) for number in range(count)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(sum(got) * 8e-6 / seconds)
"""


def sockets(wan: Wan, count: int, seconds: float = 8.0) -> float:
    """Mb/s of plain TCP connections."""
    command = [sys.executable, "-c", SOCKETS, wan.addresses["origin"]]
    program = wan.start("site", [*command, str(count), str(seconds)], stdout=subprocess.PIPE)
    return float(program.communicate(timeout=60.0 + seconds)[0])


def rates(wan: Wan, hub: str, rounds: int, beside: Path | None) -> None:
    """Fetches in turns, of this code and of another checkout, over connections that are kept from one to the next."""
    listening = [sys.executable, "-c", SOCKETS, "", "0", "0"]
    source = wan.start("origin", listening, stdout=subprocess.PIPE)
    assert source.stdout is not None
    source.stdout.readline()
    codes = {"this": None} if beside is None else {str(beside): beside, "this": None}
    hosts = {
        (most, code): Peer(wan, "site", "fetch", hub, str(most), checkout=checkout)
        for most, (code, checkout) in product((1, 32, 48, 64), codes.items())
    }
    told: dict[tuple[int, str], list[dict[str, float]]] = {key: [] for key in hosts}
    for host in hosts.values():
        host.until("ready")
    plain = {most: sockets(wan, most) for most, _ in hosts}
    for number in range(rounds):
        for (most, code), host in hosts.items():
            if most == 1 and number:  # it takes a minute
                continue
            host.ask()
            told[most, code].append(host.until("seconds"))
    print(
        "\n| connections | plain sockets Mb/s | code | fetches in a row, useful Mb/s | median of all but the first"
        " | sent again |"
    )
    print("|---|---|---|---|---|---|")
    for (most, code), each in told.items():
        found = [one["num_bytes"] * 8e-6 / one["seconds"] for one in each]
        again = sum(one["again"] for one in each) / sum(one["num_bytes"] for one in each)
        middle = statistics.median(found[1:] or found)
        row = (most, f"{plain[most]:.1f}", code, ", ".join(f"{one:.1f}" for one in found), f"{middle:.1f}")
        print("| " + " | ".join(map(str, row)) + f" | {again:.1%} |", flush=True)
    for host in hosts.values():
        host.end()


def breaks(wan: Wan, hub: str, mib: int, hole_s: float, restart: Callable[[], None]) -> None:
    """What breaks in the middle of a fetch, and what that costs."""
    whole = mib * MIB
    print("\n| in the middle of a fetch | seconds | bytes on the line beyond the version's | of a chunk a connection |")
    print("|---|---|---|---|")
    what: dict[str, Callable[[], object]] = {
        "nothing": lambda: None,
        f"a black hole of {hole_s:g} s": lambda: wan.change("site", hole_s=hole_s),
        "every flow forgotten by a NAT": lambda: wan.change("site", forget=True),
        "the hub killed and started again": restart,
    }
    for name, act in what.items():
        host = Peer(wan, "site", "fetch", hub, "32")
        host.until("ready")
        before = wan.change()["site"]["down"]
        host.ask()
        host.until("chunks_left", mib // 2 - 2)
        act()
        done = host.until("seconds")
        beyond = wan.change()["site"]["down"] - before - whole
        host.end()
        most = done["connections"] * CHUNK
        print(f"| {name} | {done['seconds']:.1f} | {beyond:,} | {beyond / most:.2f} |", flush=True)


def relayed(wan: Wan, hub: str, origin: Peer, folder: Path) -> None:
    """Three hosts of a site with a relay, and what becomes of them without it."""
    place = ["--server.host", "127.0.0.1", "--server.port", "5001", "--output-dir", str(folder / "relay")]
    relay = wan.start("site", [sys.executable, "-m", "meshrl.weights.main", "--upstream", hub, *place])
    hosts = [Peer(wan, "site", "fetch", hub, "32", "127.0.0.1:5001") for _ in range(3)]
    for host in hosts:
        host.until("ready")
    origin.ask()
    before = origin.until("sent")["sent"]
    began_s = time.monotonic()
    for host in hosts:
        host.ask()
    done = [host.until("seconds") for host in hosts]
    seconds = time.monotonic() - began_s
    origin.ask()
    sent = origin.until("sent")["sent"] - before
    print("\n| three hosts behind a relay | seconds | the hub sent, of a version |\n|---|---|---|")
    print(f"| first fetch of all | {seconds:.1f} | {sent / done[0]['num_bytes']:.3f} |")
    hosts[0].ask()
    print(f"| again | {hosts[0].until('seconds')['seconds']:.1f} | 0 |")
    relay.kill()
    hosts[1].ask()
    print(f"| again, the relay killed | {hosts[1].until('seconds')['seconds']:.1f} | 1 |", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=24)
    parser.add_argument("--hole-s", type=float, default=60.0)
    parser.add_argument("--only", choices=("rate", "breaks", "relay"))
    parser.add_argument("--rounds", type=int, default=4, help="fetches of each kind, in turns")
    parser.add_argument("--beside", type=Path, help="another checkout, whose fetches are measured in turns with these")
    args = parser.parse_args()
    if reason := why_not():
        print(reason)
        return 2
    site = Line(**{**vars(BAD), "nat": True})
    with tempfile.TemporaryDirectory() as name, open_wan({"origin": PERFECT, "site": site}) as wan:
        folder, hub = Path(name), f"{wan.addresses['origin']}:5000"
        serving = ("serve", hub, str(folder), str(args.mib))
        origin = Peer(wan, "origin", *serving)
        origin.until("artifact_id")

        def restart() -> None:
            nonlocal origin
            origin.end()
            origin = Peer(wan, "origin", *serving)

        if args.only in (None, "rate"):
            rates(wan, hub, args.rounds, args.beside)
        if args.only in (None, "breaks"):
            breaks(wan, hub, args.mib, args.hole_s, restart)
        if args.only in (None, "relay"):
            relayed(wan, hub, origin, folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
