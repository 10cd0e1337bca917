"""Brings each step's rows to every rank: rank 0 reads and packs them for all."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence

from loguru import logger

from meshrl.sft.config import TextSettings
from meshrl.sft.data.batches import DataProgress, SFTBatch, training_batches, validation_rows
from meshrl.sft.data.config import DataConfig
from meshrl.sft.data.conversations import DataError
from meshrl.sft.data.loader import TokenizedRows, drawn_samples, fake_samples
from meshrl.training.parallel.rank_group import RankGroup
from meshrl.training.parallel.sent_rows import decode_rows, encode_rows
from meshrl.wire.types import MicroBatch

AUTO_WORKERS = 2  # where a GPU trains; a CPU's cores have enough to do
_ROWS, _ERROR = b"R", b"E"


class Feed:
    """Every rank calls the same methods in the same order."""

    def __init__(
        self,
        text: TextSettings,
        data: DataConfig,
        parallel: RankGroup,
        *,
        vocab_size: int,
        validated: DataConfig | None = None,
        unused: frozenset[str] = frozenset(),
    ) -> None:
        """`unused` are columns and message keys that were logged before."""
        self._text, self._data, self._validated = text, data, validated
        self._parallel = parallel
        self._vocab_size = vocab_size
        self._unused = unused
        self._batches: Iterator[SFTBatch] | None = None
        self._dealt: SFTBatch | None = None  # on rank 0, for the step at hand
        self._close: Callable[[], None] = lambda: None
        self._validation: Sequence[MicroBatch] | None = None

    def start(self, progress: DataProgress | None, *, steps_done: int) -> None:
        """Continues from `progress`, or without it after the batches of `steps_done` steps. Raises DataError, on all
        ranks."""

        def open_data() -> Sequence[MicroBatch]:
            self._batches = self._open(progress or DataProgress())
            for _ in range(steps_done if progress is None else 0):
                next(self._batches)
            return ()

        self._from_first(open_data)

    def next_step(self) -> tuple[Sequence[MicroBatch], SFTBatch | None]:
        """The rows of all ranks; on rank 0 with their batch. Raises DataError, on all ranks."""

        def deal() -> Sequence[MicroBatch]:
            assert self._batches is not None, "start was not called"
            self._dealt = next(self._batches)
            return self._dealt.packing.micro_batches

        return self._from_first(deal), self._dealt

    def validation(self) -> Sequence[MicroBatch]:
        """Tokenized when first asked for. Raises DataError, on all ranks."""

        def read() -> Sequence[MicroBatch]:
            data = self._validated
            assert data is not None
            drawn = TokenizedRows(self._text, data, unused=self._unused).in_order()
            return validation_rows(drawn, data, dp_size=self._parallel.plan.dp_size).micro_batches

        if self._validation is None:
            self._validation = self._from_first(read)
        return self._validation

    def close(self) -> None:
        self._batches = None
        self._close()

    def _open(self, progress: DataProgress) -> Iterator[SFTBatch]:
        data = self._data
        if data.type == "fake":
            parts = {"fake": ""}
            drawn = fake_samples(data, progress.next, vocab_size=self._vocab_size)
        else:
            rows = TokenizedRows(self._text, data, unused=self._unused)
            parts = {name: of.identity for name, of in rows.parts.items()}
            changed = progress.changed(parts)
            if changed is not None:
                logger.warning(
                    "{} is not the data of the checkpoint: {}; the run goes on at epoch {}, row {} of the new order",
                    data.name, changed, progress.next.epoch, progress.next.position,
                )  # fmt: skip
            sizes = [f"{len(of):,} rows" + (f" of {name}" if len(parts) > 1 else "") for name, of in rows.parts.items()]
            logger.info("{}: {}", data.name, ", ".join(sizes))
            workers = data.num_workers
            if workers == "auto":
                workers = AUTO_WORKERS if self._parallel.device.type == "cuda" else 0
            drawn = drawn_samples(rows, progress.next, num_workers=workers)
        self._close = getattr(drawn, "close", self._close)
        return training_batches(drawn, data, parts=parts, dp_size=self._parallel.plan.dp_size, progress=progress)

    def _from_first(self, make: Callable[[], Sequence[MicroBatch]]) -> Sequence[MicroBatch]:
        if not self._parallel.plan.leads:
            sent = self._parallel.broadcast(None)
            if sent[:1] == _ERROR:
                raise DataError(json.loads(sent[1:]))
            return decode_rows(sent[1:])
        try:
            rows = make()
        except DataError as error:
            self._parallel.broadcast(_ERROR + json.dumps(str(error)).encode())
            raise
        if not self._parallel.plan.is_alone:
            self._parallel.broadcast(_ROWS + encode_rows(rows))
        return rows
