"""The random state of a rank, with which a resumed run draws the same numbers; read by the checkpointer."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file


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


def seed_rank(seed: int, step: int, rank: int) -> None:
    """Starts all generators of a rank from the run's seed and the step, differently on each rank: for a rank without a
    saved state, after a resume with another number of ranks."""
    digest = hashlib.sha256(f"{seed}/{step}/{rank}".encode()).digest()
    torch.manual_seed(int.from_bytes(digest[:7], "little"))
    random.seed(digest)
    np.random.seed(int.from_bytes(digest[8:12], "little"))


def random_file(rank: int) -> str:
    return f"random_{rank:05d}.safetensors"


def write_random_state(state: Mapping[str, torch.Tensor], path: Path) -> None:
    save_file(dict(state), path)


def read_random_state(path: Path) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = load_file(path)
    return state
