"""`rl` beside TRL's GRPOTrainer on the CPU: the same model, prompts, reward, batch and optimizer; seconds a step.

    python -m venv .tools/trl && .tools/trl/bin/pip install trl==1.16.0 torch transformers
    python tests/benchmarks/bench_trl.py --trl-python .tools/trl/bin/python --sizes 1M 30M

The two take turns, two runs each, so that what else the machine does hits both. Seconds a step are the median of the
steps after the first few; CPU seconds are those of all processes of a side over the same steps, without the start. A
model of random weights replies as long as it may, so that both sides sample and train as many tokens.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SHAPES = {"1M": {}, "30M": {"hidden_size": 512, "num_layers": 9, "num_heads": 8, "num_key_value_heads": 4}}
FIRST = 3  # steps that are not timed
GROUP = 8
RUN_DEADLINE_S = 1500.0


def make(folder: Path, size: str) -> None:
    """The model, and the prompts as messages with their answers."""
    from meshrl.environments.reverse_text.sentences import SYSTEM_PROMPT, sentences

    from meshrl_examples.model import create_model

    create_model(folder / "model", seed=0, **SHAPES[size])
    rows = [
        {
            "prompt": [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": text}],
            "answer": text[::-1],
        }
        for text in sentences("train")
    ]
    (folder / "prompts.json").write_text(json.dumps(rows))


def ours(folder: Path, out: Path, options: argparse.Namespace) -> dict[str, float]:
    """Runs `rl`, and adds up the CPU time of all its processes between two steps."""
    flags = {
        "model.name": folder / "model", "output-dir": out, "max-steps": options.steps, "seed": 0,
        "max-async-level": options.level, "trainer.seq-len": 2048, "trainer.torch-threads": options.trainer_threads,
        "trainer.optim.lr": 1e-5, "trainer.optim.weight-decay": 0.0, "inference.max-model-len": 128,
        "inference.torch-threads": 1, "inference.engine": "embedded", "rollout.seq-len": 128,
        "orchestrator.batch-size": options.batch, "orchestrator.group-size": GROUP, "orchestrator.seq-len": 2048,
        "orchestrator.sampling.max-tokens": options.tokens, "orchestrator.sampling.temperature": 1.0,
        "orchestrator.advantage.type": "grpo", "orchestrator.train.env.0.id": "reverse_text",
    }  # fmt: skip
    command = [sys.executable, "-m", "meshrl.launch.main", "--no-orchestrator.filters.zero-signal", *options.flags]
    for key, value in flags.items():
        command += [f"--{key}", str(value)]
    seen: dict[int, dict[str, float]] = {}
    with (folder / "console.txt").open("wb") as console:
        process = subprocess.Popen(command, stdout=console, stderr=subprocess.STDOUT)
        end = time.monotonic() + RUN_DEADLINE_S
        try:
            while process.poll() is None and time.monotonic() < end:
                steps = records(out)
                if steps and steps[-1]["step"] in (FIRST, options.steps - 1):
                    seen.setdefault(steps[-1]["step"], cpu_seconds(process.pid))
                time.sleep(0.05)
        finally:
            process.terminate()
            process.wait(90)
    steps = records(out)
    if process.returncode or len(seen) < 2:
        sys.exit((folder / "console.txt").read_text()[-3000:])
    timed = steps[FIRST : options.steps - 1]
    used = {name: each - seen[FIRST].get(name, 0.0) for name, each in seen[options.steps - 1].items()}
    if options.programs:
        for name, each in sorted(used.items(), key=lambda item: -item[1]):
            print(f"    {each / len(timed):.2f} CPU s a step: {name}")
    return {
        "step_s": statistics.median(record["time/step"] for record in timed),
        "mean_s": sum(record["time/step"] for record in timed) / len(timed),
        "cpu_s": sum(used.values()) / len(timed),
        "tokens": options.batch * sum(record["completion_len/all/mean"] for record in timed) / len(timed),
    }


def records(out: Path) -> list[dict[str, Any]]:
    """The records of steps so far."""
    path = out / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    read = [json.loads(line) for line in lines if line.endswith("\n")]
    return [record for record in read if "time/step" in record]


def cpu_seconds(root: int) -> dict[str, float]:
    """CPU seconds of a process and all below it, by the words of its command line and its number; Linux only."""
    ticks, parents, taken = os.sysconf("SC_CLK_TCK"), {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
        except OSError:  # it has just ended
            continue
        pid = int(folder.name)
        parents[pid] = int(fields[1])
        taken[pid] = (f"{' '.join(words[1:4])[:60]} ({pid})", (int(fields[11]) + int(fields[12])) / ticks)

    def below(pid: int) -> bool:
        return pid == root or (pid in parents and below(parents[pid]))

    return {name: seconds for pid, (name, seconds) in taken.items() if below(pid)}


def theirs(python: Path, folder: Path, out: Path, options: argparse.Namespace) -> dict[str, float]:
    """Runs this file under the interpreter that has TRL."""
    out.mkdir()
    command = [str(python), __file__, "--side", str(folder), "--out", str(out)]
    for key in ("steps", "batch", "tokens", "threads"):
        command += [f"--{key}", str(getattr(options, key))]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=RUN_DEADLINE_S, check=False)
    if ran.returncode:
        sys.exit(ran.stderr[-3000:])
    read: dict[str, float] = json.loads((out / "result.json").read_text())
    return read


def side(folder: Path, out: Path, options: argparse.Namespace) -> None:
    """TRL's half, under its own interpreter."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(options.threads)
    ends: list[tuple[float, float]] = []

    class Clock(TrainerCallback):  # type: ignore[misc]  # TRL is not there when this is checked
        def on_step_end(self, *args, **kwargs):  # type: ignore[no-untyped-def]  # as its base
            ends.append((time.perf_counter(), time.process_time()))

    lengths: list[int] = []

    def reward(completions, answer, completion_ids, **kwargs):  # type: ignore[no-untyped-def]  # as TRL calls it
        lengths.append(sum(map(len, completion_ids)))
        return [similarity(one[0]["content"], right) for one, right in zip(completions, answer, strict=True)]

    config = GRPOConfig(
        output_dir=str(out), max_steps=options.steps, per_device_train_batch_size=options.batch, num_generations=GROUP,
        max_completion_length=options.tokens, temperature=1.0, beta=0.0, loss_type="grpo", num_iterations=1,
        learning_rate=1e-5, lr_scheduler_type="constant", warmup_steps=0, weight_decay=0.0, max_grad_norm=1.0,
        optim="adamw_torch", gradient_checkpointing=False, logging_steps=1, save_strategy="no", report_to=[],
        use_cpu=True, bf16=False, fp16=False, seed=0, disable_tqdm=True,
    )  # fmt: skip
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32),
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list(json.loads((folder / "prompts.json").read_text())),
        processing_class=AutoTokenizer.from_pretrained(folder / "model"),
        callbacks=[Clock()],
    )
    trainer.train()
    timed = ends[FIRST - 1 :]
    steps = [after[0] - before[0] for before, after in itertools.pairwise(timed)]
    result = {
        "step_s": statistics.median(steps),
        "mean_s": sum(steps) / len(steps),
        "cpu_s": (timed[-1][1] - timed[0][1]) / len(steps),
        "tokens": sum(lengths[FIRST:]) / len(lengths[FIRST:]),
    }
    (out / "result.json").write_text(json.dumps(result))


