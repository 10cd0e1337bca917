"""Tokenizes rows in the order of the mixture, here or in processes that run ahead of training."""

from __future__ import annotations

import multiprocessing
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count, islice

import numpy as np
import torch
from loguru import logger
from torch.utils.data import DataLoader, Dataset

from meshrl.algorithms.packing import TrainSample
from meshrl.models.load import embedding_rows
from meshrl.sft.config import LossMaskConfig, TextSettings
from meshrl.sft.data.config import DataConfig
from meshrl.sft.data.conversations import Conversation, DataError, to_conversation
from meshrl.sft.data.mixture import Cursor, Draw, Mixture
from meshrl.sft.data.rendering import Renderers, load_sft_tokenizer
from meshrl.sft.data.sources import DataRows, every_row, open_parts, row_name
from meshrl.sft.data.tokenization import ConversationTokenizer

ROWS_AT_ONCE = 16  # rows that a process tokenizes before it hands them over
LOADER_DEADLINE_S = 600.0
_ROLES = frozenset(LossMaskConfig.model_fields)


@dataclass(frozen=True, kw_only=True, eq=False)
class DrawnSample:
    """One row in tokens, cut to seq_len. `usable`: something is left to learn."""

    draw: Draw
    sample: TrainSample
    usable: bool
    cut: bool


class TokenizedRows(Dataset[object]):
    """The rows of a data section in tokens, opened at first use by each process. `unused` are the columns, message
    keys and roles that nothing reads; a new one is logged."""

    def __init__(self, text: TextSettings, data: DataConfig, *, unused: frozenset[str] = frozenset()) -> None:
        self._text = text
        self._data = data
        self._parts: dict[str, DataRows] | None = None
        self._tokenize: ConversationTokenizer | None = None
        self._vocab_size: int | None = None
        self.unused = set(unused)

    @property
    def parts(self) -> dict[str, DataRows]:
        """Raises DataError."""
        if self._parts is None:
            self._parts = open_parts(self._data)
        return self._parts

    def sample(self, draw: Draw) -> DrawnSample:
        """Raises DataError for a malformed row, and ModelError when the tokenizer cannot be loaded."""
        name = list(self.parts)[draw.part]
        rows = self.parts[name]
        place = row_name(rows, name, draw.row, mixed=len(self.parts) > 1)
        conversation = to_conversation(rows[draw.row], place)
        self._list_unused(conversation)
        sample = self.tokenize(conversation)
        largest = int(sample.token_ids.max(initial=0))
        if self._vocab_size is not None and largest >= self._vocab_size:
            raise DataError(
                f"{place}: token {largest} ({self.tokenize.tokenizer.convert_ids_to_tokens(largest)!r}) is beyond the "
                f"{self._vocab_size} rows of the embedding of model.name {self._text.model.name!r}; take the "
                "tokenizer that belongs to it, or save the model with a larger embedding (resize_token_embeddings)"
            )
        return _fitted(draw, sample, self._data.seq_len)

    @property
    def tokenize(self) -> ConversationTokenizer:
        """Raises ModelError when the tokenizer cannot be loaded."""
        if self._tokenize is None:
            tokenizer = load_sft_tokenizer(self._text)
            renderers = Renderers(tokenizer, self._text.renderer) if self._text.renderer else None
            self._vocab_size = embedding_rows(self._text.model)
            self._tokenize = ConversationTokenizer(tokenizer, renderers, learned_roles=self._text.learned_roles)
        return self._tokenize

    def _list_unused(self, conversation: Conversation) -> None:
        template = str(self.tokenize.tokenizer.chat_template)
        unused = [f"column {name!r}" for name in conversation.other_columns]
        learnable = zip(conversation.messages, conversation.learned(_ROLES), strict=True)
        other_roles = {message["role"] for message, learned in learnable if not learned} - _ROLES
        unused += [f"role {role!r}, which loss_mask does not have" for role in other_roles]
        if not self._text.renderer:  # renderers read what they know of these
            keys = conversation.other_keys | ({"tools"} if conversation.tools else frozenset())
            read = {"reasoning_content": "reasoning"}  # a message has it by both names
            left_out = [name for name in keys if read.get(name, name) not in template]
            unused += [f"{name!r}, which the chat template leaves out" for name in left_out]
        for each in sorted(set(unused) - self.unused):
            logger.warning("{}: not used: {}", self._data.name, each)
        self.unused |= set(unused)

    def __getitem__(self, draws: Sequence[Draw]) -> list[DrawnSample] | str:
        """For the DataLoader: several rows, or what is wrong with one."""
        try:
            return [self.sample(draw) for draw in draws]
        except DataError as error:  # as a value, since the DataLoader would wrap it in its own words
            return str(error)

    def __getstate__(self) -> dict[str, object]:
        left = {"_parts": None, "_tokenize": None, "_vocab_size": None}  # a process of the loader opens its own
        return {"_text": self._text, "_data": self._data, "unused": self.unused, **left}

    def in_order(self) -> list[DrawnSample]:
        """Every row once, for validation. Raises DataError."""
        return [
            self.sample(Draw(cursor=Cursor(position=position), part=part, row=row, passed=0.0))
            for position, (part, row) in enumerate(every_row(self.parts))
        ]

    def mixture(self) -> Mixture:
        return Mixture(
            [len(rows) for rows in self.parts.values()],
            probabilities=self._data.probabilities,
            stopping_strategy=self._data.stopping_strategy,
            shuffle=self._data.shuffle,
            seed=self._data.seed,
        )


