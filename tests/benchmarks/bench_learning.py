"""What each example and each algorithm learns on a CPU: held-out reward before and after, minutes and CPU minutes.

A row is an `rl` run by the files of configs/ from a model that `sft` warmed up; rows of one warm-up share it, and rows
with a teacher have its engine beside them. Each job runs in a folder and on cores of its own, `--jobs` at a time,
without GPUs. Before and after are the run's own evaluations of its first and last version. What has not ended when
`--at-most-s` is over is stopped and said as far as it came.

Usage: bench_learning.py OUTPUT [--jobs N] [--cores-each N] [--only ROW ...] [--at-most-s SECONDS] [--max-steps N]
       bench_learning.py --list
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "support"))

from engine_load import is_healthy
from learning_rows import Job, jobs
from local_ports import free_port
from meshrl.launch.demo_report import EVAL_SCORE, read_records

ROOT = Path(__file__).resolve().parents[2]
TASKSETS = ROOT / "tests" / "benchmarks" / "tasksets"
ENGINE = "meshrl.inference.main"
ENGINE_DEADLINE_S = 180.0
END_GRACE_S = 30.0


@dataclass(kw_only=True)
class Outcome:
    """What became of a job."""

    name: str
    algorithm: str | None
    state: str = "waiting"  # waiting, running, done, failed, stopped, skipped
    minutes: float = 0.0
    cpu_minutes: float = 0.0
    held_out: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    """Of each environment that is evaluated, version and mean reward."""
    warm_up_cpu_minutes: float = 0.0
    note: str = ""


class Bench:
    """Runs jobs, each on cores of its own; threads take the next one whose needs are met."""

    def __init__(self, todo: Sequence[Job], output: Path, cores: Sequence[Sequence[int]], at_most_s: float) -> None:
        self.jobs = {job.name: job for job in todo}
        self.outcomes = {job.name: Outcome(name=job.name, algorithm=job.algorithm) for job in todo}
        self._output, self._cores = output, cores
        self._ends_at = time.monotonic() + at_most_s
        self._changed = threading.Condition()

    def run(self) -> None:
        threads = [threading.Thread(target=self._work, args=(cores,)) for cores in self._cores]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _work(self, cores: Sequence[int]) -> None:
        while (job := self._next()) is not None:
            outcome, began_s = self.outcomes[job.name], time.monotonic()
            try:
                self._run(job, cores, outcome)
                state, note = "done", ""
            except TimeoutError:
                state, note = "stopped", "the time was over"
            except (RuntimeError, OSError) as error:
                state, note = "failed", str(error)
            with self._changed:
                outcome.state, outcome.note = state, note
                outcome.minutes = (time.monotonic() - began_s) / 60
                if job.algorithm:
                    outcome.held_out = held_out(self._output / job.name / "run" / "metrics.jsonl")
                print(f"{job.name}: {state} after {outcome.minutes:.1f} minutes {note[-600:]}", flush=True)
                self._changed.notify_all()

    def _next(self) -> Job | None:
        """The next job to run, which is then running; waits for the needs of others; None when nothing is left."""
        with self._changed:
            while True:
                waiting = [job for job in self.jobs.values() if self.outcomes[job.name].state == "waiting"]
                if not waiting or time.monotonic() > self._ends_at:
                    return None
                for job in waiting:
                    states = {self.outcomes[need].state for need in job.needs}
                    if states <= {"done"}:
                        self.outcomes[job.name].state = "running"
                        return job
                    if states & {"failed", "stopped", "skipped"}:
                        self.outcomes[job.name].state = "skipped"
                self._changed.wait(1.0)

    def _run(self, job: Job, cores: Sequence[int], outcome: Outcome) -> None:
        here = self._output / job.name
        here.mkdir(parents=True)
        places = {name: str(self._output / name / "sft") for name in self.jobs}
        places |= {"here": str(here), "cores": str(len(cores) or 1)}
        if job.teacher is not None:
            weights = self._output / job.teacher / self.jobs[job.teacher].weights
            with serving(weights, here, cores) as url:
                self._commands(job, cores, outcome, here, {**places, "teacher": url, "teacher_model": str(weights)})
        else:
            self._commands(job, cores, outcome, here, places)

    def _commands(
        self, job: Job, cores: Sequence[int], outcome: Outcome, here: Path, places: Mapping[str, str]
    ) -> None:
        for number, command in enumerate(job.commands):
            if job.prepare is not None and number == len(job.commands) - 1:
                job.prepare(here)
            filled = [filled_in(part, places) for part in command]
            log = here / f"command_{number}.log"
            outcome.cpu_minutes += run_command(filled, log, cores, self._ends_at) / 60


def filled_in(part: str, places: Mapping[str, str]) -> str:
    for name, value in places.items():
        part = part.replace("{" + name + "}", value)
    return part


def started(command: Sequence[str], log: Path, cores: Sequence[int]) -> subprocess.Popen[bytes]:
    """A program of this project on some cores, without GPUs and without a network."""
    path = os.pathsep.join([str(TASKSETS), *filter(None, [os.environ.get("PYTHONPATH")])])
    hidden = {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    pinned = ["taskset", "-c", ",".join(map(str, cores))] if cores else []
    with log.open("wb") as out:
        return subprocess.Popen(
            [*pinned, sys.executable, *command],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=os.environ | hidden,
            start_new_session=True,
            cwd=ROOT,
        )


def run_command(command: Sequence[str], log: Path, cores: Sequence[int], ends_at: float) -> float:
    """CPU seconds of a command and what it started. Raises TimeoutError when the time is over, and RuntimeError with
    the end of its output when it fails."""
    process = started(command, log, cores)
    try:
        while True:
            pid, status, usage = os.wait4(process.pid, os.WNOHANG)
            if pid:
                break
            if time.monotonic() > ends_at:
                raise TimeoutError
            time.sleep(0.2)
        process.returncode = os.waitstatus_to_exitcode(status)
    finally:
        end(process)
    if process.returncode != 0:
        raise RuntimeError("\n".join(log.read_text(errors="replace").splitlines()[-8:]))
    return usage.ru_utime + usage.ru_stime


def end(process: subprocess.Popen[bytes]) -> None:
    """Ends a program, which ends what it started; what is left of its session is killed."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(END_GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    with suppress(ProcessLookupError):  # nothing was left
        os.killpg(process.pid, signal.SIGKILL)


