"""Serializes chunks of weights by hand, since protobuf in Python copies them several times.

Writing copies the data once; reading returns a view into the message. The bytes are protobuf's, so either side may use
plain messages.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import TypeVar

import grpc
from google.protobuf.message import DecodeError, Message

from meshrl.v1 import weights_pb2 as pb
from meshrl.v1 import weights_pb2_grpc
from meshrl.wire.convert import from_proto
from meshrl.wire.errors import FieldViolation, invalid
from meshrl.wire.types import Chunk

SERVICE = "meshrl.v1.WeightSync"
CREATE_VERSION = f"/{SERVICE}/CreateVersion"
FETCH = f"/{SERVICE}/Fetch"

# Tags of length-delimited fields (number << 3 | 2), and of the fields of Chunk.
_UPLOAD_CHUNK_TAG = 0x12  # CreateVersionRequest.chunk = 2
_FETCH_CHUNK_TAG = 0x0A  # FetchResponse.chunk = 1
_OFFSET_TAG = 0x08
_DATA_TAG = 0x12
_CRC_TAG = 0x1D
_CRC = struct.Struct("<I")

_M = TypeVar("_M", bound=Message)


def frame_upload_chunk(chunk: Chunk) -> bytes:
    return _frame(_UPLOAD_CHUNK_TAG, chunk)


def frame_fetch_chunk(chunk: Chunk) -> bytes:
    return _frame(_FETCH_CHUNK_TAG, chunk)


def parse_upload(message: bytes) -> pb.Manifest | pb.ManifestPart | Chunk:
    """Of a serialized CreateVersionRequest; a chunk's data is a view into it. Raises INVALID_REQUEST for other
    bytes."""
    chunk = _parse(_UPLOAD_CHUNK_TAG, message)
    if chunk is not None:
        return chunk
    request = _decode(pb.CreateVersionRequest(), message)
    part = request.WhichOneof("part")
    if part is None:
        raise invalid([FieldViolation("part", "must be a manifest, a part of one or a chunk")], "the upload")
    if part == "chunk":
        return from_proto(Chunk, request.chunk)
    return request.manifest if part == "manifest" else request.manifest_part


def parse_fetch(message: bytes) -> Chunk:
    chunk = _parse(_FETCH_CHUNK_TAG, message)
    return chunk if chunk is not None else from_proto(Chunk, _decode(pb.FetchResponse(), message).chunk)


def serialize(message: Message | bytes) -> bytes:
    """Passes bytes that are framed already through."""
    return message if isinstance(message, bytes) else message.SerializeToString()


def pass_through(message: bytes) -> bytes:
    return message


def add_weight_sync(servicer: weights_pb2_grpc.WeightSyncServicer, server: grpc.aio.Server) -> None:
    """With raw bytes for bulk methods: CreateVersion gets an async iterator of `bytes` (see `parse_upload`); Fetch
    may yield `bytes` (see `frame_fetch_chunk`) or messages."""
    add: Callable[..., None] = weights_pb2_grpc.add_WeightSyncServicer_to_server  # generated without types
    add(servicer, _RawRegistrar(server))


class _RawRegistrar:
    def __init__(self, server: grpc.aio.Server) -> None:
        self._server = server

    def add_generic_rpc_handlers(self, handlers: object) -> None:
        """The registered handlers below carry the same methods."""

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, grpc.RpcMethodHandler]) -> None:
        raw = dict(handlers)
        raw["CreateVersion"] = grpc.stream_unary_rpc_method_handler(
            handlers["CreateVersion"].stream_unary,
            request_deserializer=pass_through,
            response_serializer=serialize,
        )
        raw["Fetch"] = grpc.unary_stream_rpc_method_handler(
            handlers["Fetch"].unary_stream,
            request_deserializer=handlers["Fetch"].request_deserializer,
            response_serializer=serialize,
        )
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, raw),))


def _frame(tag: int, chunk: Chunk) -> bytes:
    data = chunk.data
    head = b""
    if chunk.offset:
        head = bytes((_OFFSET_TAG,)) + _varint(chunk.offset)
    if len(data):
        head += bytes((_DATA_TAG,)) + _varint(len(data))
    tail = bytes((_CRC_TAG,)) + _CRC.pack(chunk.crc32c) if chunk.crc32c else b""
    size = len(head) + len(data) + len(tail)
    return b"".join((bytes((tag,)), _varint(size), head, data, tail))


def _parse(tag: int, message: bytes) -> Chunk | None:
    """The one layout that `_frame` writes for a chunk with data; None leaves it to protobuf."""
    try:
        if message[0] != tag:
            return None
        size, at = _read_varint(message, 1)
        if at + size != len(message):
            return None
        offset = 0
        if message[at] == _OFFSET_TAG:
            offset, at = _read_varint(message, at + 1)
        if message[at] != _DATA_TAG:
            return None
        length, at = _read_varint(message, at + 1)
        end = at + length
        if end == len(message):
            crc32c = 0
        elif end + 1 + _CRC.size == len(message) and message[end] == _CRC_TAG:
            (crc32c,) = _CRC.unpack_from(message, end + 1)
        else:
            return None
    except IndexError:  # cut short: protobuf says what is wrong with it
        return None
    return Chunk(offset=offset, data=memoryview(message)[at:end], crc32c=crc32c)


def _decode(into: _M, message: bytes) -> _M:
    try:
        into.ParseFromString(message)
    except DecodeError as error:
        raise invalid([FieldViolation("part", f"cannot be read: {error}")], into.DESCRIPTOR.name) from error
    return into


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise IndexError("varint is too long")
