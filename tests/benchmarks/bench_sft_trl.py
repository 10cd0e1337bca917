"""`sft` beside TRL's SFTTrainer: the same model, tokens, masks and optimizer; loss of every step, and steps a second.

    python -m venv .tools/trl && .tools/trl/bin/pip install trl==1.16.0 torch transformers
    python tests/benchmarks/bench_sft_trl.py --trl-python .tools/trl/bin/python

The two take turns, so that what else the machine does hits both. A step is `--batch` conversations of a few to a few
hundred tokens. TRL pads them to the longest; `sft` packs them.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

STEPS, FIRST = 50, 5  # steps of a run, and those that are not timed


def make(folder: Path, *, batch: int, hidden: int, layers: int) -> None:
    """A model of random weights, conversations, and the same conversations in tokens with their masks."""
    from conversations import load_conversations
    from meshrl.models.load import load_tokenizer
    from meshrl.sft.config import DataConfig
    from meshrl.sft.data.tokenization import ConversationTokenizer
    from meshrl.training.model_config import TrainerModelConfig
    from meshrl_examples.model import create_model

    create_model(folder / "model", seed=0, hidden_size=hidden, num_layers=layers)
    source = random.Random(0)
    words = [source.choice("abcdefghijklmnopqrstuvwxyz") * source.randint(1, 6) for _ in range(400)]
    with (folder / "train.jsonl").open("w") as file:
        for _ in range(batch * STEPS):
            text = " ".join(source.choices(words, k=max(1, int(source.lognormvariate(2.2, 0.9)))))[:220]
            file.write(json.dumps({"prompt": text, "completion": text[::-1]}) + "\n")
    tokenizer = load_tokenizer(TrainerModelConfig(name=str(folder / "model")))
    with (folder / "tokens.jsonl").open("w") as file:
        for conversation in load_conversations(DataConfig(name=str(folder / "train.jsonl"))):
            sample = ConversationTokenizer(tokenizer, None, learned_roles=frozenset({"assistant"}))(conversation)
            row = {"input_ids": sample.token_ids.tolist(), "completion_mask": sample.loss_mask.astype(int).tolist()}
            file.write(json.dumps(row) + "\n")


def ours(folder: Path, out: Path, batch: int, lr: float) -> dict[str, list[float]]:
    """Runs the `sft` program; the loss and the end of each step."""
    flags = {
        "model.name": folder / "model", "data.name": folder / "train.jsonl", "output-dir": out,
        "data.pack-function": "stack", "data.batch-size": batch, "data.micro-batch-size": batch, "data.seq-len": 512,
        "max-steps": STEPS, "optim.lr": lr, "optim.weight-decay": 0.0, "model.device": "cpu", "torch-threads": 1,
    }  # fmt: skip
    command = [sys.executable, "-m", "meshrl.sft.main", "--no-data.shuffle"]
    for key, value in flags.items():
        command += [f"--{key}", str(value)]
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=1800)
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return {
        "losses": [record["loss/mean"] for record in records],
        "step_s": [record["time/step"] for record in records],
    }


def theirs(python: Path, folder: Path, out: Path, batch: int, lr: float) -> dict[str, list[float]]:
    """Runs this file under the interpreter that has TRL."""
    out.mkdir()
    command = [str(python), __file__, "--side", str(folder), "--out", str(out), "--batch", str(batch), "--lr", str(lr)]
    ran = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=1800, check=False
    )
    if ran.returncode:
        sys.exit(ran.stderr[-3000:])
    read: dict[str, list[float]] = json.loads((out / "result.json").read_text())
    return read


def side(folder: Path, out: Path, batch: int, lr: float) -> None:
    """TRL's half, under its own interpreter."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    torch.set_num_threads(1)
    losses: list[float] = []
    step_s: list[float] = []

    class Timed(SFTTrainer):  # type: ignore[misc]  # TRL is not there when this is checked
        def compute_loss(self, *args, **kwargs):  # type: ignore[no-untyped-def]  # as its base
            loss = super().compute_loss(*args, **kwargs)
            losses.append(float(loss[0] if isinstance(loss, tuple) else loss))
            return loss

    class Clock(TrainerCallback):  # type: ignore[misc]  # the same
        began = 0.0

        def on_step_begin(self, *args, **kwargs):  # type: ignore[no-untyped-def]  # as its base
            self.began = time.perf_counter()

        def on_step_end(self, *args, **kwargs):  # type: ignore[no-untyped-def]  # as its base
            step_s.append(time.perf_counter() - self.began)

    rows = [json.loads(line) for line in (folder / "tokens.jsonl").read_text().splitlines()]
    config = SFTConfig(
        output_dir=str(out), max_steps=STEPS, per_device_train_batch_size=batch, learning_rate=lr,
        lr_scheduler_type="constant", warmup_steps=0, weight_decay=0.0, max_grad_norm=1.0, optim="adamw_torch",
        adam_beta2=0.999, max_length=512, completion_only_loss=True, train_sampling_strategy="sequential",
        gradient_checkpointing=False, logging_steps=1, save_strategy="no", report_to=[], use_cpu=True, bf16=False,
        fp16=False, seed=0, disable_tqdm=True,
    )  # fmt: skip
    trainer = Timed(
        model=AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32),
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(folder / "model"),
        callbacks=[Clock()],
    )
    trainer.train()
    (out / "result.json").write_text(json.dumps({"losses": losses, "step_s": step_s}))


