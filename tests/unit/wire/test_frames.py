"""Chunks framed by hand are the very bytes that protobuf writes."""

import pytest

from meshrl.v1 import weights_pb2 as pb
from meshrl.wire import frames
from meshrl.wire.errors import MeshError
from meshrl.wire.types import Chunk

CHUNKS = [
    Chunk(offset=0, data=b"abc", crc32c=0),
    Chunk(offset=0, data=b"x" * 300, crc32c=7),
    Chunk(offset=2**40, data=memoryview(b"hello"), crc32c=2**32 - 1),
    Chunk(offset=5, data=b"", crc32c=9),
    Chunk(offset=0, data=b"", crc32c=0),
]


@pytest.mark.parametrize("chunk", CHUNKS)
def test_framed_bytes_are_what_protobuf_writes(chunk):
    message = pb.Chunk(offset=chunk.offset, data=bytes(chunk.data), crc32c=chunk.crc32c)
    assert frames.frame_upload_chunk(chunk) == pb.CreateVersionRequest(chunk=message).SerializeToString()
    assert frames.frame_fetch_chunk(chunk) == pb.FetchResponse(chunk=message).SerializeToString()


@pytest.mark.parametrize("chunk", CHUNKS)
def test_parsing_gives_the_chunk_back(chunk):
    for parsed in (
        frames.parse_upload(frames.frame_upload_chunk(chunk)),
        frames.parse_fetch(frames.frame_fetch_chunk(chunk)),
    ):
        assert isinstance(parsed, Chunk)
        assert (parsed.offset, bytes(parsed.data), parsed.crc32c) == (chunk.offset, bytes(chunk.data), chunk.crc32c)


def test_data_is_a_view_and_not_a_copy():
    message = frames.frame_fetch_chunk(CHUNKS[1])
    data = frames.parse_fetch(message).data
    assert isinstance(data, memoryview)
    assert data.obj is message


def test_fields_in_another_order_are_read_too():
    message = pb.FetchResponse(chunk=pb.Chunk(data=b"abc", crc32c=4)).SerializeToString()
    inner = pb.Chunk(crc32c=4).SerializeToString() + pb.Chunk(offset=3, data=b"abc").SerializeToString()
    assert message != inner
    parsed = frames.parse_fetch(bytes((0x0A, len(inner))) + inner)
    assert (parsed.offset, bytes(parsed.data), parsed.crc32c) == (3, b"abc", 4)


def test_a_manifest_is_told_from_a_chunk():
    upload = frames.parse_upload(pb.CreateVersionRequest(manifest=pb.Manifest(run_id="r")).SerializeToString())
    assert isinstance(upload, pb.Manifest)
    assert upload.run_id == "r"


@pytest.mark.parametrize("message", [b"", b"\xff\xff", b"\x12\x05ab"])
def test_bytes_that_are_no_upload_are_refused(message):
    with pytest.raises(MeshError, match="INVALID_REQUEST"):
        frames.parse_upload(message)
