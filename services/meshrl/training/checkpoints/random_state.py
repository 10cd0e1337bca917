"""The random state of a rank, with which a resumed run draws the same numbers."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping

import numpy as np
import torch

from meshrl.training.parallel.plan import ParallelPlan


def random_state(device: torch.device) -> dict[str, torch.Tensor]:
    version, words, spare = random.getstate()
    assert version == 3, "Python changed its generator"
    generator = np.random.get_state(legacy=False)
    assert isinstance(generator, dict), "NumPy changed its generator"
    words_of_numpy = np.append(generator["state"]["key"].astype(np.int64), [generator["state"]["pos"]])
    state = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor(words, dtype=torch.int64),
        "python_spare": torch.tensor([] if spare is None else [spare], dtype=torch.float64),
        "numpy": torch.from_numpy(np.append(words_of_numpy, generator["has_gauss"])),
        "numpy_spare": torch.tensor([generator["gauss"]], dtype=torch.float64),
    }
    if device.type == "cuda":
        state["device"] = torch.cuda.get_rng_state(device)
    return state


def restore_random_state(state: Mapping[str, torch.Tensor], device: torch.device) -> None:
    torch.set_rng_state(state["torch"])
    random.setstate((3, tuple(state["python"].tolist()), next(iter(state["python_spare"].tolist()), None)))
    *keys, position, has_spare = state["numpy"].tolist()
    np.random.set_state(
        ("MT19937", np.array(keys, dtype=np.uint32), position, has_spare, float(state["numpy_spare"][0]))
    )
    if device.type == "cuda" and "device" in state:
        torch.cuda.set_rng_state(state["device"], device)


def seed_rank(seed: int, step: int, plan: ParallelPlan) -> None:
    """Starts the generators of a rank without saved state: alike on ranks with the same tokens, for equal dropout."""
    digest = hashlib.sha256(f"{seed}/{step}/{plan.rank // plan.tp}".encode()).digest()
    torch.manual_seed(int.from_bytes(digest[:7], "little"))
    random.seed(digest)
    np.random.seed(int.from_bytes(digest[8:12], "little"))
