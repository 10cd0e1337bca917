"""Which engine an `inference` program runs, and why; decided at its start, in the interpreter that will run it."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Literal

import torch
from loguru import logger

from meshrl.inference.config import InferenceConfig, only_vllm


@dataclass(frozen=True, kw_only=True)
class EngineChoice:
    """An engine and the reason for it, for the log."""

    engine: Literal["embedded", "vllm"]
    reason: str


def choose_engine(config: InferenceConfig) -> EngineChoice:
    """The engine of the key `engine`, or the choice of `auto` on this machine. Raises ValueError for keys that the
    engine does not have."""
    has_vllm, has_gpu = importlib.util.find_spec("vllm") is not None, torch.cuda.is_available()
    choice = decide(config.engine, config.model.device, has_vllm=has_vllm, has_gpu=has_gpu)
    if config.engine == "auto" and (cost := cost_of(choice, config.model.device, has_gpu=has_gpu)):
        logger.warning(cost)
    if choice.engine == "embedded" and config.vllm_only:
        raise ValueError(f"{only_vllm(config.vllm_only)} (engine = '{config.engine}': {choice.reason})")
    if config.sleep_while_training and not torch.cuda.is_available():
        raise ValueError(
            "inference.sleep_while_training needs a GPU: vLLM has no sleep mode on a CPU; leave it out, or run on a"
            " machine with a GPU"
        )
    return choice


def cost_of(choice: EngineChoice, device: str, *, has_gpu: bool) -> str:
    """A warning about the embedded engine's speed on a GPU, where `auto` chose it; empty without a reason for one."""
    if choice.engine != "embedded" or not has_gpu or device.startswith("cpu"):
        return ""
    return (
        "there is a GPU but no vLLM here, so the embedded engine runs: it decodes at most 128 sequences at once, each"
        " in a slot of max_model_len tokens, through the model's own Python and without CUDA graphs. With vLLM a 0.6B"
        " model gives 55,000 tokens/s on an H200 with 512 sequences in flight, and training waits for it: install it"
        " (uv sync --extra vllm), or name an environment that has it in inference.python; inference.engine = 'embedded'"
        " says that this is meant"
    )


def decide(engine: Literal["auto", "embedded", "vllm"], device: str, *, has_vllm: bool, has_gpu: bool) -> EngineChoice:
    """The choice for an interpreter with or without vLLM, a machine with or without a GPU, and a model's device."""
    if engine != "auto":
        return EngineChoice(engine=engine, reason="as configured")
    if not has_vllm:
        return EngineChoice(engine="embedded", reason="vLLM is not installed here (uv sync --extra vllm installs it)")
    if not has_gpu:
        return EngineChoice(
            engine="embedded", reason="there is no GPU; inference.engine = 'vllm' runs vLLM on a CPU as well"
        )
    if device.startswith("cpu"):
        return EngineChoice(engine="embedded", reason=f"model.device is {device!r}")
    return EngineChoice(engine="vllm", reason="vLLM is installed and there is a GPU")
