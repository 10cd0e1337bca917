"""Bad input at the trainer's door: each has its reason, and afterwards weights, optimizer and step are as they were."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from blake3 import blake3
from torch import nn

from meshrl.models.state import hf_state
from meshrl.v1 import trainer_pb2 as pb
from meshrl.wire import tensors
from meshrl.wire.convert import batch_to_messages
from meshrl.wire.errors import Reason
from meshrl.wire.types import Batch, MicroBatch, StepState
from served_trainer import VOCAB, Mesh, batch
from trained import Trained

NAN, INF = float("nan"), float("inf")


def fingerprint(trained: Trained) -> str:
    """Digest of the weights, the optimizer's state and the step."""
    digest = blake3(str(trained.run.step_done).encode())
    for name, tensor in hf_state(trained.model).items():
        digest.update(name.encode() + tensor.numpy().tobytes())
    for state in (state for part in trained.run.optimizer.parts for state in part.state_dict()["state"].values()):
        for name, value in sorted(state.items()):
            digest.update(name.encode() + np.asarray(value).tobytes())
    return digest.hexdigest()


def changed(row: MicroBatch, **changes: object) -> Batch:
    """The batch of step 1 with another row, signed anew: only the content is wrong."""
    return replace(batch(1), micro_batches=(replace(row, **changes),))  # type: ignore[arg-type] # names of fields


def with_value(row: MicroBatch, name: str, value: float) -> Batch:
    array = getattr(row, name).copy()
    array[-1] = value
    return changed(row, **{name: array})


def wrong(row: MicroBatch, name: str, array: object) -> Batch:
    return changed(row, **{name: array})


ONES = np.ones(10, np.float32)
CASES: dict[str, tuple[Callable[[MicroBatch], Batch], str]] = {
    "nan-logprobs": (lambda row: with_value(row, "inference_logprobs", NAN), "inference_logprobs"),
    "infinite-logprobs": (lambda row: with_value(row, "inference_logprobs", -INF), "inference_logprobs"),
    "positive-logprobs": (lambda row: with_value(row, "inference_logprobs", 1.0), "inference_logprobs"),
    "nan-advantages": (lambda row: with_value(row, "advantages", NAN), "advantages"),
    "infinite-advantages": (lambda row: with_value(row, "advantages", INF), "advantages"),
    "nan-rl-weights": (lambda row: wrong(row, "rl_weights", ONES * NAN), "rl_weights"),
    "nan-ce-weights": (lambda row: wrong(row, "ce_weights", ONES * NAN), "ce_weights"),
    "kl-weights-alone": (lambda row: wrong(row, "ref_kl_weights", ONES), "ref_logprobs"),
    "negative-token": (lambda row: with_value(row, "token_ids", -1), "token_ids"),
    "token-beyond-the-vocabulary": (lambda row: with_value(row, "token_ids", VOCAB), "token_ids"),
    "zero-temperature": (lambda row: with_value(row, "temperatures", 0.0), "temperatures"),
    "nan-temperature": (lambda row: with_value(row, "temperatures", NAN), "temperatures"),
    "positions-that-do-not-restart": (
        lambda row: wrong(row, "position_ids", np.arange(10, dtype=np.int32)),
        "position_ids",
    ),
    "offsets-out-of-order": (
        lambda row: wrong(row, "sample_offsets", np.array([0, 7, 5], np.int64)),
        "sample_offsets",
    ),
    "offsets-beyond-the-row": (
        lambda row: wrong(row, "sample_offsets", np.array([0, 5, 1 << 40], np.int64)),
        "sample_offsets",
    ),
    "an-environment-that-is-not-there": (
        lambda row: wrong(row, "env_index", np.array([0, 7], np.int32)),
        "env_index",
    ),
    "a-first-token-to-learn": (
        lambda row: wrong(row, "loss_mask", np.isin(np.arange(10), [2, 3, 4, 5, 8, 9])),
        "loss_mask",
    ),
    "a-rank-that-is-not-there": (lambda row: changed(row, dp_rank=3), "dp_rank"),
}


async def test_a_bad_row_is_refused_by_the_name_of_its_field_and_the_next_step_works(mesh: Mesh) -> None:
    await mesh.client.submit_batch(batch(1))
    await mesh.until(StepState.DONE, 1)
    before, revision = fingerprint(mesh.trained), (await mesh.client.list_runs())[0].revision
    (row,) = batch(1).micro_batches
    for case, (make, field) in CASES.items():
        error = await mesh.refused(replace(make(row), step=2))
        assert error.reason is Reason.INVALID_REQUEST, case
        assert f"micro_batches[0].{field}" in {violation.field for violation in error.violations}, case
    error = await mesh.refused(batch(2, length=40))
    assert error.reason is Reason.INVALID_REQUEST
    told = [(violation.field, violation.description) for violation in error.violations]
    assert told == [("micro_batches[0].token_ids", "takes at most 32, got 40")]
    assert fingerprint(mesh.trained) == before
    assert (await mesh.client.list_runs())[0].revision == revision
    await mesh.client.submit_batch(batch(2))
    assert (await mesh.until(StepState.DONE, 2)).version == 2
    assert fingerprint(mesh.trained) != before