def similarity(reply: str, answer: str) -> float:
    """The reward of reverse_text, which is not installed beside TRL."""
    places = dict.fromkeys(answer, 0)
    for column, character in enumerate(answer):
        places[character] |= 1 << column
    every = row = (1 << len(answer)) - 1
    for character in reply:
        here = row & places.get(character, 0)
        row = (row + here | row - here) & every
    return 2 * (len(answer) - row.bit_count()) / max(len(reply) + len(answer), 1)


def compare(python: Path, options: argparse.Namespace) -> None:
    print("| model | who | seconds a step, median (mean), each run | CPU seconds a step, each run | tokens a step |")
    print("|---|---|---|---|---|", flush=True)
    for size in options.sizes:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            make(folder, size)
            rounds: dict[str, list[dict[str, float]]] = {"rl": [], "TRL": []}
            for number in range(options.rounds):
                rounds["rl"].append(ours(folder, folder / f"ours_{number}", options))
                print(f"{size} rl: {rounds['rl'][-1]}", file=sys.stderr, flush=True)
                rounds["TRL"].append(theirs(python, folder, folder / f"trl_{number}", options))
                print(f"{size} TRL: {rounds['TRL'][-1]}", file=sys.stderr, flush=True)
        for who, runs in rounds.items():
            steps = ", ".join(f"{run['step_s']:.2f} ({run['mean_s']:.2f})" for run in runs)
            cpu = ", ".join(f"{run['cpu_s']:.2f}" for run in runs)
            print(f"| {size} | {who} | {steps} | {cpu} | {runs[-1]['tokens']:.0f} |")
        wall, used = ratio(rounds, "step_s"), ratio(rounds, "cpu_s")
        print(f"| {size} | rl / TRL | **{wall:.2f}** ({ratio(rounds, 'mean_s'):.2f}) | **{used:.2f}** | |", flush=True)


def ratio(rounds: dict[str, list[dict[str, float]]], key: str) -> float:
    mine, trl = (sum(run[key] for run in rounds[who]) for who in ("rl", "TRL"))
    return mine / trl


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare rl with TRL's GRPOTrainer on the CPU.")
    parser.add_argument("--trl-python", type=Path, help="an interpreter that has trl")
    parser.add_argument("--sizes", nargs="+", choices=SHAPES, default=list(SHAPES), help="models (default: all)")
    parser.add_argument("--steps", type=int, default=15, help=f"steps of a run, {FIRST} not timed (default 15)")
    parser.add_argument("--batch", type=int, default=64, help=f"completions a step, in groups of {GROUP} (default 64)")
    parser.add_argument("--tokens", type=int, default=40, help="most tokens of a completion (default 40)")
    parser.add_argument("--level", type=int, default=1, help="max_async_level of rl (default 1)")
    parser.add_argument("--threads", type=int, default=2, help="torch threads of TRL (default 2)")
    parser.add_argument(
        "--trainer-threads", type=int, default=1, help="torch threads of rl's trainer (default 1, as its engine has)"
    )
    parser.add_argument("--rounds", type=int, default=2, help="runs of each (default 2)")
    parser.add_argument("--programs", action="store_true", help="print the CPU seconds a step of each process of rl")
    parser.add_argument("--flags", nargs=argparse.REMAINDER, default=[], help="more flags of rl; comes last")
    parser.add_argument("--side", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side is not None:
        side(options.side, options.out, options)
    elif options.trl_python is None:
        parser.error("--trl-python must name an interpreter that has trl")
    else:
        compare(options.trl_python, options)


if __name__ == "__main__":
    main()
