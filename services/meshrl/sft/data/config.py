"""The `data` sections of `sft`."""

from __future__ import annotations

import math
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from meshrl.core.config.typed import TypedConfig, changed
from meshrl.training.bench.config import BenchConfig


class DataConfig(TypedConfig):
    """Conversations to train on."""

    section: ClassVar = "data"

    of_types: ClassVar = {"input_ids": ["fake"]}

    type: Literal["sft", "fake"] = "sft"
    """sft: conversations from `name`. fake: made-up tokens of the same shape, to measure or to try settings."""

    name: str = Field(default="train.jsonl", min_length=1)
    """A .jsonl, .json or .parquet file, a folder of such files or saved by `datasets`, or a dataset on the Hugging Face
    hub. Rows have messages, or prompt and completion; tools (or tool_defs) and chat_template_kwargs are optional."""

    subset: str | None = None
    """Subset of the dataset. For several see subsets."""

    split: str = "train"
    """Split of the dataset. For several see splits."""

    subsets: list[str] | None = Field(default=None, min_length=1)
    """Subsets that are mixed. With splits as well, the first goes with the first, and so on."""

    splits: list[str] | None = Field(default=None, min_length=1)
    """Splits that are mixed, of `subset` or of `subsets`."""

    probabilities: list[float] | None = None
    """Probability of each subset or split for the next row. None takes a row of each in turn."""

    stopping_strategy: Literal["first_exhausted", "all_exhausted"] = "all_exhausted"
    """When an epoch of a mixture is over: once one part was seen whole, or once all were. Finished parts begin
    again."""

    batch_size: int = Field(default=8, ge=1)
    """Samples a step: rows of seq_len tokens filled with whole conversations, or with pack_function stack
    conversations."""

    micro_batch_size: int = Field(default=1, ge=1)
    """Samples that go through the model at once. The result is the same for any number."""

    seq_len: int = Field(default=2048, ge=2)
    """Longest sample in tokens; a longer conversation is cut at its end."""

    pack_function: Literal["cat", "stack"] = "cat"
    """Unit of batch_size. cat: a row of seq_len tokens with as many conversations as fit. stack: a conversation.
    Neither pads, and no conversation attends to another."""

    shuffle: bool = True
    """Draw a new order for each epoch. False keeps the order of the data."""

    seed: int = 0
    """Seed of the order, which is drawn anew each epoch, and of the mixture."""

    num_workers: int | Literal["auto"] = "auto"
    """Processes that tokenize ahead of training. auto: none on a CPU, two for a GPU. Batches do not depend on it."""

    length: Literal["fixed", "variable"] = "fixed"
    """fake, and --bench: every sample has seq_len tokens, or lengths vary as those of real data do."""

    input_ids: Literal["increasing", "random"] = "random"
    """fake: tokens of a sample are consecutive numbers, which a model learns, or random."""

    @property
    def row_tokens(self) -> int:
        """Most tokens of a packed row."""
        return self.seq_len * self.micro_batch_size

    def shape_of(self, bench: BenchConfig, *, ranks: int) -> BenchConfig:
        """The benchmark over rows of this shape, but for its own keys."""
        own = {
            "rows": math.ceil(self.batch_size / ranks),
            "micro_batch_size": self.micro_batch_size,
            "lengths": self.length,
        }
        return bench.model_copy(update={key: value for key, value in own.items() if key not in bench.model_fields_set})

    def parts(self) -> list[tuple[str | None, str]]:
        subsets: list[str | None] = [*self.subsets] if self.subsets else [self.subset]
        splits = self.splits or [self.split]
        if len(splits) == 1:
            splits = splits * len(subsets)
        if len(subsets) == 1:
            subsets = subsets * len(splits)
        return list(zip(subsets, splits, strict=True))

    @model_validator(mode="after")
    def _mixture(self) -> Self:
        self.refuse_foreign()
        if self.subset is not None and self.subsets is not None:
            raise ValueError("data.subset and data.subsets both say which subsets; keep data.subsets")
        counts = {len(each) for each in (self.subsets, self.splits) if each is not None and len(each) > 1}
        if len(counts) > 1:
            raise ValueError(
                f"data.subsets and data.splits must be as many, got {len(self.subsets or ())} and"
                f" {len(self.splits or ())}; give each subset its split"
            )
        if len(set(self.parts())) < len(self.parts()):
            raise ValueError("data.subsets and data.splits must name each part once; weigh parts by data.probabilities")
        if len(self.parts()) == 1 and changed(self, ["stopping_strategy"]):
            raise ValueError(
                "data.stopping_strategy is for a mixture, and there is one part; name data.subsets or data.splits, or"
                " leave it out"
            )
        if self.probabilities is None:
            return self
        if len(self.probabilities) != len(self.parts()):
            raise ValueError(
                f"data.probabilities must have one number for each of the {len(self.parts())} subsets or splits, got"
                f" {len(self.probabilities)}"
            )
        if min(self.probabilities) <= 0.0 or abs(sum(self.probabilities) - 1.0) > 1e-6:
            raise ValueError(
                f"data.probabilities must be above 0 and add up to 1, got {self.probabilities}, whose sum is"
                f" {sum(self.probabilities):g}; leave out a subset that is not wanted"
            )
        return self

    @model_validator(mode="after")
    def _rows(self) -> Self:
        if self.batch_size % self.micro_batch_size:
            raise ValueError(
                f"data.batch_size must be a multiple of data.micro_batch_size ({self.micro_batch_size}), got"
                f" {self.batch_size}; use {self.micro_batch_size * max(1, self.batch_size // self.micro_batch_size)}"
            )
        if isinstance(self.num_workers, int) and self.num_workers < 0:
            raise ValueError(f"data.num_workers must be 0 or more, or 'auto', got {self.num_workers}")
        return self

    def doubt(self) -> str | None:
        """About a batch_size that is probably not meant."""
        if self.pack_function == "cat" and self.batch_size >= max(256, self.seq_len):
            return (
                f"data.batch_size {self.batch_size} counts samples of data.seq_len {self.seq_len} tokens, so a step"
                f" trains {self.batch_size * self.seq_len:,} tokens; for about {self.batch_size:,} tokens a step set"
                f" data.batch_size to {max(1, round(self.batch_size / self.seq_len))}"
            )
        return None
