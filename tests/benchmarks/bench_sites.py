"""A run over three sites that share nothing but a bad internet, while their hosts leave, join, hang and come back.

    python tests/benchmarks/bench_sites.py one-host --model FOLDER --steps 200 --output-dir OUT/one
    python tests/benchmarks/bench_sites.py sites --model FOLDER --minutes 60 --output-dir OUT/sites
    python tests/benchmarks/bench_sites.py sites --model FOLDER --minutes 12 --calm --dtype bfloat16 --lr 1e-5 ...
    python tests/benchmarks/bench_sites.py table OUT/sites --beside OUT/one

The hub, the trainer and the orchestrator are at one place; each site has a relay, an engine and a rollout worker that
listens nowhere, in a network namespace of its own behind a NAT: 100 ms there and back, 1% of packets lost, 100 Mb/s,
cubic. Sites join by tokens, every connection is mutual TLS, and no folder is shared: the model is copied to each.
With `--calm` nothing happens but that a site joins, and that a site comes back which has lost all versions: then the
table says what each relay fetched. `--dtype bfloat16` and a small `--lr` have the versions travel as deltas.
`one-host` is the same run by `rl` on one host. `--model` is a model that can do a little of reverse_text already, as
`make demo` leaves one in outputs/demo/sft/weights/final. Needs root, `ip` and /dev/net/tun.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "support"))
from site_programs import END_S, ENTRY, EXCHANGE, HUB, START_S, Program, Site, meshrl
from sites_report import Event, read_steps, show

from wan_rig import BAD, PERFECT, Line, Wan, open_wan, why_not

SITES = ("a", "b", "c")
LATE = "c"
"""This site joins when the run has made FIRST_STEPS steps without it."""
FIRST_STEPS = 3
BACK_S = 900.0
LEASE_S = 60.0
TRAINER = """
[optim]
lr = LR
weight_decay = 0.0
betas2 = 0.95

[scheduler]
warmup_steps = 5
"""
ORCHESTRATOR = """
batch_size = BATCH
group_size = 8
seq_len = 2048
max_async_level = 2
seed = 0

[sampling]
temperature = 1.0
max_tokens = 40

[[train.env]]
id = "reverse_text"
"""
DIALLED = f"""
[deadlines]
startup_s = {START_S}

[services]
rollout = []

[exchange]
host = "0.0.0.0"
port = {EXCHANGE}
lease_s = {LEASE_S}
workers = {[f"worker-{site}" for site in SITES if site != LATE]}
"""


def filled(text: str, read: argparse.Namespace) -> str:
    return text.replace("LR", str(read.lr)).replace("BATCH", str(read.batch_size))


def under(section: str, text: str) -> str:
    """A program's own keys as they stand in the file of `rl`."""
    top, _, rest = text.partition("\n[")
    inner = re.sub(r"(?m)^(\[+)", rf"\1{section}.", "\n[" + rest)
    return f"\n[{section}]{top}{inner}"


