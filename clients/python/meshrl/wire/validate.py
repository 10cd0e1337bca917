"""Checks the requests that a server receives: each function raises one MeshError that names every bad field.

Only what a message shows by itself is checked here; whether an environment or a run exists is for the service to check.
"""

from __future__ import annotations

import math

from meshrl.v1 import exchange_pb2, rollout_pb2, trainer_pb2, weights_pb2
from meshrl.wire.errors import FieldViolation, MeshError, Reason, invalid
from meshrl.wire.types import CONTRACT_VERSION

MAX_ID_CHARS = 256
_BLAKE3_HEX_CHARS = 64
COLLECTIVE_BACKENDS = frozenset({"nccl", "gloo"})


class _Violations:
    def __init__(self) -> None:
        self.found: list[FieldViolation] = []

    def check(self, holds: bool, field: str, description: str) -> None:
        if not holds:
            self.found.append(FieldViolation(field, description))

    def identifier(self, value: str, field: str) -> None:
        self.check(0 < len(value) <= MAX_ID_CHARS, field, f"must have 1 to {MAX_ID_CHARS} characters")

    def digest(self, value: str, field: str) -> None:
        is_digest = len(value) == _BLAKE3_HEX_CHARS and all(char in "0123456789abcdef" for char in value)
        self.check(is_digest, field, f"must be {_BLAKE3_HEX_CHARS} lower-case hexadecimal digits")

    def positive_s(self, value: float, field: str) -> None:
        self.check(math.isfinite(value) and value > 0, field, f"must be a positive number of seconds, got {value:g}")

    def seconds(self, value: float, field: str) -> None:
        holds = math.isfinite(value) and value >= 0
        self.check(holds, field, f"must be 0 or a positive number of seconds, got {value:g}")

    def backend(self, value: str, field: str) -> None:
        self.check(value in COLLECTIVE_BACKENDS, field, f"must be nccl or gloo, got {value!r}")

    def done(self, what: str) -> None:
        if self.found:
            raise invalid(self.found, what)


def validate_contract_version(peer: str) -> None:
    """Raises CONTRACT_MISMATCH when the peer's major version differs from ours; an empty one is tolerated."""
    if peer and peer.split(".")[0] != CONTRACT_VERSION.split(".")[0]:
        raise MeshError(
            Reason.CONTRACT_MISMATCH,
            f"the peer speaks contract {peer}, this program {CONTRACT_VERSION}; run releases of the same major version",
            metadata={"contract_version": CONTRACT_VERSION},
        )


def at_least(peer: str, version: str) -> bool:
    """Whether a peer has stated this contract version or a later one; one that stated none has not."""
    stated = peer.split(".")
    return all(part.isdigit() for part in stated) and [*map(int, stated)] >= [*map(int, version.split("."))]


def _check_sampling(violations: _Violations, message: rollout_pb2.Sampling, field: str) -> None:
    """Notes values outside the range that each field's comment gives."""
    check = violations.check
    if message.HasField("temperature"):
        value = message.temperature
        check(math.isfinite(value) and value >= 0, f"{field}.temperature", f"must be 0 or more, got {value:g}")
    if message.HasField("top_p"):
        check(0 < message.top_p <= 1, f"{field}.top_p", f"must be in (0, 1], got {message.top_p:g}")
    if message.HasField("top_k"):
        check(message.top_k >= -1, f"{field}.top_k", f"must be -1 or more, got {message.top_k}")
    if message.HasField("min_p"):
        check(0 <= message.min_p <= 1, f"{field}.min_p", f"must be in [0, 1], got {message.min_p:g}")
    if message.HasField("max_tokens"):
        check(message.max_tokens >= 1, f"{field}.max_tokens", "must be at least 1")
    check(all(token_id >= 0 for token_id in message.stop_token_ids), f"{field}.stop_token_ids", "must be 0 or more")