def _fitted(draw: Draw, sample: TrainSample, seq_len: int) -> DrawnSample:
    cut = len(sample.token_ids) > seq_len
    if cut:
        sample = replace(
            sample,
            token_ids=sample.token_ids[:seq_len],
            loss_mask=sample.loss_mask[:seq_len],
            logprobs=sample.logprobs[:seq_len],
        )
    return DrawnSample(draw=draw, sample=sample, usable=bool(sample.loss_mask[1:].any()), cut=cut)


def drawn_samples(rows: TokenizedRows, start: Cursor, *, num_workers: int) -> Iterator[DrawnSample]:
    """The endless order, the same for any number of processes. Raises DataError for a malformed row."""
    draws = rows.mixture().draws(start)
    if num_workers == 0:
        return map(rows.sample, draws)
    context = multiprocessing.get_context("forkserver")  # this process has threads, and may have a GPU
    context.set_forkserver_preload([__name__])  # takes seconds to import: once for all of them
    with warnings.catch_warnings():  # it finds more processes than cores too many, but they were asked for
        warnings.filterwarnings("ignore", message="This DataLoader will create", category=UserWarning)
        loader: DataLoader[object] = DataLoader(
            rows,
            sampler=iter(lambda: list(islice(draws, ROWS_AT_ONCE)), []),
            batch_size=None,
            num_workers=num_workers,
            collate_fn=_as_it_is,
            multiprocessing_context=context,
            timeout=LOADER_DEADLINE_S,
            generator=torch.Generator(),  # of its own: training must draw the same numbers with any number of workers
        )
        return _unpacked(iter(loader))


def _unpacked(loaded: Iterator[object]) -> Iterator[DrawnSample]:
    for found in loaded:
        if isinstance(found, str):
            raise DataError(found)
        assert isinstance(found, list)
        yield from found


def _as_it_is(found: object) -> object:
    return found


def fake_samples(data: DataConfig, start: Cursor, *, vocab_size: int) -> Iterator[DrawnSample]:
    """Endless. Variable lengths are lognormal around an eighth of seq_len, with a spread of one e-fold."""
    for position in count(start.position):
        source = np.random.default_rng([data.seed & 0xFFFFFFFF, position])
        length = data.seq_len
        if data.length == "variable":
            length = int(np.clip(source.lognormal(np.log(max(2, data.seq_len // 8))), 2, data.seq_len))
        if data.input_ids == "random":
            token_ids = source.integers(0, vocab_size, length)
        else:
            token_ids = (source.integers(0, vocab_size) + np.arange(length)) % vocab_size
        sample = TrainSample(
            token_ids=token_ids.astype(np.int32),
            loss_mask=np.ones(length, dtype=np.bool_),
            logprobs=np.zeros(length, dtype=np.float32),
        )
        yield _fitted(Draw(cursor=Cursor(position=position), part=0, row=position, passed=0.0), sample, data.seq_len)
