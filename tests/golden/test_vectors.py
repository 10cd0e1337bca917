"""The conformance vectors that every implementation of the contract is held to, in whatever language.

A difference here is a change of the contract: add cases, never edit one. docs/contract.md defines each value.
"""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pytest
import torch
from blake3 import blake3

from meshrl.v1 import reasons_pb2, weights_pb2
from meshrl.versions.collective.digest import digest_bytes, sum128
from meshrl.versions.deltas.codec import Rows, encode, read_stream, unpack, words_of
from meshrl.versions.deltas.words import from_ordered, ordered
from meshrl.wire import completion_frame, convert, manifest_file
from meshrl.wire.completion_frame import CompletionFrame, FrameChoice
from meshrl.wire.convert.batches import batch_digest
from meshrl.wire.errors import Reason
from meshrl.wire.manifest import artifact_id, layout_signature, plan_tensors, root_of
from meshrl.wire.types import Batch, Manifest, MicroBatch, VersionSpan

VECTORS = Path(__file__).parents[2] / "proto" / "vectors"
DIGESTS = json.loads((VECTORS / "digests.json").read_text())
MANIFESTS = json.loads((VECTORS / "manifests.json").read_text())
DELTAS = [json.loads((VECTORS / name).read_text()) for name in ("deltas.json", "sparse_deltas.json")]
FRAMES = json.loads((VECTORS / "completion_frames.json").read_text())["frames"]
ELEMENTS = {
    "token_ids": np.int32,
    "position_ids": np.int32,
    "loss_mask": np.bool_,
    "sample_offsets": np.int64,
    "env_index": np.int32,
}  # the others are float32


def test_reasons_of_the_contract_are_those_of_the_catalogue() -> None:
    published = {name.removeprefix("REASON_") for name in reasons_pb2.Reason.DESCRIPTOR.values_by_name}
    assert published == {*Reason.__members__, "UNSPECIFIED"}


@pytest.mark.parametrize("case", DIGESTS["blake3"])
def test_blake3(case: dict[str, str]) -> None:
    assert blake3(bytes.fromhex(case["bytes"])).hexdigest() == case["digest"]


@pytest.mark.parametrize("case", DIGESTS["crc32c"])
def test_crc32c(case: dict[str, Any]) -> None:
    assert google_crc32c.value(bytes.fromhex(case["bytes"])) == case["crc32c"]


@pytest.mark.parametrize("case", DIGESTS["sum128"])
def test_sum128(case: dict[str, Any]) -> None:
    values = torch.tensor(list(bytes.fromhex(case["bytes"])), dtype=torch.uint8)
    assert digest_bytes(sum128(values, case["first_word"])).hex() == case["digest"]


@pytest.mark.parametrize("case", DIGESTS["layout_signature"])
def test_layout_signature(case: dict[str, Any]) -> None:
    assert layout_signature(tuple(tensor) for tensor in case["tensors"]).hex() == case["signature"]
    assert layout_signature(tuple(tensor) for tensor in reversed(case["tensors"])).hex() == case["signature"]


@pytest.mark.parametrize("case", DIGESTS["result_root"])
def test_result_root(case: dict[str, Any]) -> None:
    tensors = [(name, dtype, shape, bytes.fromhex(digest)) for name, dtype, shape, digest in case["tensors"]]
    assert root_of(tensors).hex() == case["root"]


@pytest.mark.parametrize("case", DIGESTS["batch_digest"])
def test_batch_digest(case: dict[str, Any]) -> None:
    rows = []
    for fields in case["micro_batches"]:
        arrays = {name: np.array(values, dtype=ELEMENTS.get(name, np.float32)) for name, values in fields.items()}
        rows.append(MicroBatch(dp_rank=0, rollout_ids=("a", "b"), traceparents=(), **arrays))
    batch = Batch(run_id="run", step=1, micro_batches=tuple(rows), loss_tokens=3, environments=("env",))
    assert batch_digest(batch) == case["digest"]


def test_byte_stream_of_a_version() -> None:
    expected = [tuple(fields) for fields in MANIFESTS["tensors"]]
    plans = plan_tensors((name, dtype, shape) for name, dtype, shape, _, _ in reversed(expected))
    assert [(each.name, each.dtype, list(each.shape), each.offset, each.num_bytes) for each in plans] == expected
    stream = bytes.fromhex(MANIFESTS["stream"])
    manifest = manifest_file.from_json(json.dumps(MANIFESTS["manifests"][0]["json"]).encode())
    for part in (*manifest.tensors, *manifest.chunks):
        size = part.num_bytes if hasattr(part, "num_bytes") else part.length
        assert blake3(stream[part.offset : part.offset + size]).digest() == part.digest


