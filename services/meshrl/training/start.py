"""The start of a training program, on each rank: joining the group, loading the model, resuming."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from loguru import logger
from transformers import PreTrainedTokenizerBase

from meshrl.algorithms.objective import Objective
from meshrl.models.load import resolve_device, resolve_dtype
from meshrl.training.auto_settings import choose_layout, resolve_auto
from meshrl.training.build import build_learner
from meshrl.training.checkpoints.checkpointer import Checkpointer
from meshrl.training.config import TrainingConfig
from meshrl.training.learner import Learner
from meshrl.training.memory_estimate import check_has_device
from meshrl.training.model_config import TrainerModelConfig
from meshrl.training.parallel.rank_group import RankGroup
from meshrl.training.run_state import RunState


def join_group(config: TrainingConfig, environment: Mapping[str, str], *, row_tokens: int) -> RankGroup:
    """This rank in the group of the environment, laid out for rows of `row_tokens`. Raises ModelError, ValueError."""
    device = resolve_device(config.model.device)
    check_has_device(device, environment)
    return RankGroup.start(environment, device=device, **choose_layout(config.model, environment, seq_len=row_tokens))


def load_run(
    config: TrainingConfig,
    parallel: RankGroup,
    objective: Objective,
    *,
    row_tokens: int,
    seq_len: int | None = None,
    run_id: str = "main",
    publishes: bool = False,
    beside_engine: bool = False,
    random_weights: bool = False,
) -> tuple[Learner, RunState, TrainerModelConfig]:
    """The learner, the run at step 0, and the `model` section with each auto resolved. Collective.

    A row has up to `row_tokens`, a sample up to `seq_len`; errors as in `resolve_auto` and `build_learner`.
    """
    if config.torch_threads is not None:
        torch.set_num_threads(config.torch_threads)
    model, logits_bytes = resolve_auto(
        config.model,
        config.optim,
        parallel,
        seq_len=row_tokens,
        max_logits_mib=config.max_logits_mib,
        publishes=publishes,
        beside_engine=beside_engine,
    )
    learner = build_learner(
        model,
        parallel=parallel,
        seed=config.seed,
        seq_len=seq_len,
        max_logits_bytes=logits_bytes,
        random_weights=random_weights,
    )
    run = learner.new_run(
        run_id=run_id,
        objective=objective,
        optim=config.optim,
        scheduler=config.scheduler,
        max_steps=config.max_steps,
    )
    return learner, run, model


def open_checkpoints(
    config: TrainingConfig, learner: Learner, run: RunState, tokenizer: PreTrainedTokenizerBase | None
) -> Checkpointer:
    """The run's checkpointer, with the run where `ckpt.resume_step` has it. Collective. Raises CheckpointError."""
    separate = config.ckpt is not None and config.ckpt.weights.save_adapter_separately
    checkpointer = Checkpointer(
        learner,
        run,
        config.output_dir,
        tokenizer=tokenizer,
        seed=config.seed,
        snapshot_dtype=resolve_dtype(config.model),
        base=config.model,
        adapters_of=config.model.name if separate else None,
    )
    if config.ckpt is not None and config.ckpt.resume_step is not None:
        logger.info("resumed from the checkpoint of step {}", checkpointer.restore(config.ckpt.resume_step))
    return checkpointer
