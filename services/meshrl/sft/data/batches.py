"""Deals tokenized conversations into steps of packed rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field

from loguru import logger

from meshrl.algorithms.packing import Packing, pack_samples
from meshrl.sft.data.config import DataConfig
from meshrl.sft.data.conversations import DataError
from meshrl.sft.data.loader import DrawnSample
from meshrl.sft.data.mixture import Cursor
from meshrl.wire.values import JsonObject


@dataclass(frozen=True, kw_only=True)
class DataProgress:
    """The next row, and the trained samples and tokens of each part; checkpoints have it. By the identity of each part
    a resumed run notices other data."""

    next: Cursor = field(default_factory=Cursor)
    parts: Mapping[str, str] = field(default_factory=dict)
    samples: Mapping[str, int] = field(default_factory=dict)
    tokens: Mapping[str, int] = field(default_factory=dict)

    def to_json(self) -> dict[str, object]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: JsonObject) -> DataProgress:
        return cls(**{**values, "next": Cursor(**values["next"])})

    def changed(self, parts: Mapping[str, str]) -> str | None:
        """How `parts` differ from the trained data. None if they do not, or it was not recorded."""
        differing = [
            f"{part} had {was}, now {parts.get(part, 'nothing')}"
            for part, was in self.parts.items()
            if parts.get(part) != was
        ]
        return "; ".join(differing) or None

    def ratios(self) -> dict[str, float]:
        """The realised mixture by metric. Empty without one."""
        if len(self.samples) < 2:
            return {}
        shares: dict[str, float] = {}
        for what, counts in (("samples", self.samples), ("tokens", self.tokens)):
            total = sum(counts.values())
            shares |= {f"progress/{part}/ratio_{what}": number / total for part, number in counts.items()}
        return shares


@dataclass(frozen=True, kw_only=True, eq=False)
class SFTBatch:
    """One step's rows, the passes over the data after its last sample, and where the data goes on."""

    packing: Packing
    samples: int
    tokens: int
    epoch: float
    progress: DataProgress


def training_batches(
    drawn: Iterator[DrawnSample],
    data: DataConfig,
    *,
    parts: Mapping[str, str],
    dp_size: int = 1,
    progress: DataProgress | None = None,
) -> Iterator[SFTBatch]:
    """Endless steps, each divided among `dp_size` ranks. `parts` maps names to identities; `drawn` continues from
    `progress`. Raises DataError when a whole epoch has nothing to learn."""
    usable = _Usable(drawn, data)
    names = list(parts)
    counts = progress or DataProgress()
    samples, tokens = (
        {part: counts_of.get(part, 0) for part in parts} for counts_of in (counts.samples, counts.tokens)
    )
    held = next(usable)
    while True:
        chosen: list[DrawnSample] = []
        room = data.batch_size * data.seq_len if data.pack_function == "cat" else data.batch_size
        while not chosen or _size(held, data) <= room:
            chosen.append(held)
            room -= _size(held, data)
            held = next(usable)
        for each in chosen:
            samples[names[each.draw.part]] += 1
            tokens[names[each.draw.part]] += len(each.sample.token_ids)
        last = chosen[-1].draw
        if last.cursor.epoch > chosen[0].draw.cursor.epoch + 1:
            usable.warn_of_small_data()
        packing = pack_samples([each.sample for each in chosen], seq_len=data.row_tokens, dp_size=dp_size)
        yield SFTBatch(
            packing=packing,
            samples=len(chosen),
            tokens=sum(len(each.sample.token_ids) for each in chosen),
            epoch=last.cursor.epoch + last.passed,
            progress=DataProgress(next=held.draw.cursor, parts=parts, samples=dict(samples), tokens=dict(tokens)),
        )


def _size(drawn: DrawnSample, data: DataConfig) -> int:
    return len(drawn.sample.token_ids) if data.pack_function == "cat" else 1


class _Usable:
    """Samples with something to learn. Logs once how many have nothing, and how many were cut."""

    def __init__(self, drawn: Iterator[DrawnSample], data: DataConfig) -> None:
        self._drawn = drawn
        self._data = data
        self._epoch: int | None = None  # None until a whole one begins: a resumed run may start in the midst
        self._rows = self._useless = self._cut = 0
        self._told = self._warned = False

    def __next__(self) -> DrawnSample:
        while True:
            drawn = next(self._drawn)
            cursor = drawn.draw.cursor
            if self._epoch is None and cursor.position == 0:
                self._epoch, self._rows, self._useless, self._cut = cursor.epoch, 0, 0, 0
            if self._epoch is not None and cursor.epoch > self._epoch:
                self._report()
            self._rows += 1
            self._useless += not drawn.usable
            self._cut += drawn.cut
            if drawn.usable:
                return drawn

    def _report(self) -> None:
        if self._told:
            return
        self._told = True
        data = self._data
        if self._useless == self._rows:
            raise nothing_to_learn(data, self._rows)
        if self._useless:
            logger.warning("{}: {} of {} rows have nothing to learn", data.name, self._useless, self._rows)
        if self._cut:
            logger.warning(
                "{}: {} of {} rows are longer than data.seq_len {} and were cut", data.name, self._cut, self._rows,
                data.seq_len,
            )  # fmt: skip

    def warn_of_small_data(self) -> None:
        if not self._warned:
            self._warned = True
            data = self._data
            logger.warning(
                "one step goes through the data more than once: data.batch_size {} is {}; lower it, or give more data",
                data.batch_size,
                f"samples of data.seq_len {data.seq_len} tokens" if data.pack_function == "cat" else "conversations",
            )


def nothing_to_learn(data: DataConfig, rows: int) -> DataError:
    return DataError(
        f"data.name {data.name!r}: none of its {rows} rows has a token to learn within seq_len {data.seq_len}; see "
        "loss_mask, or raise data.seq_len"
    )


def validation_rows(drawn: Sequence[DrawnSample], data: DataConfig, *, dp_size: int) -> Packing:
    """Raises DataError when nothing is to be learned."""
    usable = [each.sample for each in drawn if each.usable]
    if not usable:
        raise nothing_to_learn(data, len(drawn))
    return pack_samples(usable, seq_len=data.row_tokens, dp_size=dp_size)
