"""Samples and distributions of a fine-tuning step for the monitor, every so many steps, on rank 0."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from meshrl.core.config.shared import LogExtrasConfig
from meshrl.core.metrics.statistics import spread
from meshrl.core.telemetry.monitor import Monitor, SampleRow
from meshrl.sft.data.batches import SFTBatch
from meshrl.training.learner import StepResult
from meshrl.wire.types import MicroBatch

MOST_TOKENS = 1024
"""Of a step, in a distribution."""


class Extras:
    def __init__(self, config: LogExtrasConfig, tokenizer: PreTrainedTokenizerBase, data_name: str) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._data_name = data_name

    def log(self, monitor: Monitor, batch: SFTBatch, result: StepResult) -> None:
        if result.step % self._config.interval != 0:
            return
        if self._config.samples:
            rows = batch.packing.micro_batches
            samples = [(row, place) for row in rows for place in range(len(row.sample_offsets) - 1)]
            shown = [samples[place] for place in spread(len(samples), self._config.rows_of(len(samples)))]
            monitor.log_samples(result.step, [self._row(row, place) for row, place in shown])
        if self._config.distributions:
            tokens = result.tokens
            places = spread(len(tokens.logprobs), MOST_TOKENS)
            values = {"loss": -tokens.logprobs[places], "entropy": tokens.entropies[places]}
            monitor.log_distributions(
                result.step, {f"distributions/{name}": numbers.tolist() for name, numbers in values.items()}
            )

    def _row(self, row: MicroBatch, place: int) -> SampleRow:
        part = slice(row.sample_offsets[place], row.sample_offsets[place + 1])
        token_ids, trained = row.token_ids[part], row.loss_mask[part]
        prompt, completion = token_ids[: trained.argmax()], token_ids[trained]
        return SampleRow(
            environment=self._data_name,
            task_key="",
            prompt=str(self._tokenizer.decode(prompt.tolist())),
            completion=str(self._tokenizer.decode(completion.tolist())),
            reward=None,
            advantage=None,
        )
