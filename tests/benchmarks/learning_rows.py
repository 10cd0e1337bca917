"""The rows of bench_learning.py: every example and every algorithm, with the warm-ups and teachers that they need.

A job's commands run one after the other; a row of the table is a job with an algorithm.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

MODEL = "meshrl.environments.reverse_text.model"
RL, SFT = "meshrl.launch.main", "meshrl.sft.main"


@dataclass(frozen=True, kw_only=True)
class Job:
    """Commands that run one after the other, once the jobs that it needs are done. `{name}` in a flag is the folder of
    another job, `{here}` its own, `{teacher}` the URL of the teacher's engine."""

    name: str
    commands: Sequence[Sequence[str]] = ()
    needs: Sequence[str] = ()
    teacher: str | None = None
    """The job whose last weights are served meanwhile."""
    weights: str = "sft/weights/final"
    """Where a job leaves its weights, in its folder."""
    prepare: Callable[[Path], None] | None = None
    """Called with the folder before the last command."""
    algorithm: str | None = None
    """Of a row of the table; None for what rows need."""


def warm_up(
    name: str,
    example: str,
    *,
    data: Sequence[str],
    model: Sequence[str] = (),
    flags: Sequence[str] = (),
    prepare: Callable[[Path], None] | None = None,
) -> Job:
    """Model, demonstrations and `sft`; `example` is its file, `data` the command that writes the demonstrations."""
    train = ["-m", SFT, "@", f"configs/{example}.toml", "--model.name", "{here}/model", "--output-dir", "{here}/sft"]
    if "--data.name" not in flags:
        train += ["--data.name", "{here}/data/train.jsonl", "--val.data.name", "{here}/data/val.jsonl"]
    train += ["--torch-threads", "{cores}", *flags]
    return Job(
        name=name,
        commands=(["-m", MODEL, "{here}/model", *model], ["-m", *data], train),
        prepare=prepare,
    )


def row(name: str, algorithm: str, config: str, start: str, *flags: str, teacher: str | None = None) -> Job:
    """An `rl` run from the weights of the job `start`."""
    run = ["-m", RL, "@", f"configs/{config}.toml", "--model.name", "{" + start + "}/weights/final"]
    run += ["--output-dir", "{here}/run", *flags]
    if teacher is not None and "{teacher}" not in flags:
        run += ["--orchestrator.teacher.client.base-url", "{teacher}"]
    needs = list(dict.fromkeys([start, *([teacher] if teacher else [])]))
    return Job(name=name, commands=[run], needs=needs, teacher=teacher, algorithm=algorithm)


def shown_twice(folder: Path) -> None:
    """Each conversation twice in a row, so that the model learns to follow a demonstration; for opsd."""
    for file in (folder / "data").glob("*.jsonl"):
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        both = [{"messages": 2 * [*row["prompt"], *row["completion"]]} for row in rows]
        file.write_text("".join(json.dumps(row) + "\n" for row in both))


def demonstrations(environment: str, folder: str = "{here}/data") -> list[str]:
    return [f"meshrl.environments.{environment}.demonstrations", folder]