class Sites:
    """The whole run, and what happens to its sites."""

    def __init__(self, wan: Wan, read: argparse.Namespace) -> None:
        folder, model = read.output_dir.resolve(), read.model.resolve()
        self.wan, self.run = wan, folder / "origin"
        self.run.mkdir(parents=True)
        meshrl("run", "init", "-o", str(self.run))
        for name, text in (("trainer", TRAINER), ("orchestrator", ORCHESTRATOR + DIALLED)):
            (self.run / f"{name}.toml").write_text(filled(text, read))
        at, config = ["--output-dir", str(self.run)], self.run / "trainer.toml"
        hub = ["--server.host", "0.0.0.0", "--server.port", str(HUB), "--enrollment-port", str(ENTRY)]
        commands = {
            "weights": ["meshrl.weights.main", *hub, *at],
            "trainer": [
                "meshrl.trainer.main", "@", str(config), "--model.name", str(model), "--seq-len", "2048",
                "--torch-threads", "1", "--model.dtype", read.dtype, "--weight-broadcast.type", "stream", *at,
            ],
            "orchestrator": ["meshrl.orchestrator.main", "@", str(self.run / "orchestrator.toml"), *at],
        }  # fmt: skip
        self.origin = {name: Program(wan, "origin", name, command, self.run) for name, command in commands.items()}
        self.sites = {name: Site(wan, name, model, folder / f"site_{name}", self.run, read.dtype) for name in SITES}
        self.events: list[Event] = []
        self._began_s = time.monotonic()

    def steps(self) -> int:
        return len(read_steps(self.run))

    def log(self, program: str) -> str:
        path = self.run / "logs" / f"{program}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def wait_for(self, what: Callable[[], object], deadline_s: float, text: str) -> None:
        end = time.monotonic() + deadline_s
        while not what():
            gone = [name for name, each in self.origin.items() if each.started and not each.is_running]
            if gone:
                raise RuntimeError(f"{gone[0]} ended:\n{self.origin[gone[0]].console()[-3000:]}")
            if time.monotonic() > end:
                raise RuntimeError(f"not {text} within {deadline_s:g} s")
            time.sleep(0.2)

    def begin(self) -> None:
        """Starts everybody, the late site once the others have trained without it."""
        self.origin["weights"].start()
        self.wait_for(lambda: "hosts join this run at" in self.log("weights"), START_S, "the hub")
        self.origin["trainer"].start()
        self.origin["orchestrator"].start()
        for name in SITES:
            if name != LATE:
                self.sites[name].join()
        self.wait_for(lambda: self.steps() >= FIRST_STEPS, 2 * START_S, f"{FIRST_STEPS} steps")
        self._began_s = time.monotonic()
        self._event(LATE, "the site joins the run", self.sites[LATE].join, lambda: self._dials(LATE) > 0)

    def _dials(self, site: str) -> int:
        return len(re.findall(rf"worker 'worker-{site}' (?:dialled in|is back)", self.log("orchestrator")))

    def _engine_served(self, site: str) -> int:
        """Versions that the latest process of its engine has served."""
        return self.sites[site].programs["engine"].console().count("is served")

    def _event(self, site: str, text: str, act: Callable[[], None], back: Callable[[], bool]) -> None:
        """One thing that happens: until its site is back."""
        at_s, before = time.monotonic(), self.steps()
        act()
        acted_s = time.monotonic()
        self.wait_for(back, BACK_S, f"back after {text!r} at site {site}")
        now_s = time.monotonic()
        event = Event(
            at_s=at_s - self._began_s, site=site, text=text, away_s=acted_s - at_s, back_s=now_s - acted_s,
            steps=self.steps() - before,
        )  # fmt: skip
        self.events.append(event)
        print(event.line(), flush=True)
        (self.run / "events.json").write_text(json.dumps([vars(each) for each in self.events]))

    def happen(self, number: int) -> None:
        """The next thing that happens to a site, in turn."""
        site = self.sites[SITES[number % len(SITES)]]
        name, everybody = site.name, tuple(site.programs)
        dials = self._dials(name)

        def dialled() -> bool:
            return self._dials(name) > dials

        def dead(away_s: float, *programs: str, signum: signal.Signals = signal.SIGKILL) -> Callable[[], None]:
            def act() -> None:
                site.send(signum, *programs)
                for program in programs:
                    site.programs[program].wait(END_S)
                time.sleep(away_s)
                site.start(*programs)

            return act

        def stopped(away_s: float, *programs: str) -> Callable[[], None]:
            def act() -> None:
                site.send(signal.SIGSTOP, *programs)
                time.sleep(away_s)
                site.send(signal.SIGCONT, *programs)

            return act

        def hole() -> None:
            self.wan.change(name, hole_s=45.0)
            time.sleep(45.0)

        def forget() -> None:
            self.wan.change(name, forget=True)

        served = self._engine_served(name)

        def serves_more() -> bool:
            return self._engine_served(name) > served

        def serves() -> bool:
            return self._engine_served(name) > 0

        def relays() -> bool:
            return "relaying the hub" in site.programs["relay"].console() and serves_more()

        happenings: list[tuple[str, Callable[[], None], Callable[[], bool]]] = [
            ("worker killed, started again after 20 s", dead(20.0, "worker"), dialled),
            ("engine hangs for 45 s", stopped(45.0, "engine"), serves_more),
            ("relay killed, started again after 60 s", dead(60.0, "relay"), relays),
            ("worker hangs for 90 s, longer than its lease", stopped(90.0, "worker"), dialled),
            ("engine killed, started again after 20 s", dead(20.0, "engine"), serves),
            ("nothing passes the line for 45 s", hole, lambda: dialled() and serves_more()),
            ("the NAT forgets every flow", forget, lambda: dialled() and serves_more()),
            ("the host dies, comes back after 120 s", dead(120.0, *everybody), lambda: dialled() and serves()),
            ("worker leaves (SIGTERM), joins after 60 s", dead(60.0, "worker", signum=signal.SIGTERM), dialled),
            ("the host hangs for 60 s", stopped(60.0, *everybody), lambda: dialled() and serves_more()),
        ]
        self._event(name, *happenings[number % len(happenings)])

    def lose_versions(self, name: str) -> None:
        """A host dies and comes back without any version: it joins anew, but for its credentials."""
        site = self.sites[name]
        everybody = tuple(site.programs)

        def act() -> None:
            site.send(signal.SIGKILL, *everybody)
            site.lose_versions()
            site.start(*everybody)

        self._event(name, "the host dies and has lost all versions", act, lambda: self._engine_served(name) > 0)

    def end(self) -> int:
        """Has the run end as its user would, then the sites; the exit code of the orchestrator."""
        self.origin["orchestrator"].send(signal.SIGTERM)
        code = self.origin["orchestrator"].wait(END_S)
        for site in self.sites.values():
            for program in site.programs.values():
                if program.is_running:
                    program.send(signal.SIGTERM)
        for name in ("trainer", "weights"):
            if self.origin[name].is_running:
                self.origin[name].send(signal.SIGTERM)
        everybody = [*self.origin.values(), *(each for site in self.sites.values() for each in site.programs.values())]
        for program in everybody:
            with suppress(subprocess.TimeoutExpired):
                program.wait(END_S)
        return code