async def test_a_batch_that_does_not_divide_over_the_ranks_is_refused(two_ranks: Mesh) -> None:
    (row,) = batch(1).micro_batches
    error = await two_ranks.refused(batch(1))
    assert "header.num_micro_batches" in {violation.field for violation in error.violations}
    error = await two_ranks.refused(replace(batch(1), micro_batches=(row, row), loss_tokens=2 * batch(1).loss_tokens))
    assert [violation.field for violation in error.violations] == ["dp_rank"]
    assert (await two_ranks.client.list_runs())[0].revision == 0


async def test_a_batch_at_the_wrong_place_or_a_repeated_one_changes_nothing(mesh: Mesh) -> None:
    first = await mesh.client.submit_batch(batch(1))
    await mesh.until(StepState.DONE, 1)
    before = fingerprint(mesh.trained)
    for step, run_id, reason in (
        (1, "", Reason.BATCH_CONFLICT),
        (5, "", Reason.STEP_OUT_OF_ORDER),
        (2, "other", Reason.UNKNOWN_RUN),
    ):
        assert (await mesh.refused(batch(step, run_id=run_id, token=7))).reason is reason
    assert await mesh.client.submit_batch(batch(1)) == first
    assert (await mesh.client.list_runs())[0].step == 1
    assert fingerprint(mesh.trained) == before


def _other_digest(messages: list[pb.SubmitBatchRequest]) -> None:
    messages[0].header.digest = "0" * 64


def _other_token(messages: list[pb.SubmitBatchRequest]) -> None:
    messages[1].micro_batch.token_ids.CopyFrom(tensors.encode(np.full(10, 3, np.int32)))


def _fewer_loss_tokens(messages: list[pb.SubmitBatchRequest]) -> None:
    messages[0].header.loss_tokens = 1


def _half_a_tensor(messages: list[pb.SubmitBatchRequest]) -> None:
    messages[1].micro_batch.advantages.data = messages[1].micro_batch.advantages.data[:-3]


def _no_row(messages: list[pb.SubmitBatchRequest]) -> None:
    del messages[1]


def _no_header(messages: list[pb.SubmitBatchRequest]) -> None:
    del messages[0]


async def test_an_upload_that_broke_on_its_way_leaves_nothing_and_may_be_sent_again(mesh: Mesh) -> None:
    before = fingerprint(mesh.trained)
    for spoil, reason in (
        (_other_digest, Reason.BATCH_DIGEST_MISMATCH),
        (_other_token, Reason.BATCH_DIGEST_MISMATCH),
        (_fewer_loss_tokens, Reason.INVALID_REQUEST),
        (_half_a_tensor, Reason.INVALID_REQUEST),
        (_no_row, Reason.INVALID_REQUEST),
        (_no_header, Reason.INVALID_REQUEST),
    ):
        messages = [*batch_to_messages(batch(1))]
        spoil(messages)
        assert (await mesh.upload(messages)).reason is reason, spoil.__name__
    assert fingerprint(mesh.trained) == before
    assert (await mesh.client.list_runs())[0].revision == 0
    await mesh.client.submit_batch(batch(1))
    await mesh.until(StepState.DONE, 1)


async def failure(mesh: Mesh, bad: Batch) -> str:
    """Has a step fail between two good ones; returns its message."""
    await mesh.client.submit_batch(batch(1))
    await mesh.until(StepState.DONE, 1)
    before = fingerprint(mesh.trained)
    await mesh.client.submit_batch(replace(bad, step=2))
    event = await mesh.until(StepState.FAILED, 2)
    assert event.reason == "STEP_FAILED"
    assert fingerprint(mesh.trained) == before
    assert mesh.thread.is_alive()
    return event.message


async def test_finite_numbers_whose_gradient_is_not_finite_fail_the_step_alone(mesh: Mesh) -> None:
    assert "is not finite" in await failure(mesh, batch(2, advantage=3e38))
    await mesh.client.submit_batch(batch(2))
    assert (await mesh.until(StepState.DONE, 2)).version == 2


async def test_a_batch_that_takes_more_memory_than_there_is_fails_alone_and_says_what_to_lower(mesh: Mesh) -> None:
    norm = mesh.trained.model.get_submodule("model.norm")
    hook = norm.register_forward_hook(_too_large_for_a_row_of(14))
    message = await failure(mesh, batch(2, length=14))
    hook.remove()
    assert "out of memory on rows of up to 14 tokens; lower seq_len" in message
    await mesh.client.submit_batch(batch(2))
    assert (await mesh.until(StepState.DONE, 2)).version == 2


def _too_large_for_a_row_of(tokens: int) -> Callable[[nn.Module, object, torch.Tensor], None]:
    def allocate(module: nn.Module, inputs: object, output: torch.Tensor) -> None:
        if output.shape[-2] == tokens:
            torch.empty(1 << 60)  # what the allocator says is real

    return allocate
