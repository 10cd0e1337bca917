"""A whole RL run between its two sides alone: sampled and trained tokens/s, idle shares and efficiency. Prints a table.

The model has the shape of --shape and random weights. Prompts have 128 to 512 tokens. Completions are `equal`, of 2,048
tokens each (the worst case: every rollout of a wave ends at once), or `ragged`: each token ends its completion with the
same small chance, so that lengths are geometric, a thousand on average but cut at 2,048. Each side is first measured
alone, at the same time on its own GPU, by `trainer --bench` and `inference --bench`; `rl --bench` then says how near
the run comes to the slower of the two (meshrl.orchestrator.bench.summary).

    python tests/benchmarks/bench_run.py --shape qwen3-0.6b --trainer-gpus 0 --engine-gpus 1
    python tests/benchmarks/bench_run.py --shape qwen3-4b --batch-size 256 --levels 2 -- --trainer.seq-len 32768
    python tests/benchmarks/bench_run.py --trainer-gpus 0 --engine-gpus 0 -- --inference.gpu-memory-utilization 0.4
    python tests/benchmarks/bench_run.py --tiny          # the embedded engine and a small model, on this CPU

What follows `--` goes to every run. An alone rate that lies in the folder already is not measured again. Where both
sides share their GPUs they are measured one after the other, and `efficiency` is the summary's `by_turns`.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from meshrl.core.torch_environment import VISIBLE_GPUS
from meshrl.launch.gpus import visible
from rollout_paths import save_tokenizer

HERE = Path(__file__).parent
SHAPES = HERE / "shapes"
TINY = {
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "vocab_size": 4096,
    "head_dim": 32,
}
PROMPT_CHARACTERS = (108, 236, 364, 490)  # the template adds some twenty tokens, a character a token
LONGEST_PROMPT, MEAN_PROMPT = 512, 320
MOST_ENDS = 120  # vLLM takes no more than 128 tokens that end a completion
COLUMNS = (
    ("sampled/s", "sampled_tokens_per_s", "{:,.0f}"),
    ("trained/s", "trained_tokens_per_s", "{:,.0f}"),
    ("trainer idle", "trainer_idle", "{:.1%}"),
    ("engines idle", "engines_idle", "{:.1%}"),
    ("MFU", "mfu", "{:.1%}"),
    ("GiB", "peak_memory_gib", "{:.1f}"),
    ("step s", "step_s", "{:.2f}"),
    ("engines alone", "engines_alone_tokens_per_s", "{:,.0f}"),
    ("trainer alone", "trainer_alone_tokens_per_s", "{:,.0f}"),
    ("efficiency", "efficiency", "{:.1%}"),
)


def make_model(shape: str | None, folder: Path, *, ragged: bool, mean_tokens: int) -> Path:
    """A model folder; where completions are to be ragged, one in `mean_tokens` of its tokens ends them."""
    if (folder / "config.json").exists():
        return folder
    fields = json.loads((SHAPES / (shape or "qwen3-0.6b") / "config.json").read_text())
    config = AutoConfig.for_model(**fields | ({} if shape else TINY))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16 if shape else torch.float32)
    model.to_empty(device=device)
    torch.manual_seed(0)
    model.initialize_weights()
    model.tie_weights()
    count = min(MOST_ENDS, config.vocab_size // mean_tokens) if ragged else 0
    ends = range(config.vocab_size // 2, config.vocab_size // 2 + count)
    model.generation_config = GenerationConfig(eos_token_id=[2, *ends])
    model.config.eos_token_id = [2, *ends]
    model.save_pretrained(folder)
    save_tokenizer(folder, config.vocab_size)
    return folder


def environments(characters: Sequence[int]) -> list[str]:
    """Flags for one environment a length of prompt."""
    flags: list[str] = []
    for place, length in enumerate(characters):
        key = f"--orchestrator.train.env.{place}"
        flags += [
            f"{key}.id",
            "bench_words",
            f"{key}.name",
            f"words_{length}",
            f"{key}.args",
            f'{{"characters": {length}}}',
        ]
    return flags


def start(module: str, flags: Sequence[str], *, gpus: Sequence[int], log: Path) -> subprocess.Popen[bytes]:
    """Starts one of our programs where it sees `gpus` only."""
    path = os.pathsep.join(filter(None, (str(HERE / "tasksets"), os.environ.get("PYTHONPATH"))))
    seen = {VISIBLE_GPUS: ",".join(visible(os.environ)[gpu] for gpu in gpus)} if gpus else {}
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as file:
        return subprocess.Popen(
            [sys.executable, "-m", module, *flags],
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": path, **seen},
        )


def end(program: subprocess.Popen[bytes], log: Path, deadline_s: float) -> bool:
    """Waits for a program; whether it ended well. The end of its log is printed where it did not."""
    try:
        code: int | None = program.wait(deadline_s)
    except subprocess.TimeoutExpired:
        program.terminate()
        program.wait(60.0)
        code = None
    if code != 0:
        print(f"{log}: {'no end in time' if code is None else f'exit code {code}'}\n{log.read_text()[-3000:]}")
    return code == 0


def measure_alone(model: Path, folder: Path, options: argparse.Namespace, longest: int) -> None:
    """Leaves trainer.json and inference.json of the two sides in `folder`: measured at once, or by turns on one GPU."""
    shortest = longest if folder.name == "equal" else min(128, longest // 2)
    mean = str(MEAN_PROMPT + (shortest + longest) // 2)
    trainer = ["--bench.random-weights", "--bench.rows", str(options.rows), "--bench.lengths", "variable"]
    trainer += ["--bench.warmup-steps", "6"]  # every length has its kernels planned once
    trainer += ["--bench.median-length", mean, "--seq-len", str(options.seq_len)]
    engine = ["--bench.requests", str(options.batch_size * 4), "--bench.prompt-tokens", str(MEAN_PROMPT)]
    engine += ["--bench.min-tokens", str(shortest), "--bench.max-tokens", str(longest), "--engine", options.engine]
    engine += ["--max-model-len", str(LONGEST_PROMPT + longest)]
    sides = {"trainer": [*trainer, *options.trainer_flags], "inference": [*engine, *options.engine_flags]}
    started = []
    for side, flags in sides.items():
        if (folder / f"{side}.json").exists():
            continue
        gpus = options.trainer_gpus if side == "trainer" else options.engine_gpus
        common = ["--model.name", str(model), "--output-dir", str(folder / side)]
        common += ["--bench.json-path", str(folder / f"{side}.json")]
        log = folder / f"{side}.log"
        started.append((start(f"meshrl.{side}.main", [*common, *flags], gpus=gpus, log=log), log))
        if shared(options):
            end(*started.pop(), options.deadline_s)
    for program, log in started:
        end(program, log, options.deadline_s)


def shared(options: argparse.Namespace) -> bool:
    """Whether trainer and engine work on the same GPUs."""
    return bool(set(options.trainer_gpus) & set(options.engine_gpus))


def run(model: Path, folder: Path, options: argparse.Namespace, *, level: int, longest: int) -> dict[str, Any] | None:
    """One `rl --bench`, stopped at the deadline if it has not ended; what bench/run.json says, or None."""
    output = folder / f"level_{level}{options.label}"
    shutil.rmtree(output, ignore_errors=True)
    (output / "bench").mkdir(parents=True)
    for side in ("trainer", "inference"):
        if (folder / f"{side}.json").exists():
            shutil.copy(folder / f"{side}.json", output / "bench" / f"{side}.json")
    gpus = list(dict.fromkeys([*options.trainer_gpus, *options.engine_gpus]))
    trainer, engine = (
        ",".join(str(gpus.index(gpu)) for gpu in chosen) for chosen in (options.trainer_gpus, options.engine_gpus)
    )
    flags = ["--bench", "--max-steps", str(options.steps), "--max-async-level", str(level), "--output-dir", str(output)]
    flags += ["--model.name", str(model), "--orchestrator.batch-size", str(options.batch_size)]
    flags += ["--orchestrator.sampling.max-tokens", str(longest), "--inference.engine", options.engine]
    flags += [
        "--inference.max-model-len",
        str(LONGEST_PROMPT + longest),
        "--rollout.seq-len",
        str(LONGEST_PROMPT + longest),
    ]
    flags += ["--trainer.seq-len", str(options.seq_len), "--orchestrator.seq-len", str(options.seq_len)]
    flags += ["--no-orchestrator.filters.zero-signal", *environments(PROMPT_CHARACTERS)]
    if gpus:
        flags += ["--trainer-gpu-ids", trainer, "--inference-gpu-ids", engine]
        flags += ["--deployment.num-train-gpus", str(len(options.trainer_gpus))]
    log = output / "rl.log"
    program = start("meshrl.launch.main", [*flags, *options.flags], gpus=gpus, log=log)
    end(program, log, options.deadline_s)
    summary = output / "bench" / "run.json"
    if not summary.exists():
        return None
    found: dict[str, Any] = json.loads(summary.read_text())  # a run that is stopped in time tells of the steps it made
    return found | ({"efficiency": found["by_turns"]} if shared(options) else {})


def parse() -> argparse.Namespace:
    def places(text: str) -> list[int]:
        return [int(place) for place in text.split(",") if place]

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-0.6b", choices=sorted(path.name for path in SHAPES.iterdir()))
    parser.add_argument("--tiny", action="store_true", help="a small model and the embedded engine instead")
    parser.add_argument("--trainer-gpus", type=places, default=[0])
    parser.add_argument("--engine-gpus", type=places, default=[1])
    parser.add_argument("--lengths", nargs="*", default=["ragged", "equal"], choices=["ragged", "equal"])
    parser.add_argument("--levels", nargs="*", type=int, default=[1, 2], help="max_async_level")
    parser.add_argument("--batch-size", type=int, default=512, help="rollouts a step")
    parser.add_argument("--seq-len", type=int, default=16384, help="tokens of a packed row")
    parser.add_argument("--rows", type=int, default=8, help="rows a step of the trainer alone")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--label", default="", help="added to the names of the run's folders")
    parser.add_argument("--trainer-flags", nargs="*", default=[], help="KEY=VALUE for the trainer alone")
    parser.add_argument("--engine-flags", nargs="*", default=[], help="KEY=VALUE for the engine alone")
    parser.add_argument("--output-dir", type=Path, default=Path("outputs/bench_run"))
    parser.add_argument("--deadline-s", type=float, default=900.0)
    parser.add_argument("flags", nargs="*", help="for every run")
    options = parser.parse_args()
    options.engine = "embedded" if options.tiny else "vllm"
    options.trainer_flags = [f"--{flag}" for flag in options.trainer_flags]
    options.engine_flags = [f"--{flag}" for flag in options.engine_flags]
    if options.tiny:
        options.trainer_gpus, options.engine_gpus, options.seq_len = [], [], min(options.seq_len, 1024)
    elif not torch.cuda.is_available():
        sys.exit("these shapes need GPUs; on a CPU use --tiny")
    return options


def main() -> None:
    options = parse()
    shape = None if options.tiny else options.shape
    longest = 64 if options.tiny else 2048
    folder = options.output_dir / (shape or "tiny")
    print(
        ("{:<8}{:>6}" + "{:>15}" * len(COLUMNS) + "{:>8}").format(
            "lengths", "level", *(c[0] for c in COLUMNS), "wall s"
        )
    )
    for lengths in options.lengths:
        place = folder / lengths
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:  # whose end frees the GPU
            ragged = lengths == "ragged"
            making = pool.submit(make_model, shape, place / "model", ragged=ragged, mean_tokens=longest // 2)
            model = making.result()
        measure_alone(model, place, options, longest)
        for level in options.levels:
            began = time.perf_counter()
            found = run(model, place, options, level=level, longest=longest)
            cells = [
                "failed" if found is None or found[key] is None else form.format(found[key]) for _, key, form in COLUMNS
            ]
            row = ("{:<8}{:>6}" + "{:>15}" * len(COLUMNS)).format(lengths, level, *cells)
            print(f"{row}{time.perf_counter() - began:>8.0f}", flush=True)


if __name__ == "__main__":
    main()