def validate_watch_request(message: trainer_pb2.WatchStepsRequest | weights_pb2.WatchVersionsRequest) -> None:
    """Raises INVALID_REQUEST unless bookmarks come at a time."""
    violations = _Violations()
    violations.seconds(message.bookmark_s, "bookmark_s")
    violations.done("the watch")


def validate_drain_request(
    message: rollout_pb2.RolloutServiceDrainRequest | trainer_pb2.DrainRequest | weights_pb2.WeightSyncDrainRequest,
) -> None:
    """Raises INVALID_REQUEST unless a deadline is a time."""
    violations = _Violations()
    violations.seconds(message.deadline_s, "deadline_s")
    violations.done("the drain request")


def validate_rollout_request(message: rollout_pb2.RunRolloutsRequest) -> None:
    """Raises INVALID_REQUEST unless the request names a task, a size, a deadline and itself."""
    violations = _Violations()
    violations.identifier(message.request_id, "request_id")
    violations.identifier(message.group_id, "group_id")
    violations.identifier(message.environment, "environment")
    violations.check(message.WhichOneof("task") is not None, "task", "set task_index or task_payload")
    violations.check(message.group_size >= 1, "group_size", "must be at least 1")
    violations.positive_s(message.deadline_s, "deadline_s")
    violations.seconds(message.linger_s, "linger_s")
    _check_sampling(violations, message.sampling, "sampling")
    violations.done("the rollout request")


def validate_batch_header(message: trainer_pb2.BatchHeader, *, dp_size: int = 1) -> None:
    """Raises INVALID_REQUEST unless the header has a step, a digest and an even share of work for every rank."""
    violations = _Violations()
    count = message.num_micro_batches
    violations.check(message.step >= 1, "header.step", "must be at least 1")
    violations.digest(message.digest, "header.digest")
    violations.check(
        count >= 1 and count % dp_size == 0,
        "header.num_micro_batches",
        f"must be a positive multiple of dp_size ({dp_size}), got {count}",
    )
    violations.check(len(message.environments) >= 1, "header.environments", "must name at least one environment")
    violations.done("the batch header")


def validate_run_request(message: trainer_pb2.CreateRunRequest | trainer_pb2.DeleteRunRequest) -> None:
    """Raises INVALID_REQUEST unless the run and the request are named."""
    violations = _Violations()
    violations.identifier(message.request_id, "request_id")
    violations.identifier(message.run_id, "run_id")
    violations.done("the run request")


def validate_checkpoint_request(message: trainer_pb2.SaveCheckpointRequest) -> None:
    """Raises INVALID_REQUEST unless the request is named."""
    violations = _Violations()
    violations.identifier(message.request_id, "request_id")
    violations.done("the checkpoint request")


def validate_register_request(message: weights_pb2.RegisterRequest) -> None:
    """Raises CONTRACT_MISMATCH or INVALID_REQUEST unless the agent can be identified, reached and served."""
    validate_contract_version(message.contract_version)
    violations = _Violations()
    violations.identifier(message.engine_id, "engine_id")
    is_url = message.url.startswith(("http://", "https://"))
    violations.check(is_url, "url", f"must start with http:// or https://, got {message.url!r}")
    known = {weights_pb2.TRANSPORT_FILESYSTEM, weights_pb2.TRANSPORT_STREAM, weights_pb2.TRANSPORT_NCCL}
    violations.check(bool(known.intersection(message.transports)), "transports", "must name one that this hub knows")
    violations.check(len(message.layout_signature) > 0, "layout_signature", "must not be empty")
    backend = message.collective_backend
    known_backend = backend in COLLECTIVE_BACKENDS or not message.collective_ranks
    violations.check(
        known_backend, "collective_backend", f"must be nccl or gloo with collective_ranks, got {backend!r}"
    )
    violations.done("the registration")


def validate_seal_request(message: weights_pb2.SealVersionRequest) -> None:
    """Raises INVALID_REQUEST unless run, epoch and artifact are named."""
    violations = _Violations()
    violations.identifier(message.request_id, "request_id")
    violations.identifier(message.run_id, "run_id")
    violations.check(message.epoch >= 1, "epoch", "must be at least 1")
    violations.digest(message.artifact_id, "artifact_id")
    violations.done("the seal request")


