"""Trains small models of several families in one process and on every layout of ranks, and compares; a program.

    python layouts.py FOLDER RESULT.json [DEVICE DTYPE]

FOLDER holds a model of each of FAMILIES. The ranks are forked from this process once everything is imported. The result
has for each family, case and layout the loss, gradient norm and further numbers of every step, or the sentence with
which the layout is refused; what senders would publish; and the step after a checkpoint of another layout.

With a device and a dtype routers are given the choice of every token, since rounding would turn some: so trainings of
two dtypes can be compared. float32 is then the reference of one process; another dtype has layouts of two ranks, each
with a GPU of its own on cuda.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from meshrl.core.heap import loading

with loading():
    import numpy as np
    import torch
    import torch.distributed as dist

    from forked_ranks import on_ranks
    from loss_curves import stream_batch
    from meshrl.algorithms.losses import grpo_loss, gspo_loss
    from meshrl.algorithms.objective import Objective
    from meshrl.models.logprobs import head_logprobs
    from meshrl.models.routers import RouterChoice
    from meshrl.models.shares import TensorShare
    from meshrl.models.state import gather_state, own_rows
    from meshrl.trainer.publishing.probes import prober
    from meshrl.trainer.publishing.snapshots import plan_of
    from meshrl.training.build import build_learner
    from meshrl.training.checkpoints.checkpointer import Checkpointer
    from meshrl.training.config import OptimConfig
    from meshrl.training.learner import StepResult
    from meshrl.training.model_config import TrainerModelConfig
    from meshrl.training.parallel.rank_group import RankGroup
    from meshrl.versions.snapshot import take_snapshot, whole_snapshot
    from tiny_families import VOCAB, tiny_model
    from trained import Trained

ROUNDED = __name__ == "__main__" and len(sys.argv) > 3
DEVICE, DTYPE = sys.argv[3:] if ROUNDED else ("cpu", "float32")
STEPS, SAMPLES = 2, 7
PROBE_TOKENS = 13  # which two ranks do not divide evenly
SAVED_AFTER = 1  # steps
FAMILIES = ("qwen3", "qwen3_moe", "gpt_oss", "deepseek_v3")
ALONE = "one process"


class Layout(NamedTuple):
    """`resumes`: the layouts whose checkpoints it goes on from; `adapted`: who trains adapters on four ranks."""

    ranks: int
    sizes: Mapping[str, int]
    resumes: tuple[str, ...] = ()
    adapted: str = ""


LAYOUTS = {
    "cp2": Layout(2, {"cp": 2}, (ALONE,)),
    "ep2": Layout(2, {"ep": 2}, (ALONE, "cp2")),
    "cp2 x ep2": Layout(2, {"cp": 2, "ep": 2}, ("ep2",)),
    "cp4": Layout(4, {"cp": 4}, ("ep2",), "gpt_oss"),
    "cp2 x dp2": Layout(4, {"cp": 2}, (), "deepseek_v3"),
    "ep2 x dp2": Layout(4, {"ep": 2}, ("cp2 x ep2",), "gpt_oss"),
    "tp2": Layout(2, {"tp": 2}),
    "tp2 x ep2": Layout(2, {"tp": 2, "ep": 2}, ("cp2",)),
    "tp2 x dp2": Layout(4, {"tp": 2}, (ALONE,), "qwen3"),
    "cp2 x tp2": Layout(4, {"cp": 2, "tp": 2}, (), "qwen3"),
    "cp2 x tp2 x ep2": Layout(4, {"cp": 2, "tp": 2, "ep": 2}, ("ep2 x dp2",), "deepseek_v3"),
    "hsdp2 x cp2": Layout(4, {"dp_replicate": 2, "cp": 2}, ("ep2 x dp2",), "qwen3"),
}
WITHOUT_EXPERTS = ("tp2", "tp2 x dp2", "cp2 x tp2")  # layouts of dense models alone
PAIRS = [(earlier, name) for name, layout in LAYOUTS.items() for earlier in layout.resumes]
PAIRS += [(name, ALONE) for name in LAYOUTS]
CASES: Mapping[str, Mapping[str, Any]] = {
    "gspo": {"loss": partial(gspo_loss, clip_low=3e-2, clip_high=4e-2), "model": {}},
    "grpo of adapters": {  # and mixtures replay routes, and have adapters of their experts
        "loss": partial(grpo_loss, clip_low=0.2, clip_high=0.2),
        "model": {
            "lora": {"rank": 8, "modules_to_save": ["lm_head", "model.norm"]},
            "ac": {"mode": "selective", "freq": 2},
        },
    },
}
SAVED, ADAPTED = CASES


def cases_of(family: str, name: str) -> list[str]:
    """The cases that a family trains on a layout: all of them in one process. On two ranks two families have adapters.
    On four, where each costs twice as much, one family is trained whole, the one whose checkpoints other layouts go on
    from, and one has adapters; so each family has them somewhere."""
    layout = LAYOUTS.get(name)
    if layout is None:
        return list(CASES)
    if layout.ranks == 2:
        return [SAVED] + [ADAPTED] * (family in (saved_family(), saved_family(*WITHOUT_EXPERTS)))
    return [SAVED] * (family == saved_family(name)) + [ADAPTED] * (family == layout.adapted)


def saved_family(*names: str) -> str:
    """The family whose checkpoints go from one of the layouts to the other."""
    return "qwen3" if set(names) & set(WITHOUT_EXPERTS) else "qwen3_moe"


def make_models(folder: Path) -> None:
    """Writes a model of each family into FOLDER/FAMILY; windows, sinks and biases of routers are among them."""
    changes = {
        "qwen3": {"intermediate_size": 50},  # two ranks of tensor parallelism have 25 each, odd to FSDP
        "qwen3_moe": {"use_sliding_window": False},  # its samples share beginnings
    }
    for family in FAMILIES:
        tiny_model(family, **changes.get(family, {})).save_pretrained(folder / family)


class Training:
    """One model on one layout; every method is collective. Raises ValueError where the layout is refused."""

    def __init__(self, folder: Path, family: str, case: str, name: str, parallel: RankGroup) -> None:
        self.parallel = parallel
        settings = dict(CASES[case]["model"])
        if "lora" in settings and family != "qwen3":
            settings["lora"] = settings["lora"] | {
                "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
            }
        self.config = TrainerModelConfig.model_validate(
            {"name": str(folder / family), "device": DEVICE, "dtype": DTYPE, "ac": None, "compile": None}
            | settings
            | (LAYOUTS[name].sizes if name in LAYOUTS else {})
        )
        learner = build_learner(self.config, parallel=parallel)
        self.shares_prefixes = learner.policy.prefix_reason is None
        routers = learner.policy.routers
        self.routed = routers.shape if ROUNDED or case == "grpo of adapters" else None
        self.replayed = [0, 0]  # choices that were given, and those of them that were made
        routers.watchers.append(self._look)
        self.trained = Trained.by(learner, Objective(loss=CASES[case]["loss"]), OptimConfig(lr=1e-3))

    def _look(self, choice: RouterChoice) -> None:
        if choice.given is not None:
            known = choice.given >= 0
            self.replayed[0] += int(known.sum())
            self.replayed[1] += int((choice.chosen == choice.given)[known].sum())

    def step(self, step: int, *, one_sided: bool = False) -> tuple[StepResult, dict[str, Any]]:
        """Makes a step, and what is known of its tokens before. `one_sided`: all go through the first experts, so that
        some ranks are sent none."""
        prefixed = {"prompt": 12, "share": True} if self.shares_prefixes else {}
        dp_size = self.parallel.plan.dp_size
        routed = self.routed
        if one_sided and (shape := self.trained.learner.policy.routers.shape) is not None:
            routed = replace(shape, experts=shape.per_token)
        rows = stream_batch(
            step, dp_size=dp_size, vocab_size=VOCAB, routed=routed, unknown=not (ROUNDED or one_sided),
            samples=SAMPLES, **prefixed,
        )  # fmt: skip
        evaluated = self.trained.evaluate(rows) if step == 0 else None
        result = self.trained.step(rows)
        logprobs = np.sort((evaluated or result.tokens).logprobs.astype(np.float64)).tolist()
        return result, {
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "zero_grad_ratio": result.zero_grad_ratio,
            "metrics": dict(result.metrics),
            "routing": dict(result.routing),
            "logprobs": logprobs,
            "row_tokens": sum(len(row.token_ids) for row in rows),
        }

    def checkpointer(self, folder: Path, name: str) -> Checkpointer:
        saved = folder / "saved" / self.trained.model.config.model_type / name
        return Checkpointer(*self.trained, saved, tokenizer=None, base=self.config)

    def published(self) -> dict[str, Any]:
        """Whether what the senders would send of each tensor is the state as Hugging Face has it, bit for bit."""
        model, plan = self.trained.model, self.parallel.plan
        outline = plan_of(
            model, torch.bfloat16, num_senders=plan.num_senders, bucket_bytes=4096, row_order=plan.row_order
        )
        own = own_rows(model, torch.bfloat16, sender=plan.rank % plan.num_senders, num_senders=plan.num_senders)
        flat = np.zeros(0, np.uint8)
        if plan.rank < plan.num_senders:
            snapshot = take_snapshot(outline, own, plan.rank, torch.device("cpu"))
            flat = snapshot.flat.cpu().numpy()
        flats = self.parallel.gather(flat)
        whole = whole_snapshot(gather_state(model, torch.bfloat16, keep=plan.leads))
        if flats is None:
            return {}
        stream = np.zeros(outline.num_bytes, np.uint8)
        for sender, sent in enumerate(flats[: plan.num_senders]):
            for piece in outline.pieces(sender):
                start = outline.tensors[piece.tensor].offset + piece.start
                stream[start : start + piece.end - piece.start] = sent[piece.place]
        return {
            "equal": all(
                stream[entry.offset : entry.offset + entry.num_bytes].tobytes()
                == whole.flat.numpy()[entry.offset : entry.offset + entry.num_bytes].tobytes()
                for entry in whole.tensors
            ),
            "bytes": outline.num_bytes,
            "sent": [len(sent) for sent in flats[: plan.num_senders]],
            "reordered": len(outline.collective.reordered_tensors),
        }


def vocabulary_apart(parallel: RankGroup) -> float:
    """How far logprobs, entropies and gradients of a head whose vocabulary ranks divide are from those of the whole."""
    assert parallel.tensor is not None
    share = TensorShare.of(parallel.tensor.get_group())
    torch.manual_seed(0)
    torch.set_default_device(parallel.device)
    hidden, weight, bias = torch.randn(13, 8), torch.randn(32, 8), torch.randn(32)
    temperatures, worst = torch.rand(13) + 0.5, 0.0
    rows = slice(share.rank * 16, share.rank * 16 + 16)
    for targets in (torch.randint(0, 32, (13,)), torch.randint(0, 32, (13, 3))):
        slopes, found = torch.randn(targets.shape), []
        for part, of in ((slice(None), None), (rows, share)):
            inputs = [each.clone().requires_grad_() for each in (hidden, weight[part], bias[part])]
            outputs = head_logprobs(*inputs, targets, temperatures, max_logits_bytes=5 * 16 * 4, share=of)
            torch.autograd.backward(outputs[0], slopes)
            found.append([*(each.detach() for each in outputs), *(each.grad for each in inputs)])
        for whole, own in zip(*found, strict=True):
            alike = whole if whole.shape == own.shape else whole[rows]
            worst = max(worst, float((alike - own).abs().max()))
    torch.set_default_device(None)
    return worst


def numbers(folder: Path, family: str, case: str, name: str, parallel: RankGroup) -> dict[str, Any]:
    """What the steps of a training give."""
    try:
        training = Training(folder, family, case, name, parallel)
    except ValueError as error:
        return {"refused": str(error)}
    steps = []
    probe = prober(training.trained.learner, training.trained.run, PROBE_TOKENS)
    assert probe is not None
    probed = probe()()
    for step in range(STEPS):
        steps.append(training.step(step)[1])
        if family in (saved_family(), saved_family(*WITHOUT_EXPERTS)) and (case, step + 1) == (SAVED, SAVED_AFTER):
            training.checkpointer(folder, name).save()
    found = {key: [step[key] for step in steps] for key in steps[0]}
    replayed = parallel.sum(np.array(training.replayed)).tolist()
    if name == ALONE or "ep" in LAYOUTS[name].sizes:
        one_sided = training.step(STEPS, one_sided=True)[0]
        found["one_sided"] = [one_sided.loss, one_sided.grad_norm]
    return found | {
        "shares_prefixes": training.shares_prefixes, "replayed": replayed, "published": training.published(),
        "probe": probed.logprobs,
    }  # fmt: skip


def resumed(folder: Path, earlier: str, name: str, parallel: RankGroup) -> dict[str, Any]:
    """The step after a checkpoint of another layout."""
    training = Training(folder, saved_family(earlier, name), SAVED, name, parallel)
    training.checkpointer(folder, earlier).restore(SAVED_AFTER)
    return training.step(SAVED_AFTER)[1]


def trainings(folder: Path, names: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in names:
        sizes = LAYOUTS[name].sizes if name in LAYOUTS else {}
        parallel = RankGroup.start(os.environ, device=torch.device(DEVICE), **sizes)
        for family in FAMILIES:
            for case in cases_of(family, name):
                found[f"{family} / {case} / {name}"] = numbers(folder, family, case, name, parallel)
        if name == "tp2":
            found["vocabulary apart"] = vocabulary_apart(parallel)
        for earlier in LAYOUTS[name].resumes if name in LAYOUTS else ():
            found[f"{earlier} -> {name}"] = resumed(folder, earlier, name, parallel)
    return found


def back_alone(folder: Path) -> dict[str, Any]:
    """One process goes on from the checkpoint of every layout."""
    parallel = RankGroup.start(os.environ, device=torch.device(DEVICE))
    there = [name for name in LAYOUTS if (folder / "saved" / saved_family(name) / name).is_dir()]
    return {f"{name} -> {ALONE}": resumed(folder, name, ALONE, parallel) for name in there}


def on_forked(ranks: int, folder: Path, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What rank 0 of so many finds."""
    result = folder / f"result_{ranks}.json"

    def leave() -> None:
        found = work()
        if os.environ["RANK"] == "0":
            result.write_text(json.dumps(found))
        if dist.is_initialized():
            dist.barrier()

    on_ranks(ranks, leave)
    found: dict[str, Any] = json.loads(result.read_text())
    return found


def main() -> None:
    folder, result = Path(sys.argv[1]), Path(sys.argv[2])
    found: dict[str, Any] = {}
    sizes = [1, *sorted({layout.ranks for layout in LAYOUTS.values()})]
    for ranks in (sizes[:1] if DTYPE == "float32" else sizes[:2]) if ROUNDED else sizes:
        names = [name for name, layout in LAYOUTS.items() if layout.ranks == ranks] or [ALONE]
        started = time.perf_counter()
        found |= on_forked(ranks, folder, partial(trainings, folder, names))
        print(f"{ranks} rank(s): {time.perf_counter() - started:.1f} s", flush=True)
    found |= on_forked(1, folder, partial(back_alone, folder))
    result.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
