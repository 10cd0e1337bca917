"""Messages of TrainerService. T tokens and S samples of a micro-batch."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import numpy as np
from blake3 import blake3

from meshrl.v1 import trainer_pb2 as pb
from meshrl.wire import tensors, validate
from meshrl.wire.convert.by_annotation import from_proto, to_proto
from meshrl.wire.convert.fields import FieldReader
from meshrl.wire.convert.micro_batches import OPTIONAL, TENSORS, micro_batch_from_proto, micro_batch_to_proto
from meshrl.wire.errors import FieldViolation, MeshError, Reason, invalid
from meshrl.wire.types import Batch, BatchHeader, MicroBatch, StepEvent
from meshrl.wire.values import Array


def batch_digest(batch: Batch) -> str:
    """BLAKE3 (64 hexadecimal digits) over the tensors of all micro-batches; docs/contract.md has the format."""
    state = blake3(b"meshrl.batch.v1")
    state.update(struct.pack("<Q", len(batch.micro_batches)))
    for micro_batch in batch.micro_batches:
        for name, dtype in TENSORS.items():
            _hash_tensor(state, getattr(micro_batch, name), dtype)
        for name, dtype in OPTIONAL.items():
            if (array := getattr(micro_batch, name)) is not None:
                state.update(struct.pack(f"<Q{len(name)}s", len(name), name.encode()))
                _hash_tensor(state, array, dtype)
    return state.hexdigest()


def routes_digest(batch: Batch) -> str:
    """Over the routed_experts, which `batch_digest` leaves out; "" without any."""
    routes = [micro_batch.routed_experts for micro_batch in batch.micro_batches]
    if all(each is None for each in routes):
        return ""
    state = blake3(b"meshrl.routes.v1")
    state.update(struct.pack("<Q", len(routes)))
    for each in routes:
        state.update(struct.pack("<?", each is not None))
        if each is not None:
            _hash_tensor(state, each, each.dtype.name)
    return state.hexdigest()


def _hash_tensor(state: blake3, values: Array, dtype: str) -> None:
    array = np.asarray(values, dtype=tensors.DTYPES[dtype].storage, order="C")
    header = struct.pack(f"<Q{len(dtype)}sQ{array.ndim}q", len(dtype), dtype.encode(), array.ndim, *array.shape)
    state.update(header + struct.pack("<Q", array.nbytes))
    state.update(array.reshape(-1).view(np.uint8).data if array.size else b"")


def batch_to_messages(batch: Batch) -> Iterator[pb.SubmitBatchRequest]:
    """The header, then one micro-batch each."""
    header = BatchHeader(
        **_shared(batch),
        digest=batch_digest(batch),
        routes_digest=routes_digest(batch),
        num_micro_batches=len(batch.micro_batches),
    )
    yield pb.SubmitBatchRequest(header=to_proto(header))
    for micro_batch in batch.micro_batches:
        yield pb.SubmitBatchRequest(micro_batch=micro_batch_to_proto(micro_batch))


class BatchReader:
    """Reads one upload: `feed` checks each message in order, `finish` returns the batch."""

    def __init__(self, *, seq_len: int, dp_size: int = 1) -> None:
        self._seq_len = seq_len
        self._dp_size = dp_size
        self._micro_batches: list[MicroBatch] = []
        self._header: BatchHeader | None = None

    @property
    def header(self) -> BatchHeader | None:
        return self._header

    def feed(self, message: pb.SubmitBatchRequest) -> None:
        """Raises INVALID_REQUEST for a message that is wrong or out of order."""
        part = message.WhichOneof("part")
        if self._header is None:
            if part != "header":
                raise invalid([FieldViolation("header", "must be the first message")], "the batch")
            found, count = validate.violations(message), message.header.num_micro_batches
            if count % self._dp_size:
                text = f"must be a multiple of dp_size ({self._dp_size}), got {count}"
                found.append(FieldViolation("header.num_micro_batches", text))
            if found:
                raise invalid(found, "the batch header")
            self._header = from_proto(BatchHeader, message.header)
            return
        index = len(self._micro_batches)
        if part != "micro_batch" or index >= self._header.num_micro_batches:
            due = f"{self._header.num_micro_batches} micro-batches follow the header"
            raise invalid([FieldViolation(part or "part", f"was not expected: {due}, {index} came")], "the batch")
        field = f"micro_batches[{index}]"
        micro_batch = micro_batch_from_proto(
            message.micro_batch, num_environments=len(self._header.environments), field=field
        )
        reader = FieldReader("the batch", field)
        num_tokens = len(micro_batch.token_ids)
        reader.check(num_tokens <= self._seq_len, "token_ids", f"takes at most {self._seq_len}, got {num_tokens}")
        reader.check(micro_batch.dp_rank < self._dp_size, "dp_rank", f"must be below {self._dp_size}")
        reader.done()
        self._micro_batches.append(micro_batch)

    def finish(self) -> Batch:
        """Raises INVALID_REQUEST for missing messages, loss_tokens unlike the masks' count or a batch without a
        trained token, and BATCH_DIGEST_MISMATCH."""
        header = self._header
        if header is None:
            raise invalid([FieldViolation("header", "must be the first message")], "the batch")
        reader = FieldReader("the batch")
        came = len(self._micro_batches)
        reader.check(
            came == header.num_micro_batches, "num_micro_batches", f"is {header.num_micro_batches}, {came} came"
        )
        loss_tokens = sum(int(micro_batch.loss_mask.sum()) for micro_batch in self._micro_batches)
        reader.check(loss_tokens == header.loss_tokens, "loss_tokens", f"is {header.loss_tokens}, {loss_tokens} came")
        reader.check(
            loss_tokens > 0 or any(map(_has_weights, self._micro_batches)),
            "loss_mask",
            "marks no token and no ce_weights or ref_kl_weights does: there is nothing to train on",
        )
        shares = {sum(m.dp_rank == rank for m in self._micro_batches) for rank in range(self._dp_size)}
        reader.check(len(shares) == 1, "dp_rank", "every rank takes an equal number of micro-batches")
        reader.done()
        batch = Batch(**_shared(header), micro_batches=tuple(self._micro_batches))
        for what, digest, told in (
            ("tensors", batch_digest(batch), header.digest),
            ("routed_experts", routes_digest(batch), header.routes_digest),
        ):
            if digest != told:
                raise MeshError(
                    Reason.BATCH_DIGEST_MISMATCH,
                    f"the {what} of step {header.step} hash to {digest!r}, the header says {told!r}; send them again",
                )
        return batch


def _shared(source: Batch | BatchHeader) -> dict[str, Any]:
    names = {field.name for field in fields(Batch)} & {field.name for field in fields(BatchHeader)}
    return {name: getattr(source, name) for name in names}


def _has_weights(micro_batch: MicroBatch) -> bool:
    return any(
        weights is not None and bool(weights.any()) for weights in (micro_batch.ce_weights, micro_batch.ref_kl_weights)
    )


def step_event_from_proto(message: pb.WatchStepsResponse) -> StepEvent | None:
    """None for an unknown state."""
    try:
        return from_proto(StepEvent, message)
    except MeshError:  # of a newer trainer; a watch goes on
        return None