def run_sites(read: argparse.Namespace) -> int:
    site = Line(**{**vars(BAD), "nat": True})
    with open_wan({"origin": PERFECT, **dict.fromkeys(SITES, site)}) as wan:
        sites = Sites(wan, read)
        sites.begin()
        began_s, before, number = time.monotonic(), wan.change(), 0
        while time.monotonic() - began_s < 60.0 * read.minutes:
            quiet_s = time.monotonic() + read.quiet_s
            sites.wait_for(lambda end=quiet_s: time.monotonic() > end, read.quiet_s + 60.0, "quiet")
            if not read.calm:
                sites.happen(number)
            elif number < len(SITES):
                sites.lose_versions(SITES[number])
            number += 1
        seconds, sent = time.monotonic() - began_s, wan.change()
        code = sites.end()
        lines = {name: {way: sent[name][way] - before[name][way] for way in ("up", "down")} for name in SITES}
    folder = read.output_dir.resolve() / "origin"
    (folder / "sites.json").write_text(json.dumps({"seconds": seconds, "code": code, "lines": lines}))
    return show(folder, read.beside)


def run_one_host(read: argparse.Namespace) -> int:
    folder = read.output_dir.resolve()
    folder.mkdir(parents=True)
    config = folder / "one_host.toml"
    more = '\n[inference]\nengine = "embedded"\nmax_model_len = 128\ntorch_threads = 1\n'
    more += "\n[rollout]\nseq_len = 128\nworkers = 0\n"
    trainer = "seq_len = 2048\ntorch_threads = 1\n" + filled(TRAINER, read)
    config.write_text(under("trainer", "\n" + trainer) + under("orchestrator", filled(ORCHESTRATOR, read)) + more)
    command = [sys.executable, "-m", "meshrl.launch.main", "@", str(config), "--model.name", str(read.model.resolve())]
    command += ["--max-steps", str(read.steps), "--output-dir", str(folder / "origin")]
    return subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_subparsers(dest="what", required=True)
    sites = what.add_parser("sites")
    sites.add_argument("--minutes", type=float, default=60.0)
    sites.add_argument("--quiet-s", type=float, default=30.0, help="between two things that happen (default 30)")
    sites.add_argument("--beside", type=Path, help="the output folder of one-host, for the table")
    sites.add_argument("--calm", action="store_true", help="nothing happens but what shows who fetches what")
    one = what.add_parser("one-host")
    one.add_argument("--steps", type=int, default=200)
    for each in (sites, one):
        each.add_argument("--model", type=Path, required=True)
        each.add_argument("--output-dir", type=Path, required=True)
        each.add_argument("--lr", type=float, default=2e-4)
        each.add_argument("--batch-size", type=int, default=64, help="rollouts a step (default 64)")
        each.add_argument("--dtype", default="float32", help="float32, or bfloat16 for versions as deltas")
    table = what.add_parser("table")
    table.add_argument("folder", type=Path)
    table.add_argument("--beside", type=Path)
    read = parser.parse_args()
    if read.what == "table":
        return show(read.folder / "origin", read.beside)
    if read.what == "one-host":
        return run_one_host(read)
    if reason := why_not():
        print(reason)
        return 2
    return run_sites(read)


if __name__ == "__main__":
    sys.exit(main())
