"""`meshrl doctor`: examines this machine, a run's services and its metrics.

With --drift it runs the policy at learning rate 0, where all mismatch of engine and trainer is noise.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import click

from meshrl.cli.command import CliError, HostPort, folder_option, json_option, options_for, print_json, print_table, run
from meshrl.cli.run_folder import RunFolder
from meshrl.diagnosis.causes import Ailment, Observed, diagnose
from meshrl.diagnosis.history import RunSeries
from meshrl.diagnosis.outcome import slower_half
from meshrl.machine.fitness import Diagnosis, open_files, room_of
from meshrl.machine.memory import machine_memory
from meshrl.wire.program_state import run_line

if TYPE_CHECKING:
    from meshrl.client import ChannelOptions

WATCH_S = 60.0
"""For a trainer to send the steps that it keeps."""
LOW_MTU = 1280
CONGESTION_CONTROL = Path("/proc/sys/net/ipv4/tcp_congestion_control")
INTERFACES = Path("/sys/class/net")
LOW_DISK_BYTES = 10 * 2**30
PACKAGES = ("meshrl-client", "meshrl", "grpcio", "protobuf", "torch", "transformers", "verifiers", "vllm")
DRIFT_DEADLINE_S = 1800.0
"""How long one of the runs may take."""
_DRIFT_OFF = ("--no-wandb", "--no-ckpt", "--no-orchestrator.eval")


def examine(folder: RunFolder) -> Iterator[Diagnosis]:
    """Yields what each look finds."""
    looks: tuple[Callable[[], Diagnosis], ...] = (
        _python, open_files, _memory, _shared_memory, lambda: _disk(folder), _gpus, _network,
    )  # fmt: skip
    for look in looks:
        yield look()
    yield from _packages()
    yield from _services(folder)


def _python() -> Diagnosis:
    found = platform.python_version()
    if (3, 11) <= sys.version_info < (3, 14):
        return Diagnosis(what="python", state="ok", found=found)
    return Diagnosis(what="python", state="fail", found=found, remedy="meshrl runs on Python 3.11 to 3.13")


def _memory() -> Diagnosis:
    memory = machine_memory()
    if memory is None:
        return Diagnosis(what="memory", state="warn", found="this system does not report its memory")
    limit = " that a container or job allows" if memory.limited else ""
    total, free = memory.total / 2**30, memory.available / 2**30
    found = f"{total:.1f} GiB{limit}, {free:.1f} GiB free, {os.cpu_count()} CPU cores"
    return Diagnosis(what="memory", state="ok", found=found)


def _shared_memory() -> Diagnosis:
    try:
        usage = shutil.disk_usage("/dev/shm")
    except OSError:  # not on this system
        return Diagnosis(what="/dev/shm", state="ok", found="there is none; versions go through the output folder")
    found = f"{usage.free / 2**30:.1f} GiB free"
    if usage.free < 2**30:
        remedy = "versions that do not fit go through the output folder; in a container: --shm-size"
        return Diagnosis(what="/dev/shm", state="warn", found=found, remedy=remedy)
    return Diagnosis(what="/dev/shm", state="ok", found=found)


def _disk(folder: RunFolder) -> Diagnosis:
    place, free = room_of(folder.path)
    found = f"{free / 2**30:.1f} GiB free at {place}"
    if free < LOW_DISK_BYTES:
        remedy = "checkpoints need room: set ckpt.keep-last, or another output_dir"
        return Diagnosis(what="disk", state="warn", found=found, remedy=remedy)
    return Diagnosis(what="disk", state="ok", found=found)


def _gpus() -> Diagnosis:
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        told = subprocess.run(query, capture_output=True, text=True, timeout=20.0, check=True).stdout
    except FileNotFoundError:
        return Diagnosis(what="GPUs", state="ok", found="none (no nvidia-smi): everything runs on the CPU")
    except (subprocess.SubprocessError, OSError) as error:
        return Diagnosis(
            what="GPUs", state="fail", found=f"nvidia-smi: {error}", remedy="mend the driver, or run on the CPU"
        )
    return Diagnosis(what="GPUs", state="ok", found="; ".join(told.strip().splitlines()) or "none")


def _network() -> Diagnosis:
    """Congestion control and packet size bound a link's speed."""
    try:
        control = CONGESTION_CONTROL.read_text().strip()
        mtus = {each.parent.name: int(each.read_text()) for each in sorted(INTERFACES.glob("*/mtu"))}
    except (OSError, ValueError):  # not Linux
        return Diagnosis(what="network", state="ok", found="what TCP does here cannot be read")
    outside = {name: mtu for name, mtu in mtus.items() if name != "lo"}
    sizes = ", ".join(f"{mtu} of {name}" for name, mtu in outside.items())
    found = f"congestion control {control}; MTU {sizes or 'unknown'}"
    if min(outside.values(), default=LOW_MTU) < LOW_MTU:
        remedy = f"below {LOW_MTU} something narrows packets, such as a tunnel; links between sites are slower for it"
        return Diagnosis(what="network", state="warn", found=found, remedy=remedy)
    remedy = ""
    if control != "bbr":
        fast = "sysctl -w net.ipv4.tcp_congestion_control=bbr"
        remedy = f"on links that lose packets, such as between sites, bbr is many times as fast: {fast}"
    return Diagnosis(what="network", state="ok", found=found, remedy=remedy)