def validate_abort_request(message: weights_pb2.AbortVersionRequest) -> None:
    """Raises INVALID_REQUEST unless run and epoch are named."""
    violations = _Violations()
    violations.identifier(message.request_id, "request_id")
    violations.identifier(message.run_id, "run_id")
    violations.check(message.epoch >= 1, "epoch", "must be at least 1")
    violations.done("the abort request")


def validate_close_run_request(message: weights_pb2.CloseRunRequest) -> None:
    """Raises INVALID_REQUEST unless run and epoch are named."""
    violations = _Violations()
    violations.identifier(message.request_id, "request_id")
    violations.identifier(message.run_id, "run_id")
    violations.check(message.epoch >= 1, "epoch", "must be at least 1")
    violations.done("the request")


def validate_activate_request(message: weights_pb2.ActivateVersionRequest) -> None:
    """Raises INVALID_REQUEST unless the run is named and the wait has an end."""
    violations = _Violations()
    violations.identifier(message.request_id, "request_id")
    violations.identifier(message.run_id, "run_id")
    violations.positive_s(message.prepare_deadline_s, "prepare_deadline_s")
    violations.done("the activation request")


def validate_open_group_request(message: weights_pb2.OpenGroupRequest) -> None:
    """Raises INVALID_REQUEST unless publisher, store, backend and senders are named and the wait has an end."""
    violations = _Violations()
    violations.identifier(message.request_id, "request_id")
    violations.identifier(message.run_id, "run_id")
    violations.identifier(message.store_address, "store_address")
    violations.check(message.epoch >= 1, "epoch", "must be at least 1")
    violations.check(
        message.backend in COLLECTIVE_BACKENDS, "backend", f"must be nccl or gloo, got {message.backend!r}"
    )
    violations.check(message.num_senders >= 1, "num_senders", "must be at least 1")
    violations.positive_s(message.deadline_s, "deadline_s")
    violations.done("the group request")


def validate_sleep_request(message: weights_pb2.SleepEnginesRequest) -> None:
    """Raises INVALID_REQUEST unless the wait has an end."""
    violations = _Violations()
    violations.positive_s(message.deadline_s, "deadline_s")
    violations.done("the sleep request")


def validate_manifest_request(message: weights_pb2.FetchManifestRequest) -> None:
    """Raises INVALID_REQUEST unless an artifact is named."""
    violations = _Violations()
    violations.digest(message.artifact_id, "artifact_id")
    violations.done("the manifest request")


def validate_fetch_request(message: weights_pb2.FetchRequest) -> None:
    """Raises INVALID_REQUEST unless an artifact is named and no range is empty."""
    violations = _Violations()
    violations.digest(message.artifact_id, "artifact_id")
    for index, byte_range in enumerate(message.ranges):
        violations.check(byte_range.length > 0, f"ranges[{index}].length", "must be at least 1")
    violations.done("the fetch request")


def validate_worker_hello(message: exchange_pb2.WorkerHello) -> None:
    """Raises CONTRACT_MISMATCH for another major version, INVALID_REQUEST unless the worker and its work are named."""
    validate_contract_version(message.contract_version)
    violations = _Violations()
    violations.identifier(message.worker, "hello.worker")
    violations.check(message.worker.isprintable() and "/" not in message.worker, "hello.worker", "must hold no slash")
    violations.identifier(message.incarnation, "hello.incarnation")
    violations.check(len(message.environments) >= 1, "hello.environments", "must list at least one environment")
    names = [environment.name for environment in message.environments]
    violations.check(len(set(names)) == len(names), "hello.environments", "must have names of their own")
    for place, call in enumerate(message.calls):
        violations.identifier(call.call_id, f"hello.calls[{place}].call_id")
    violations.done("the worker's hello")