def compare(python: Path, *, batch: int, lr: float, hidden: int, layers: int, rounds: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make(folder, batch=batch, hidden=hidden, layers=layers)
        seconds: dict[str, list[float]] = {"sft": [], "TRL": []}
        worst = 0.0
        for round_ in range(rounds):
            mine = ours(folder, folder / f"ours_{round_}", batch, lr)
            trl = theirs(python, folder, folder / f"trl_{round_}", batch, lr)
            worst = max(worst, *(abs(a - b) for a, b in zip(mine["losses"], trl["losses"], strict=True)))
            seconds["sft"].append(sum(mine["step_s"][FIRST:]))
            seconds["TRL"].append(sum(trl["step_s"][FIRST:]))
            print(
                f"round {round_ + 1}: {STEPS} steps, loss {mine['losses'][0]:.4f} to {mine['losses'][-1]:.4f};"
                f" largest difference of a step's loss {worst:.1e}"
            )
        print(f"\n| hidden {hidden}, {layers} layers, {batch} conversations a step | steps/s, each round |")
        print("|---|---|")
        for who, took in seconds.items():
            print(f"| {who} | {', '.join(f'{(STEPS - FIRST) / each:.2f}' for each in took)} |")
        print(f"\nsft makes {sum(seconds['TRL']) / sum(seconds['sft']):.2f} times TRL's steps a second")


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare sft with TRL's SFTTrainer on the CPU.")
    parser.add_argument("--trl-python", type=Path, help="an interpreter that has trl")
    parser.add_argument("--batch", type=int, default=8, help="conversations a step (default 8)")
    parser.add_argument("--lr", type=float, default=3e-4, help="learning rate (default 3e-4)")
    parser.add_argument("--hidden", type=int, default=256, help="width of the model (default 256)")
    parser.add_argument("--layers", type=int, default=6, help="layers of the model (default 6)")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each (default 2)")
    parser.add_argument("--side", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    read = parser.parse_args()
    if read.side is not None:
        side(read.side, read.out, read.batch, read.lr)
    elif read.trl_python is None:
        parser.error("--trl-python must name an interpreter that has trl")
    else:
        compare(
            read.trl_python, batch=read.batch, lr=read.lr, hidden=read.hidden, layers=read.layers, rounds=read.rounds
        )


if __name__ == "__main__":
    main()