def _packages() -> Iterator[Diagnosis]:
    found = []
    for name in PACKAGES:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:  # this machine may need no more
            continue
    yield Diagnosis(what="packages", state="ok", found=", ".join(found))


def _services(folder: RunFolder) -> Iterator[Diagnosis]:
    from meshrl.cli.status import read_status  # gRPC, which a machine is examined without

    if not folder.path.exists():
        remedy = "to examine a run, name its output folder with -o"
        yield Diagnosis(what="run", state="warn", found=f"there is no folder {folder.path}", remedy=remedy)
        return
    if trouble := folder.ledger_trouble():
        remedy = "move it and the files ledger.sqlite-* away, and start the run again from a checkpoint"
        yield Diagnosis(what="ledger", state="fail", found=f"ledger.sqlite cannot be read: {trouble}", remedy=remedy)
    if not folder.is_running():
        found = f"none is running in {folder.path}"
        if ended_by := folder.why_it_ended() or run_line(folder.states(), time.time()):
            remedy = "meshrl logs has what came before"
            yield Diagnosis(what="run", state="warn", found=f"{found}; it ended by: {ended_by}", remedy=remedy)
        else:
            yield Diagnosis(what="run", state="ok", found=found)
        return
    states = folder.states()
    for row in run(read_status(folder)).rows:
        found = f"{row.state} at {row.address}; {row.detail}"
        if row.service in states and (trouble := states[row.service].trouble(time.time())):
            found += f"; it {trouble}"
        if row.figures.get("suspension"):
            remedy = f"meshrl run resume {row.figures['run_id']} lets it go on"
            yield Diagnosis(what=row.service, state="warn", found=found, remedy=remedy)
            continue
        remedy = "" if row.is_well else "see its log: meshrl logs"
        yield Diagnosis(what=row.service, state="ok" if row.is_well else "fail", found=found, remedy=remedy)


def causes(folder: RunFolder, run: Observed) -> list[Diagnosis]:
    """In the order of `diagnose`; none without metrics."""
    return [
        Diagnosis(what=one.cause, state="warn", found=f"{one.symptom}: {one.evidence}", remedy=_remedy(folder, one))
        for one in diagnose(run)
    ]


