"""The `sft` program: reads its configuration and data, fine-tunes, and leaves a Hugging Face folder."""

from __future__ import annotations

import signal
import sys
import threading

import torch
from loguru import logger
from transformers import PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from meshrl.algorithms.losses import cross_entropy_loss
from meshrl.algorithms.packing import Packing, TrainSample, pack_samples
from meshrl.core.config import dump_toml, load_config
from meshrl.core.logs import setup_logging
from meshrl.core.monitor import ConsoleSink, JsonlSink, Monitor, Sink, WandbSink
from meshrl.core.paths import Layout
from meshrl.models.load import ModelError, load_model, load_tokenizer, resolve_dtype
from meshrl.sft.batches import training_batches
from meshrl.sft.config import DataConfig, SFTConfig
from meshrl.sft.data import DataError, load_conversations
from meshrl.sft.loop import SFTLoop
from meshrl.sft.tokenization import tokenize
from meshrl.training.checkpoint import Checkpointer, CheckpointError
from meshrl.training.learner import Learner, StepError

_NAME = "sft"


def train(config: SFTConfig, stop: threading.Event) -> None:
    """The whole program after its configuration. Raises ModelError, DataError, CheckpointError or StepError."""
    layout = Layout(config.output_dir)
    torch.manual_seed(config.seed)
    if config.torch_threads is not None:
        torch.set_num_threads(config.torch_threads)
    tokenizer = load_tokenizer(config.model)
    samples = _samples(config.data, config, tokenizer)
    validation: Packing | None = None
    if config.val is not None:
        validation = pack_samples(_samples(config.val.data, config, tokenizer), seq_len=config.val.data.seq_len)
    learner = Learner(
        load_model(config.model, dtype=torch.float32),
        loss=cross_entropy_loss,
        optim=config.optim,
        scheduler=config.scheduler,
        max_steps=config.max_steps,
        compute_dtype=resolve_dtype(config.model),
        max_logits_bytes=config.max_logits_mib * 2**20,
    )
    checkpointer = Checkpointer(learner, config.output_dir, tokenizer=tokenizer)
    if config.ckpt is not None and config.ckpt.resume_step is not None:
        logger.info("resumed from step {}", checkpointer.restore(config.ckpt.resume_step))
    batches = training_batches(
        samples,
        batch_tokens=config.data.batch_size,
        seq_len=config.data.seq_len,
        seed=config.data.seed,
        skip=learner.step_done,
    )
    monitor = _open_monitor(config, layout)
    try:
        loop = SFTLoop(
            learner,
            batches,
            monitor,
            checkpointer,
            max_steps=config.max_steps,
            ckpt=config.ckpt,
            validation=validation,
            validation_interval=config.val.interval if config.val else config.max_steps,
        )
        folder = loop.run(stop.is_set)
        logger.success("weights after step {} are in {}", learner.step_done, folder)
    finally:
        monitor.close()


def _samples(data: DataConfig, config: SFTConfig, tokenizer: PreTrainedTokenizerBase) -> list[TrainSample]:
    roles = config.loss_mask.roles()
    conversations = load_conversations(data)
    samples = [tokenize(conversation, tokenizer, learned_roles=roles) for conversation in conversations]
    usable = [sample for sample in samples if sample.loss_mask[1 : data.seq_len].any()]
    if not usable:
        raise DataError(
            f"data.name {data.name!r}: none of its {len(samples)} rows has a token to learn within seq_len "
            f"{data.seq_len}; see loss_mask, or raise data.seq_len"
        )
    if len(usable) < len(samples):
        logger.warning("{}: {} of {} rows have nothing to learn", data.name, len(samples) - len(usable), len(samples))
    return usable


def _open_monitor(config: SFTConfig, layout: Layout) -> Monitor:
    sinks: list[Sink] = [ConsoleSink(), JsonlSink(layout.metrics_jsonl)]
    if config.wandb is not None:
        sinks.append(
            WandbSink(
                project=config.wandb.project,
                name=config.wandb.name,
                group=config.wandb.group,
                tags=config.wandb.tags,
                offline=config.wandb.offline,
                folder=config.output_dir,
                settings=config.model_dump(mode="json"),
            )
        )
    return Monitor(sinks)


def main() -> None:
    """Console script `sft`."""
    config = load_config(SFTConfig, prog=_NAME)
    layout = Layout(config.output_dir)
    setup_logging(_NAME, config.log.level, layout.log(_NAME), json_logging=config.log.json_logging)
    disable_progress_bar()  # a log has no use for it
    dump_toml(config, layout.config(_NAME))
    stop = threading.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, lambda *_: stop.set())
    try:
        train(config, stop)
    except (ModelError, DataError, CheckpointError, StepError) as error:
        logger.error("{}", error)
        sys.exit(1)


if __name__ == "__main__":
    main()
