"""What `make demo` runs: makes a small model, warms it up with `sft`, trains it with `rl`, and reports.

    python -m meshrl.launch.demo [--runs] [--engine embedded|vllm] [--seed N] [--max-async-level N] [--max-steps N]
                                 [--output-dir FOLDER]

It calls the programs with the files of configs/reverse_text, or with --runs (`make demo-runs`) those of
configs/three_runs: three adapters of one model in one mesh.
"""

from __future__ import annotations

import argparse
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import FrameType

from meshrl.core.paths import Layout
from meshrl.core.run_folder import delete_all_but
from meshrl.launch.demo_report import (
    ReportError,
    curves,
    draw,
    installed_versions,
    read_records,
    runs_table,
    summarise,
    table,
    write_summary,
)

PREPARE_DEADLINE_S = 300.0
SFT_DEADLINE_S = 1200.0
RL_DEADLINE_S = 3600.0
END_GRACE_S = 90.0  # longer than rl gives its own programs
STEP_LINE = re.compile(r" step (?P<step>\d+) \|")
VLLM_PYTHON = Path(".tools/vllm/bin/python")  # where `make vllm` puts it
TASKS = ("reverse_text", "letter_sort", "memory_game")
"""Of three runs, which have their names."""
MADE_HERE = frozenset({"model", "data", "sft", "rl", "metrics.jsonl", "summary.json", "reward.png"})


class DemoError(Exception):
    """The message gives the reason and the logs to look at."""


@dataclass(frozen=True, kw_only=True)
class Options:
    engine: str
    seed: int
    max_async_level: int
    max_steps: int | None
    warm_up_steps: int | None
    output_dir: Path
    configs: Path
    runs: bool


@dataclass(frozen=True, kw_only=True)
class Stage:
    name: str
    title: str
    commands: tuple[tuple[str, ...], ...]
    deadline_s: float
    shown_steps: int = 1
    """Of training steps, every so many."""


def parse(arguments: Sequence[str]) -> Options:
    parser = argparse.ArgumentParser(
        prog="demo", description="Trains a small model on the CPU, through the real programs."
    )
    parser.add_argument("--runs", action="store_true", help="three runs beside each other in one mesh")
    parser.add_argument("--engine", choices=("embedded", "vllm"), default="embedded", help="default embedded")
    parser.add_argument("--seed", type=int, default=0, help="seed of the model, its data and the run (default 0)")
    parser.add_argument(
        "--max-async-level", type=int, default=2, help="steps that generation may be ahead of training (default 2)"
    )
    parser.add_argument("--max-steps", type=int, default=None, help="RL steps (default: those of rl.toml)")
    parser.add_argument("--warm-up-steps", type=int, default=None, help="steps of sft (default: those of sft.toml)")
    parser.add_argument("--output-dir", type=Path, help="default outputs/demo, with --runs outputs/demo_runs")
    parser.add_argument(
        "--configs", type=Path, help="folder of sft.toml and rl.toml (default configs/reverse_text or three_runs)"
    )
    read = parser.parse_args(arguments)
    if read.max_async_level < 0 or any(
        steps is not None and steps < 1 for steps in (read.max_steps, read.warm_up_steps)
    ):
        parser.error("--max-async-level must be 0 or more, --max-steps and --warm-up-steps 1 or more")
    if read.runs and read.engine == "vllm":
        parser.error("--runs is for the embedded engine; leave --engine out")
    read.output_dir = read.output_dir or Path("outputs/demo_runs" if read.runs else "outputs/demo")
    read.configs = read.configs or Path("configs/three_runs" if read.runs else "configs/reverse_text")
    return Options(**vars(read))


def stages(options: Options) -> tuple[Stage, ...]:
    out, seed = options.output_dir, str(options.seed)
    python, package = (sys.executable, "-m"), "meshrl.environments"
    data = {task: out / "data" / task for task in TASKS} if options.runs else {"reverse_text": out / "data"}
    names = (out / "data",) * 2 if options.runs else (out / "data" / "train.jsonl", out / "data" / "val.jsonl")
    model_flags = ("--head-dim", "32") if options.engine == "vllm" else ()  # its attention on CPUs has no 40
    sft = (
        _script("sft"), "@", str(options.configs / "sft.toml"),
        "--model.name", str(out / "model"),
        "--data.name", str(names[0]),
        "--val.data.name", str(names[1]),
        "--seed", seed, "--data.seed", seed,
        "--output-dir", str(out / "sft"),
        *(("--max-steps", str(options.warm_up_steps)) if options.warm_up_steps else ()),
    )  # fmt: skip
    rl = (
        _script("rl"), "@", str(options.configs / "rl.toml"),
        *(_vllm(options.configs) if options.engine == "vllm" else ()),
        "--model.name", str(Layout(out / "sft").weights / "final"),
        "--max-async-level", str(options.max_async_level),
        "--seed", seed,
        "--output-dir", str(out / "rl"),
        *(("--max-steps", str(options.max_steps)) if options.max_steps else ()),
    )  # fmt: skip
    return (
        Stage(
            name="prepare",
            title="making the model and the warm-up data",
            commands=(
                (*python, f"{package}.reverse_text.model", str(out / "model"), "--seed", seed, *model_flags),
                *(
                    (*python, f"{package}.{task}.demonstrations", str(folder), "--seed", seed)
                    for task, folder in data.items()
                ),
            ),
            deadline_s=PREPARE_DEADLINE_S,
        ),
        Stage(
            name="sft",
            title="warming the model up with sft",
            commands=(sft,),
            deadline_s=SFT_DEADLINE_S,
            shown_steps=50,
        ),
        Stage(
            name="rl",
            title="training three runs with rl: one mesh, three orchestrators"
            if options.runs
            else "training with rl: five programs over gRPC",
            commands=(rl,),
            deadline_s=RL_DEADLINE_S,
            shown_steps=5,
        ),
    )