async def observed_at(address: str, options: ChannelOptions) -> Observed:
    """From the trainer's last steps alone: the orchestrator's metrics are in its folder. Raises MeshError,
    and CliError where the caller may see no run."""
    from meshrl.client import TrainerClient  # gRPC, which a machine is examined without
    from meshrl.wire.types import StepState

    series = RunSeries()
    async with TrainerClient(address, options) as client, asyncio.timeout(WATCH_S):
        runs = (await client.get_trainer()).runs
        if not runs:
            raise CliError(f"the trainer at {address} shows this caller no run: name a run's folder with -o")
        own = runs[0]
        if own.revision > own.oldest_revision:
            async with aclosing(client.watch_steps(own.run_id, own.oldest_revision)) as events:
                async for event in events:
                    if event.state is StepState.DONE:
                        times = {f"time/{name}": seconds for name, seconds in event.timings_s.items()}
                        series.take({**times, **event.metrics, "step": event.step})
                    if event.revision >= own.revision:
                        break
    return Observed(columns=series.columns)


def _remedy(folder: RunFolder, found: Ailment) -> str:
    program, *path = found.key.split(".")
    value: object = folder.config(program)
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    now = f"{found.key} is {value}" if isinstance(value, int | float | str) and path else found.key
    return f"{now}: {found.remedy}" if now else found.remedy


@dataclass(frozen=True, kw_only=True)
class NoiseFloor:
    """Mismatch of one engine and one kernel: mean and largest |difference| of logprobs, and KL."""

    engine: str
    kernel: str
    changed: str
    steps: int
    mean_abs: float
    most_abs: float
    mean_kl: float
    before: float | None
    """mean_abs of the run's own last steps, whose weights lag behind."""


def measure_drift(folder: RunFolder, steps: int, varied: Sequence[str]) -> list[NoiseFloor]:
    """With the run's configuration, and with each change KEY=VALUE. Raises CliError."""
    config = folder.path / "configs/rl.toml"
    if not config.exists():
        raise CliError(f"{folder.path} has no configs/rl.toml: name the output folder of a run that `rl` started")
    if folder.is_running():
        raise CliError(f"the run in {folder.path} goes on: it and another would share its devices; end it first")
    if find_spec("meshrl.launch") is None:
        raise CliError("--drift starts `rl`, which is not installed here: pip install meshrl")
    return [_measured(folder, config, steps, change) for change in ("", *varied)]


def _measured(folder: RunFolder, config: Path, steps: int, change: str) -> NoiseFloor:
    key, _, value = change.partition("=")
    place = next(path for number in itertools.count(1) if not (path := folder.path / f"drift/{number}").exists())
    command = [sys.executable, "-m", "meshrl.launch.main", "@", str(config), "--output-dir", str(place), *_DRIFT_OFF]
    command += ["--max-steps", str(steps), "--trainer.optim.lr", "0"]
    if saved := folder.saved_steps():
        command += ["--model.name", str(folder.weights / f"step_{saved[-1]}")]
    if change:
        command += [f"--{key}", value]
    click.echo(f"{steps} steps at learning rate 0{f' with {change}' if change else ''}, in {place}", err=True)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DRIFT_DEADLINE_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise CliError(
            f"no end within {DRIFT_DEADLINE_S:.0f} s; see meshrl logs -o {place}, or take fewer --steps"
        ) from error
    if done.returncode:
        last = (done.stderr or done.stdout).strip().splitlines()[-1:]
        raise CliError(f"the run ended with {done.returncode}: {' '.join(last)}; see meshrl logs -o {place}")
    own = folder.history().series.columns.get("mismatch_abs/all/mean")
    return noise_floor(RunFolder(place), change, before=None if own is None else statistics.fmean(own.values[-5:]))


