"""Builds each rank's parts: group, learner, run and checkpointer."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from loguru import logger
from torch import nn
from transformers import PreTrainedTokenizerBase

from meshrl.core.config import ConfigError
from meshrl.core.config.shared import ModelConfig
from meshrl.models.adapters import AdapterHolder
from meshrl.models.load import ModelError, load_tokenizer, resolve_dtype
from meshrl.models.logprobs import PackedPolicy
from meshrl.trainer.config import TrainerConfig
from meshrl.trainer.objectives import build_objective
from meshrl.trainer.ranks.rank_runs import RankRun
from meshrl.training.bench.config import BenchConfig
from meshrl.training.bench.fake_data import fake_batch
from meshrl.training.checkpoints.checkpointer import CheckpointError
from meshrl.training.learner import Learner
from meshrl.training.model_config import CompileConfig
from meshrl.training.parallel.lifeline import Lifeline
from meshrl.training.parallel.rank_group import RankGroup
from meshrl.training.start import join_group, load_run, open_checkpoints
from meshrl.versions.collective.digest import sum128
from meshrl.wire.types import RoutedShape


@dataclass(frozen=True, kw_only=True)
class TrainerParts:
    learner: Learner
    own: RankRun
    compute_dtype: torch.dtype
    parallel: RankGroup
    lifeline: Lifeline
    release: Callable[[], None]
    """Gives unused memory back to the device, if that is configured."""

    def leave(self) -> None:
        self.parallel.barrier()
        self.lifeline.release()
        self.parallel.close()


# Share of a sample's tokens from which a shared prefix pays on a CPU: 9% gains nothing, 18% gains 1.11.
MIN_SHARED_PREFIX = 0.15

WARM_UP_TOKENS = 16384  # of the longest row that kernels are compiled with
WARM_UP_SHARES = (1, 7 / 8, 1 / 4, 1 / 8)  # of the longest: the lengths of all


def min_shared_prefix(wanted: bool | Literal["auto"], policy: PackedPolicy) -> float | None:
    """The least share of a sample that batches may leave out as a shared prefix; None: samples share none.

    Raises ConfigError if sharing is wanted and the model cannot.
    """
    if wanted is False or (wanted == "auto" and (policy.prefix_reason is not None or policy.kernels.fused)):
        return None
    if policy.prefix_reason is not None:
        raise ConfigError(
            f"trainer.share_prefixes is true, but samples of this model cannot share a prefix: {policy.prefix_reason};"
            " set it to 'auto' or false"
        )
    return 0.0 if wanted is True else MIN_SHARED_PREFIX


def replayed_shape(wanted: bool, policy: PackedPolicy) -> RoutedShape | None:
    """The shape of the routes that batches carry, None without replay. Raises ConfigError for a dense model."""
    if not wanted:
        return None
    if policy.routers.shape is None:
        raise ConfigError(
            "trainer.enable_router_replay is set, but this model has no experts to choose among; set it to false"
        )
    return policy.routers.shape


def build_parts(config: TrainerConfig, environment: Mapping[str, str]) -> TrainerParts:
    """Joins the group, loads the model and perhaps a checkpoint. Collective. Raises ConfigError."""
    try:
        parallel = join_group(config, environment, row_tokens=config.seq_len)
        lifeline = Lifeline.tie(parallel, environment)
        started = time.perf_counter()
        learner, run, model = load_run(
            config,
            parallel,
            build_objective(config.loss),
            row_tokens=config.seq_len,
            seq_len=config.seq_len,
            run_id=config.run_id,
            publishes=True,
            beside_engine=config.release_memory,
        )
        logger.info("the model is loaded, in {:.1f} s", time.perf_counter() - started)
        switch_dropout_off(learner.model)
        release = releaser(parallel.device, wanted=config.release_memory)
        if isinstance(model.compile, CompileConfig) and parallel.device.type == "cuda":
            compile_kernels(learner, seq_len=config.seq_len)
            release()
        tokenizer = _tokenizer(config.model) if parallel.plan.leads else None
        checkpointer = open_checkpoints(config, learner, run, tokenizer)
    # What a changed configuration mends.
    except (ModelError, CheckpointError, ValueError, torch.OutOfMemoryError) as error:
        raise ConfigError(str(error)) from error
    return TrainerParts(
        learner=learner,
        own=RankRun(state=run, checkpointer=checkpointer),
        compute_dtype=resolve_dtype(config.model),
        parallel=parallel,
        lifeline=lifeline,
        release=release,
    )


def switch_dropout_off(model: nn.Module) -> None:
    """That of the model's configuration, as GPT-2 has it: engines sample without. Adapters keep their own."""
    for module in model.modules():
        if isinstance(module, AdapterHolder):
            continue
        for name, value in list(vars(module).items()):
            if isinstance(value, float) and ("drop" in name or (isinstance(module, nn.Dropout) and name == "p")):
                setattr(module, name, 0.0)


def releaser(device: torch.device, *, wanted: bool) -> Callable[[], None]:
    """Frees torch's cache; nothing on a CPU, or if not wanted."""
    return torch.cuda.empty_cache if wanted and device.type == "cuda" else lambda: None


def compile_kernels(learner: Learner, *, seq_len: int) -> None:
    """Compiles the kernels of a step, and that of versions' digests, while engines still load.

    On a GPU torch.compile joins reductions by their sizes, so a graph serves lengths near its own. Of Qwen3-0.6B
    lengths below 2,560, below 5,120 and above each have one. Outside a group, lengths without room are left out.
    """
    started = time.perf_counter()
    vocab_size = int(learner.model.config.get_text_config().vocab_size)
    longest = min(seq_len, WARM_UP_TOKENS)
    for tokens in dict.fromkeys(max(2, int(share * longest)) for share in WARM_UP_SHARES):
        rows = fake_batch(
            BenchConfig(lengths="variable"),
            seq_len=tokens,
            vocab_size=vocab_size,
            dp_size=learner.parallel.plan.dp_size,
            seed=0,
        )
        try:
            learner.warm_up(rows)
        except torch.OutOfMemoryError as error:
            if not learner.parallel.plan.is_alone:  # other ranks wait in collectives
                raise
            logger.warning("kernels of rows of {} tokens are not compiled ahead: out of memory ({})", tokens, error)
            torch.cuda.empty_cache()
    sum128(torch.zeros(2, device=learner.device))
    logger.info("kernels are compiled, in {:.1f} s", time.perf_counter() - started)


def _tokenizer(model: ModelConfig) -> PreTrainedTokenizerBase | None:
    try:
        return load_tokenizer(model)
    except ModelError as error:
        logger.warning("weight snapshots will come without a tokenizer: {}", error)
        return None