def jobs() -> list[Job]:
    """Every warm-up, teacher and row."""
    held_out = ["--orchestrator.eval.interval", "5"]
    small = ["--max-steps", "20", *held_out]
    keeps = ["--ckpt", "--ckpt.interval", "60", "--ckpt.weights-only"]
    followed = ["--orchestrator.algo.context-tokens", "250", "--inference.max-model-len", "256"]
    mixed = ["--data.name", "{here}/data", "--val.data.name", "{here}/data"]
    large = ["--hidden-size", "256"]
    both = Job(
        name="warm_both",
        commands=(
            ["-m", MODEL, "{here}/model"],
            ["-m", *demonstrations("reverse_text", "{here}/data/reverse_text")],
            ["-m", *demonstrations("letter_sort", "{here}/data/letter_sort")],
            *warm_up("", "two_algorithms/sft", data=(), flags=mixed).commands[2:],
        ),
    )
    return [
        warm_up(
            "large",
            "distillation/teacher",
            data=[*demonstrations("reverse_text"), "--share", "1.0"],
            model=large,
        ),
        both,
        warm_up("warm_reverse", "reverse_text/sft", data=demonstrations("reverse_text")),
        warm_up("warm_memory", "memory_game/sft", data=demonstrations("memory_game")),
        warm_up("warm_trail", "word_trail/sft", data=demonstrations("word_trail"), model=["--tool-calls"]),
        warm_up("warm_sort", "letter_sort/sft", data=demonstrations("letter_sort")),
        warm_up("warm_nim", "nim/sft", data=[*demonstrations("nim"), "--share", "0.5"]),
        warm_up("warm_weak", "distillation/sft", data=demonstrations("reverse_text")),
        Job(
            name="warm_posed",
            commands=(
                ["-m", "posed_reversing", "{here}/data"],
                [*warm_up("", "reverse_text/sft", data=()).commands[2], *POSING],
            ),
            needs=["warm_reverse"],
        ),
        warm_up(
            "warm_shown",
            "reverse_text/sft",
            data=demonstrations("reverse_text"),
            prepare=shown_twice,
            flags=["--max-steps", "550"],
        ),
        warm_up("warm_mix", "reasoning_mix/sft", data=[*REASONING, "{here}/data", "--share", "0.7"]),
        row("reasoning_mix", "grpo", "reasoning_mix/rl", "warm_mix"),
        replace(row("reverse_text", "grpo", "reverse_text/rl", "warm_reverse", *held_out, *keeps), weights=KEPT),
        row("reverse_text_opd", "opd", "distillation/rl", "warm_reverse", *TAUGHT, teacher="reverse_text"),
        row("reverse_text_max_rl", "max_rl", "reverse_text/rl", "warm_reverse", "--orchestrator.algo.type", "max_rl"),
        row("memory_game", "grpo", "memory_game/rl", "warm_memory", "--orchestrator.eval.interval", "10"),
        row("word_trail", "max_rl", "word_trail/rl", "warm_trail", "--orchestrator.algo.type", "max_rl"),
        row("word_trail_echo", "echo", "word_trail/rl", "warm_trail", *ECHOING),
        row("letter_sort", "grpo", "letter_sort/rl", "warm_sort", "--orchestrator.eval.interval", "10"),
        row("nim", "rae", "nim/rl", "warm_nim"),
        row("posed_reversing", "hierarchical_grpo", "reverse_text/rl", "warm_posed", *POSED),
        row("distillation", "opd", "distillation/rl", "warm_weak", teacher="large"),
        row("distillation_by_rewards", "grpo", "reverse_text/rl", "warm_weak", "--max-steps", "200", *held_out),
        row("reverse_text_sft", "sft", "reverse_text/rl", "warm_weak", *small, *IMITATE, teacher="large"),
        row("reverse_text_opsd", "opsd", "reverse_text/rl", "warm_shown", *held_out, *followed, *SELF),
        row(
            "opsd_kept_teacher",
            "opsd",
            "reverse_text/rl",
            "warm_shown",
            *held_out,
            *followed,
            *KEEPING,
            teacher="warm_shown",
        ),
        row("two_algorithms", "opd and grpo", "two_algorithms/rl", "warm_both", teacher="large"),
    ]


REASONING = ("meshrl.environments.reasoning_demonstrations", "configs/reasoning_mix/rl.toml")
POSING = ("--model.name", "{warm_reverse}/weights/final", "--max-steps", "60", "--optim.lr", "1e-3")
POSED = (
    "--orchestrator.algo.type", "hierarchical_grpo",
    "--orchestrator.train.env.0.id", "posed_reversing",
    "--orchestrator.eval.env.0.id", "posed_reversing",
    "--orchestrator.eval.env.0.name", "posed_reversing_held_out",
    "--orchestrator.batch-size", "64",
    "--orchestrator.group-size", "4",
    "--orchestrator.eval.interval", "10",
    "--max-async-level", "1",
    "--max-steps", "20",
)  # fmt: skip
IMITATE = ("--orchestrator.training-mode", "sft", "--orchestrator.teacher.model.name", "{teacher_model}")
ECHOING = ("--orchestrator.algo.type", "echo", "--orchestrator.algo.weight", "0.004")
SELF = (
    "--orchestrator.algo.type", "opsd",
    "--orchestrator.algo.top-k", "16",
    "--trainer.optim.lr", "1e-4",
    "--max-steps", "15",
)  # fmt: skip
KEEPING = (*SELF[:-1], "30", "--orchestrator.algo.teacher.client.base-url", "{teacher}")
TAUGHT = ("--max-steps", "16", "--trainer.optim.lr", "3e-4", "--orchestrator.eval.interval", "2")
KEPT = "run/weights/step_60"