def noise_floor(made: RunFolder, change: str, *, before: float | None) -> NoiseFloor:
    """Of a run at learning rate 0. Raises CliError without mismatch metrics."""
    columns = made.history().series.columns
    found = [columns.get(f"mismatch_{name}") for name in ("abs/all/mean", "abs/all/max", "kl/all/mean")]
    mean_abs, most_abs, mean_kl = ([] if column is None else list(column.values) for column in found)
    if not mean_abs:
        raise CliError(f"{made.path} has no step with mismatch_abs: see meshrl logs -o {made.path}")
    return NoiseFloor(
        engine=str(made.config("inference").get("engine", "?")),
        kernel=str(made.config("trainer").get("model", {}).get("attn", "?")),
        changed=change or "-",
        steps=len(mean_abs),
        mean_abs=statistics.fmean(mean_abs),
        most_abs=max(most_abs),
        mean_kl=statistics.fmean(mean_kl),
        before=before,
    )


def print_floors(floors: Sequence[NoiseFloor]) -> None:
    print_table(
        ("engine", "attention", "changed", "steps", "mean |diff|", "most |diff|", "mean KL", "in the run"),
        [
            (one.engine, one.kernel, one.changed, one.steps, f"{one.mean_abs:.2e}", f"{one.most_abs:.2e}",
             f"{one.mean_kl:.2e}", None if one.before is None else f"{one.before:.2e}")
            for one in floors
        ],
    )  # fmt: skip


@click.command()
@folder_option
@click.option("--address", type=HostPort(), metavar="HOST:PORT",
              help="A trainer, where its run's folder is on another machine.")  # fmt: skip
@json_option
@click.option("--drift", is_flag=True, help="Run the policy at learning rate 0, and print the noise of its mismatch.")
@click.option("--steps", type=click.IntRange(min=1), default=3, show_default=True, help="Of --drift.")
@click.option("--vary", "varied", multiple=True, metavar="KEY=VALUE",
              help="With --drift, run again with this key of rl, such as trainer.model.attn=sdpa.")  # fmt: skip
def doctor(
    folder: RunFolder, address: str | None, as_json: bool, drift: bool, steps: int, varied: tuple[str, ...]
) -> None:
    """Examine this machine and the run in the output folder, one that is over as well.

    Lists causes for a reward that is flat, a loss of 0, GPUs that idle and the like, the one that explains most first,
    with the evidence and the key to change. Exits with 1 when something fails.

    --drift starts a short run of the same configuration, with the newest saved weights where there are some.
    """
    if varied and not drift:
        raise click.UsageError("--vary is of --drift: give that as well")
    for change in varied:
        if not all(change.partition("=")):
            raise click.UsageError(f"--vary must be KEY=VALUE, such as trainer.model.attn=sdpa, got {change!r}")
    if drift:
        floors = measure_drift(folder, steps, varied)
        if as_json:
            print_json([asdict(floor) for floor in floors])
        else:
            print_floors(floors)
        return
    if address:
        found = causes(folder, run(observed_at(address, options_for(folder))))
        if as_json:
            print_json([asdict(one) for one in found])
        else:
            _print_causes(address, found)
        return
    observed = folder.observed()
    machine, found = list(examine(folder)), causes(folder, observed)
    if as_json:
        print_json([asdict(diagnosis) for diagnosis in [*machine, *found]])
    else:
        print_table(
            ("what", "state", "found", "what to do"),
            [(diagnosis.what, diagnosis.state, diagnosis.found, diagnosis.remedy) for diagnosis in machine],
        )
        died = any(diagnosis.what == "run" and diagnosis.state != "ok" for diagnosis in machine)
        if found or folder.last_step() is not None:
            click.echo()
            if found or not died:
                _print_causes(str(folder.path), found)
            if line := slower_half(observed):
                click.echo(line)
    raise SystemExit(1 if any(diagnosis.state == "fail" for diagnosis in machine) else 0)


def _print_causes(place: str, found: Sequence[Diagnosis]) -> None:
    if not found:
        click.echo(f"nothing is wrong with the run of {place}")
        return
    click.echo(f"what is wrong with the run of {place}, the cause that explains most first:")
    for rank, one in enumerate(found, 1):
        click.echo(f"{rank}. {one.what}: {one.found}\n   {one.remedy}")