@pytest.mark.parametrize("case", MANIFESTS["manifests"], ids=lambda case: case["case"])
def test_manifest(case: dict[str, Any]) -> None:
    manifest = manifest_file.from_json(json.dumps(case["json"]).encode())
    assert artifact_id(manifest) == case["artifact_id"] == case["json"]["artifact_id"]
    assert json.loads(manifest_file.to_json(manifest)) == case["json"]
    message = convert.to_proto(manifest)
    assert message.SerializeToString(deterministic=True).hex() == case["message"]
    read = weights_pb2.Manifest.FromString(bytes.fromhex(case["message"]))
    assert convert.from_proto(Manifest, read) == manifest


@pytest.mark.parametrize("case", DELTAS, ids=["many changes", "few changes"])
def test_delta(case: dict[str, Any]) -> None:
    plan = plan_tensors((name, dtype, shape) for name, dtype, shape, _, _ in case["tensors"])
    assert [[t.name, t.dtype, list(t.shape), t.offset, t.num_bytes] for t in plan] == case["tensors"]
    base = (np.arange(plan[-1].offset + plan[-1].num_bytes) * 37 % 251).astype(np.uint8)
    base[4:8] = 0
    result = base.copy()
    for piece in read_stream(np.frombuffer(bytes.fromhex(case["delta"]), dtype=np.uint8)):
        found = unpack(piece)
        words = words_of(result, found.run)
        words[found.places] = from_ordered(ordered(words[found.places]) + found.steps)
    assert [[int(at), int(result[at])] for at in np.flatnonzero(result != base)] == case["result"]
    with ThreadPoolExecutor(1) as threads:
        made = [unpack(packed) for _, packed in encode(Rows(plan), base, result, threads)]
    for again, piece in zip(
        made, read_stream(np.frombuffer(bytes.fromhex(case["delta"]), dtype=np.uint8)), strict=True
    ):
        assert again.places.tolist() == unpack(piece).places.tolist()
        assert again.steps.tolist() == unpack(piece).steps.tolist()


@pytest.mark.parametrize("case", FRAMES, ids=lambda case: case["request_id"] or "empty")
def test_completion_frame(case: dict[str, Any]) -> None:
    data = bytes.fromhex(case["bytes"])
    assert completion_frame.encode(frame_of(case)) == data
    decoded = completion_frame.decode(data)
    assert (decoded.request_id, decoded.prompt_tokens) == (case["request_id"], case["prompt_tokens"])
    assert [fields_of(choice) for choice in decoded.choices] == case["choices"]


def frame_of(case: dict[str, Any]) -> CompletionFrame:
    choices = []
    for fields in case["choices"]:
        spans = [VersionSpan(start=start, end=end, version=version) for start, end, version in fields["version_spans"]]
        if spans and fields["prompt_version"] is not None:
            start, end, version = fields["version_spans"][0]
            first = VersionSpan(start=start, end=end, version=version, prompt_version=fields["prompt_version"])
            spans = [first, *spans[1:]]
        choices.append(
            FrameChoice(
                token_ids=np.array(fields["token_ids"], dtype=np.int32),
                logprobs=floats(fields["logprobs"]),
                raw_logprobs=floats(fields["raw_logprobs"]),
                version_spans=tuple(spans),
                finish_reason=fields["finish_reason"],
                stop_token_id=fields["stop_token_id"],
            )
        )
    return CompletionFrame(request_id=case["request_id"], prompt_tokens=case["prompt_tokens"], choices=tuple(choices))


def fields_of(choice: FrameChoice) -> dict[str, Any]:
    return {
        "token_ids": choice.token_ids.tolist(),
        "logprobs": None if choice.logprobs is None else choice.logprobs.tolist(),
        "raw_logprobs": None if choice.raw_logprobs is None else choice.raw_logprobs.tolist(),
        "version_spans": [[span.start, span.end, span.version] for span in choice.version_spans],
        "prompt_version": choice.version_spans[0].prompt_version if choice.version_spans else None,
        "finish_reason": choice.finish_reason,
        "stop_token_id": choice.stop_token_id,
    }


def floats(values: list[float] | None) -> Any:
    return None if values is None else np.array(values, dtype=np.float32)