@contextmanager
def serving(model: Path, folder: Path, cores: Sequence[int]) -> Iterator[str]:
    """The URL of an engine with a teacher's weights, once it answers."""
    port = free_port()
    command = ["-m", ENGINE, "--model.name", model, "--server.port", port, "--max-model-len", 256]
    command += ["--torch-threads", 1, "--output-dir", folder / "teacher"]
    log = folder / "teacher.log"
    engine = started([*map(str, command)], log, cores)
    try:
        give_up_at = time.monotonic() + ENGINE_DEADLINE_S
        while not is_healthy(f"http://127.0.0.1:{port}"):
            if engine.poll() is not None or time.monotonic() > give_up_at:
                raise RuntimeError(f"the teacher's engine did not start; see {log}")
            time.sleep(0.5)
        yield f"http://127.0.0.1:{port}"
    finally:
        end(engine)


def held_out(metrics: Path) -> dict[str, list[tuple[int, float]]]:
    """Version and mean reward of each evaluation, by environment."""
    scores: dict[str, dict[int, float]] = {}
    for record in read_records(metrics) if metrics.exists() else ():
        for name, value in record.items():
            if (match := EVAL_SCORE.fullmatch(name)) and value is not None:
                version = int(record.get("eval/version", record["step"]))
                scores.setdefault(match["environment"], {})[version] = float(value)
    return {environment: sorted(points.items()) for environment, points in scores.items()}


def table(bench: Bench) -> str:
    """The rows as Markdown, a line for each environment that is evaluated."""
    lines = [
        "| row | algorithm | held out | before | after | steps | minutes | CPU minutes | of the warm-up | |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for job in bench.jobs.values():
        outcome = bench.outcomes[job.name]
        if job.algorithm is None:
            continue
        spent = f"{outcome.minutes:.1f} | {outcome.cpu_minutes:.1f} | {outcome.warm_up_cpu_minutes:.1f}"
        state = "" if outcome.state == "done" else outcome.state
        for environment, points in outcome.held_out.items() or {"-": []}.items():
            scores = f"{points[0][1]:.3f} | {points[-1][1]:.3f} | {points[-1][0]}" if points else "- | - | -"
            lines.append(f"| {job.name} | {job.algorithm} | {environment} | {scores} | {spent} | {state} |")
    return "\n".join(lines)


def needed(every: Sequence[Job], rows: Sequence[str] | None) -> list[Job]:
    """The rows that were asked for and what they need, in order."""
    by_name = {job.name: job for job in every}
    wanted = [job.name for job in every if job.algorithm] if rows is None else list(rows)
    if strangers := [name for name in wanted if name not in by_name]:
        raise SystemExit(f"no row is called {', '.join(strangers)}; there are {', '.join(by_name)}")
    kept = set(wanted) | {need for name in wanted for need in by_name[name].needs}
    return [job for job in every if job.name in kept]


def shortened(job: Job, max_steps: int) -> Job:
    """The job with so many steps in its last command, which is the one that trains."""
    *before, train = job.commands
    return replace(job, commands=(*before, [*train, "--max-steps", str(max_steps)]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, nargs="?", help="a new folder, with a folder for each job")
    parser.add_argument("--jobs", type=int, default=1, help="how many run at once (default 1)")
    parser.add_argument("--cores-each", type=int, default=2, help="cores of each; 0 pins nothing (default 2)")
    parser.add_argument("--only", nargs="+", metavar="ROW", help="rows to run (default: all)")
    parser.add_argument("--at-most-s", type=float, default=3 * 3600.0, help="seconds after which all is stopped")
    parser.add_argument("--max-steps", type=int, help="steps of every warm-up and run, to see whether they work")
    parser.add_argument("--list", action="store_true", help="say which rows there are")
    given = parser.parse_args()
    if given.list or given.output is None:
        print("\n".join(f"{job.name}: {job.algorithm}" for job in jobs() if job.algorithm))
        return
    free = sorted(os.sched_getaffinity(0))
    if given.jobs * given.cores_each > len(free):
        parser.error(f"{given.jobs} jobs of {given.cores_each} cores need more than the {len(free)} that there are")
    cores = [free[at * given.cores_each : (at + 1) * given.cores_each] for at in range(given.jobs)]
    output = given.output.resolve()
    output.mkdir(parents=True)
    todo = needed(jobs(), given.only)
    if given.max_steps is not None:
        todo = [shortened(job, given.max_steps) for job in todo]
    bench = Bench(todo, output, cores, given.at_most_s)
    bench.run()
    for job in bench.jobs.values():
        spent = [bench.outcomes[need].cpu_minutes for need in job.needs]
        bench.outcomes[job.name].warm_up_cpu_minutes = sum(spent)
    (output / "learning.json").write_text(json.dumps([asdict(each) for each in bench.outcomes.values()], indent=1))
    (output / "learning.md").write_text(table(bench) + "\n")
    print(table(bench))


if __name__ == "__main__":
    main()
