"""How chunks framed by hand are read; that they are protobuf's bytes is among the codec's properties."""

import pytest

from meshrl.v1 import weights_pb2 as pb
from meshrl.wire import frames
from meshrl.wire.errors import MeshError
from meshrl.wire.types import Chunk


def test_data_is_a_view_and_not_a_copy():
    message = frames.frame_fetch_chunk(Chunk(offset=0, data=b"x" * 300, crc32c=7))
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
