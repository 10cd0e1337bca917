"""Packed rows as bytes: protobuf messages, each after its length."""

from __future__ import annotations

import io
from collections.abc import Iterable

from google.protobuf import proto

from meshrl.v1 import trainer_pb2 as pb
from meshrl.wire.convert.micro_batches import micro_batch_from_proto, micro_batch_to_proto
from meshrl.wire.types import MicroBatch


def encode_rows(rows: Iterable[MicroBatch]) -> bytes:
    sent = io.BytesIO()
    for row in rows:
        proto.serialize_length_prefixed(micro_batch_to_proto(row), sent)
    return sent.getvalue()


def decode_rows(data: bytes) -> list[MicroBatch]:
    """The arrays are read-only views of the messages."""
    source, rows = io.BytesIO(data), list[MicroBatch]()
    while (message := proto.parse_length_prefixed(pb.MicroBatch, source)) is not None:
        rows.append(micro_batch_from_proto(message))
    return rows