def _vllm(configs: Path) -> tuple[str, ...]:
    file = ("@", str(configs / "vllm.toml"))
    if find_spec("vllm") is not None:
        return file
    if not VLLM_PYTHON.exists():
        raise DemoError(f"vLLM is neither installed here nor in {VLLM_PYTHON}; run make vllm, or make demo ENGINE=vllm")
    return (*file, "--inference.python", str(VLLM_PYTHON))


def empty(folder: Path) -> None:
    """Raises DemoError if the folder holds anything but an earlier demo."""
    if not folder.exists():
        return
    strangers = sorted(entry.name for entry in folder.iterdir() if entry.name not in MADE_HERE)
    if strangers:
        raise DemoError(
            f"{folder} holds {', '.join(strangers[:3])}, which no demo made, so it is not emptied; "
            "choose another --output-dir"
        )
    delete_all_but(folder)


def run(stage: Stage, show: Callable[[str], None]) -> float:
    """Returns the seconds. Raises DemoError."""
    started = time.monotonic()
    for command in stage.commands:
        left_s = stage.deadline_s - (time.monotonic() - started)
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        timer = threading.Timer(max(0.0, left_s), _end, [process])
        timer.daemon = True
        timer.start()
        try:
            assert process.stdout is not None  # it is a pipe
            with process.stdout as lines:
                for line in lines:
                    if is_shown(line, stage.shown_steps):
                        show(line)
            code = process.wait(timeout=END_GRACE_S)
        finally:
            timer.cancel()
            _end(process)
        seconds = time.monotonic() - started
        if seconds >= stage.deadline_s:
            raise DemoError(f"{stage.name} did not end within {stage.deadline_s:g} s; is the machine busy otherwise?")
        if code != 0:
            raise DemoError(f"{stage.name} failed with exit code {code}: {' '.join(command)}")
    return time.monotonic() - started


def is_shown(line: str, shown_steps: int) -> bool:
    """Everything but training steps between those shown, of which the first is one."""
    step = STEP_LINE.search(line)
    if step is None or "eval/" in line or "val loss" in line:
        return True
    return int(step["step"]) % shown_steps == 0 or step["step"] == "1"


def demo(options: Options) -> str:
    """Returns the closing table. Raises DemoError or ReportError."""
    for name in ("sft.toml", "rl.toml", *(("vllm.toml",) if options.engine == "vllm" else ())):
        if not (options.configs / name).is_file():
            raise DemoError(f"{options.configs / name} is missing; run from the repository's root or pass --configs")
    out = options.output_dir
    plan = stages(options)
    empty(out)
    out.mkdir(parents=True, exist_ok=True)
    seconds: dict[str, float] = {}
    for stage in plan:
        _say(f"\n== {stage.title}")
        seconds[stage.name] = run(stage, _write)
    folders = {task: Layout(out / "rl").run_folder(task) for task in TASKS} if options.runs else {"": out / "rl"}
    records = {run: read_records(Layout(folder).metrics_jsonl) for run, folder in folders.items()}
    summaries = {
        run: summarise(
            found,
            seconds_by_stage=seconds,
            engine=options.engine,
            max_async_level=options.max_async_level,
            seed=options.seed,
            versions=installed_versions(),
        )
        for run, found in records.items()
    }
    write_summary(summaries, Layout(out).summary_json)
    draw({run or "reverse_text": curves(found) for run, found in records.items()}, out / "reward.png")
    if not options.runs:
        shutil.copyfile(Layout(out / "rl").metrics_jsonl, Layout(out).metrics_jsonl)
    shown = runs_table(summaries) if options.runs else table(summaries[""])
    last = min(int(found[-1]["step"]) for found in records.values())
    return (
        f"\n{shown}\n\n  picture {out / 'reward.png'}, figures {Layout(out).summary_json}, metrics"
        f" {', '.join(str(Layout(folder).metrics_jsonl) for folder in folders.values())}\n"
        f"{looks(next(iter(folders.values())), out / 'rl', last_step=last)}"
    )


def looks(run: Path, mesh: Path, *, last_step: int) -> str:
    """Commands that look into a demo's run and its mesh."""
    script = Path(_script("meshrl"))
    meshrl = str(script.relative_to(Path.cwd()) if script.is_relative_to(Path.cwd()) else script)
    worst = [meshrl, "rollouts", "worst", str(min(30, last_step)), "-o", str(run)]
    return (
        f"  the worst rollout of a step: {shlex.join(worst)}\n"
        f"  everything, in a browser:    {shlex.join([meshrl, 'ui', str(mesh)])}"
    )


def _script(name: str) -> str:
    return str(Path(sysconfig.get_path("scripts")) / name)


def _end(process: subprocess.Popen[str]) -> None:
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(timeout=END_GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()


def _interrupt(signum: int, _: FrameType | None) -> None:
    raise KeyboardInterrupt(signal.Signals(signum).name)


def _say(text: str) -> None:
    _write(text + "\n")


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def main() -> None:
    options = parse(sys.argv[1:])
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        _say(demo(options))
    except (DemoError, ReportError) as error:
        sys.stderr.write(f"demo: {error}\n")
        sys.exit(1)
    except KeyboardInterrupt:
        sys.stderr.write("demo: interrupted\n")
        sys.exit(130)


if __name__ == "__main__":
    main()
