"""`sft` beside TRL's SFTTrainer on one GPU: tokens a second and peak memory on full rows of --seq-len tokens.

    python tests/benchmarks/bench_sft_trl_gpu.py --shape qwen3-0.6b --seq-len 8192

Both start from the same random weights, keep float32 master weights, compute in bfloat16 and train every token of the
same number of rows a step with AdamW. `sft` runs by its defaults. TRL runs by its own, which recompute activations,
and, as its best, without that and with one or two rows at once. The programs take turns; TRL must be importable.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from bench_run import SHAPES, make_model

VARIANTS = {  # rows at once, whether activations are recomputed
    "TRL, its defaults": (1, True),
    "TRL, activations kept": (1, False),
    "TRL, activations kept, two rows at once": (2, False),
}


def ours(model: Path, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Runs `sft` on made-up rows; what its steps and its peak say."""
    flags = {
        "model.name": model, "data.type": "fake", "data.seq-len": options.seq_len, "data.batch-size": options.rows,
        "max-steps": options.steps, "model.dtype": "bfloat16", "output-dir": folder,
    }  # fmt: skip
    command = [sys.executable, "-m", "meshrl.sft.main"]
    for key, value in flags.items():
        command += [f"--{key}", str(value)]
    _call(command, options.deadline_s)
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if "time/step" in record]
    return {
        "step_s": [record["time/step"] for record in steps],
        "peak_gib": max((record.get("perf/peak_memory", 0.0) for record in steps), default=0.0),
    }


def theirs(model: Path, name: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Runs this file once more, for one of TRL's variants."""
    folder.mkdir(parents=True)
    out = folder / "result.json"
    command = [sys.executable, __file__, "--variant", name, "--model", str(model), "--out", str(out)]
    command += ["--seq-len", str(options.seq_len), "--rows", str(options.rows), "--steps", str(options.steps)]
    _call(command, options.deadline_s)
    read: dict[str, Any] = json.loads(out.read_text())
    return read


def _call(command: list[str], deadline_s: float) -> None:
    ran = subprocess.run(command, capture_output=True, text=True, timeout=deadline_s, check=False)
    if ran.returncode:
        raise RuntimeError((ran.stdout + ran.stderr)[-3000:])


def train_with_trl(options: argparse.Namespace) -> None:
    """One variant of TRL's, in this process."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    at_once, recompute = VARIANTS[options.variant]
    step_s: list[float] = []

    class Clock(TrainerCallback):  # type: ignore[misc]  # TRL is not there when this is checked
        began = 0.0

        def on_step_begin(self, *args, **kwargs):  # type: ignore[no-untyped-def]  # as its base
            torch.cuda.synchronize()
            self.began = time.perf_counter()

        def on_step_end(self, *args, **kwargs):  # type: ignore[no-untyped-def]  # as its base
            torch.cuda.synchronize()
            step_s.append(time.perf_counter() - self.began)

    config = SFTConfig(
        output_dir=str(options.out.parent), max_steps=options.steps, per_device_train_batch_size=at_once,
        gradient_accumulation_steps=options.rows // at_once, max_length=options.seq_len, bf16=True, report_to=[],
        gradient_checkpointing=recompute, save_strategy="no", optim="adamw_torch_fused", disable_tqdm=True,
    )  # fmt: skip
    rows = torch.randint(200, 4000, (options.rows * options.steps, options.seq_len)).tolist()
    SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32),
        args=config,
        train_dataset=Dataset.from_list([{"input_ids": row} for row in rows]),
        processing_class=AutoTokenizer.from_pretrained(options.model),
        callbacks=[Clock()],
    ).train()
    peak = torch.cuda.max_memory_allocated() / 2**30
    options.out.write_text(json.dumps({"step_s": step_s, "peak_gib": peak}))


def compare(options: argparse.Namespace) -> None:
    model = make_model(options.shape, options.output_dir / options.shape, ragged=False, mean_tokens=1024)
    print(f"| {options.shape}, {options.rows} rows of {options.seq_len} tokens a step | tokens/s | GiB | sft makes |")
    print("|---|---|---|---|")
    rates: dict[str, list[float]] = {}
    for round_ in range(options.rounds):
        for name in ("sft", *VARIANTS):
            folder = options.output_dir / f"{name.replace(' ', '_').replace(',', '')}_{round_}"
            try:
                found = ours(model, options, folder) if name == "sft" else theirs(model, name, options, folder)
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                print(f"| {name} | failed | | |\n{error}", file=sys.stderr)
                continue
            rate = options.rows * options.seq_len / statistics.median(found["step_s"][options.steps // 3 :])
            rates.setdefault(name, []).append(rate)
            ratio = f"{rates['sft'][-1] / rate:.2f} times as many" if name != "sft" and "sft" in rates else ""
            print(f"| {name} | {rate:,.0f} | {found['peak_gib']:.1f} | {ratio} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-0.6b", choices=sorted(path.name for path in SHAPES.iterdir()))
    parser.add_argument("--seq-len", type=int, default=8192, help="tokens of a row (default 8192)")
    parser.add_argument("--rows", type=int, default=4, help="rows a step (default 4)")
    parser.add_argument("--steps", type=int, default=12, help="steps of a run, of which a third is not timed")
    parser.add_argument("--rounds", type=int, default=1, help="runs of each (default 1)")
    parser.add_argument("--deadline-s", type=float, default=180.0, help="for one run (default 180)")
    parser.add_argument("--output-dir", type=Path, default=Path("outputs/bench_sft_trl"))
    parser.add_argument("--variant", help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.variant is None:
        options.output_dir.mkdir(parents=True, exist_ok=True)
        compare(options)
    else:
        train_with_trl(options)


if __name__ == "__main__":
    main()
