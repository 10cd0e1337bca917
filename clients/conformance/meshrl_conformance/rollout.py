"""Checks of a RolloutService: its environments and refusals, and with --full groups."""

from __future__ import annotations

import time
import uuid
from typing import Any

from meshrl.v1 import rollout_pb2 as pb
from meshrl.wire.convert import from_proto
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.trainable import rollout_problems
from meshrl.wire.types import Rollout, capabilities
from meshrl_conformance.every_service import FAR_VERSION, since_1_1
from meshrl_conformance.probe import NotCheckedError, Probe, RefusedError, RuleBrokenError, broken_by, checks, must

GROUP_SIZE = 2
SHORTEST_S = 1e-6
"""Passes before any service has found the task."""
ENDS_WITHIN_S = 10.0
"""By the contract, of a group's stream beyond its deadline_s."""
NO_ENVIRONMENT = "conformance: no such environment"


async def _environments(probe: Probe) -> Any:
    (answer,) = await probe.call("ListEnvironments", pb.ListEnvironmentsRequest())
    if not answer.environments:
        raise NotCheckedError("the server hosts no environment")
    return answer.environments


def small_group(*, environment: str, deadline_s: float, **fields: Any) -> pb.RunRolloutsRequest:
    """A new group; `fields` are set over the defaults."""
    asked: dict[str, Any] = {
        "request_id": str(uuid.uuid4()),
        "group_id": f"conformance-{uuid.uuid4()}",
        "environment": environment,
        "task_index": 0,
        "group_size": GROUP_SIZE,
        "deadline_s": deadline_s,
        "sampling": pb.Sampling(temperature=1.0, max_tokens=8),
    }
    return pb.RunRolloutsRequest(**asked | fields)


async def _request(probe: Probe, **fields: Any) -> pb.RunRolloutsRequest:
    """Of the first environment."""
    hosted = await _environments(probe)
    return small_group(**{"environment": hosted[0].name, "deadline_s": probe.deadline_s, **fields})


@checks("rollout.environments")
async def _hosted(probe: Probe) -> None:
    names = [environment.name for environment in await _environments(probe)]
    must(all(names), "an environment has no name")
    must(len(set(names)) == len(names), f"two environments have one name: {', '.join(sorted(names))}")


@checks("rollout.unknown-environment")
async def _unknown_environment(probe: Probe) -> None:
    request = await _request(probe, environment=NO_ENVIRONMENT, min_version=FAR_VERSION)
    await probe.refused("RunRollouts", request, reason=Reason.UNKNOWN_ENVIRONMENT)


@checks("rollout.unknown-task")
async def _unknown_task(probe: Probe) -> None:
    for environment in await _environments(probe):
        if environment.HasField("num_tasks"):
            request = await _request(
                probe, environment=environment.name, task_index=environment.num_tasks, min_version=FAR_VERSION
            )
            await probe.refused("RunRollouts", request, reason=Reason.UNKNOWN_TASK)
            return
    raise NotCheckedError("every taskset is infinite")


@checks("rollout.sampling")
async def _sampling(probe: Probe) -> None:
    bad = pb.Sampling(top_p=2.0, temperature=-1.0)
    request = await _request(probe, sampling=bad, min_version=FAR_VERSION)
    await probe.invalid("RunRollouts", request, fields=["sampling.top_p", "sampling.temperature"])


@checks("rollout.version")
async def _version(probe: Probe) -> None:
    request = await _request(probe, min_version=FAR_VERSION)
    refusal = await probe.refused("RunRollouts", request, reason=Reason.VERSION_NOT_AVAILABLE)
    must(refusal.status is None or refusal.tells_when, f"{refusal}; it has no RetryInfo")


@checks("rollout.cancel")
async def _cancel(probe: Probe) -> None:
    request = pb.CancelRolloutsRequest(request_id=str(uuid.uuid4()), group_ids=["conformance: no such group"])
    for _ in range(2):
        try:
            (answer,) = await probe.call("CancelRollouts", request)
        except RefusedError as refusal:
            raise RuleBrokenError(str(refusal)) from refusal
        must(answer.cancelled == 0, f"CancelRollouts of no group cancelled {answer.cancelled} rollouts")


async def _played(probe: Probe) -> tuple[pb.RunRolloutsRequest, list[Any]]:
    """Played once for all checks. Raises NotCheckedError without an engine."""
    if "played" not in probe.memory:
        request = await _request(probe)
        try:
            probe.memory["played"] = request, await probe.call("RunRollouts", request)
        except RefusedError as refusal:
            if refusal.info is not None and refusal.info.reason == Reason.VERSION_NOT_AVAILABLE.name:
                raise NotCheckedError(f"there is no engine to play on: {refusal.text}") from refusal
            raise
    found: tuple[pb.RunRolloutsRequest, list[Any]] = probe.memory["played"]
    return found


async def _rollouts(probe: Probe) -> tuple[pb.RunRolloutsRequest, list[Any]]:
    request, events = await _played(probe)
    rollouts = [event.rollout for event in events if event.WhichOneof("event") == "rollout"]
    if not rollouts:
        failures = {event.failure.message for event in events if event.WhichOneof("event") == "failure"}
        raise NotCheckedError(f"no rollout of the group was finished: {'; '.join(sorted(failures))}")
    return request, rollouts


@checks("rollout.summary")
async def _summary(probe: Probe) -> None:
    request, events = await _played(probe)
    kinds = [event.WhichOneof("event") for event in events]
    must(kinds.count("summary") == 1 and kinds[-1] == "summary", f"the events of a group are {', '.join(kinds)}")
    summary = events[-1].summary
    told = (summary.finished, summary.failed)
    streamed = (kinds.count("rollout"), kinds.count("failure"))
    must(told == streamed, f"the summary says {told} finished and failed, streamed were {streamed}")
    total = summary.finished + summary.failed + summary.cancelled
    must(total == request.group_size, f"the summary counts {total} rollouts of a group of {request.group_size}")


@checks("rollout.identity")
async def _identity(probe: Probe) -> None:
    request, rollouts = await _rollouts(probe)
    ids = {rollout.rollout_id for rollout in rollouts}
    must(len(ids) == len(rollouts) and all(ids), "two rollouts have one rollout_id, or one has none")
    for rollout in rollouts:
        carried = (rollout.group_id, rollout.environment)
        wanted = (request.group_id, request.environment)
        must(carried == wanted, f"a rollout carries {carried}, the request has {wanted}")
        must(bool(rollout.task_key), "a rollout has no task_key")


@checks("rollout.sample")
async def _sample(probe: Probe) -> None:
    _, rollouts = await _rollouts(probe)
    for message in rollouts:
        must(len(message.samples) > 0, "a finished rollout has no sample")
        try:
            rollout = from_proto(Rollout, message)
        except MeshError as error:
            broken_by(error)
        for path, problem in rollout_problems(rollout, vocab_size=None):
            raise RuleBrokenError(f"{path} {problem}")


@checks("rollout.presence")
async def _presence(probe: Probe) -> None:
    await since_1_1(probe)
    _, rollouts = await _rollouts(probe)
    for rollout in rollouts:
        must(rollout.HasField("reward"), "a rollout has no reward")
        must(all(sample.HasField("temperature") for sample in rollout.samples), "a sample has no temperature")


@checks("rollout.duplicate")
async def _duplicate(probe: Probe) -> None:
    request, _ = await _played(probe)
    await probe.refused("RunRollouts", request, reason=Reason.DUPLICATE_REQUEST)


@checks("rollout.reattach")
async def _reattach(probe: Probe) -> None:
    (answer,) = await probe.call("ListEnvironments", pb.ListEnvironmentsRequest())
    if capabilities.REATTACH not in answer.capabilities:
        raise NotCheckedError(f"the server does not list the capability {capabilities.REATTACH}")
    await _rollouts(probe)  # there is an engine
    request = await _request(probe, linger_s=probe.deadline_s)
    (first,) = await probe.call("RunRollouts", request, until=lambda answers: True)
    must(first.seq == 1, f"the first event of a group has the number {first.seq}")

    async def attached(after_seq: int) -> list[Any]:
        again = pb.RunRolloutsRequest()
        again.CopyFrom(request)
        again.after_seq = after_seq
        return await probe.call("RunRollouts", again)

    events = await attached(0)
    must(events[:1] == [first], "the first event of a group is another one when it is sent again")
    numbers = [event.seq for event in events]
    must(numbers == list(range(1, len(events) + 1)), f"the events of a group have the numbers {numbers}")
    ended = events[-1]
    must(ended.HasField("summary"), "a group that is attached to again does not end with its summary")
    must(ended.summary.cancelled == 0, f"{ended.summary.cancelled} rollouts were cancelled with the stream")
    must(await attached(1) == events[1:], "attached behind event 1, other events came than those behind it")


@checks("rollout.deadline")
async def _deadline(probe: Probe) -> None:
    await _rollouts(probe)  # there is an engine
    request = await _request(probe, deadline_s=SHORTEST_S, sampling=pb.Sampling(temperature=1.0))
    began_s = time.monotonic()
    try:
        events = await probe.call("RunRollouts", request)
    except RefusedError as refusal:
        raise RuleBrokenError(f"a group whose deadline passed is refused: {refusal}") from refusal
    took_s = time.monotonic() - began_s
    must(
        took_s <= request.deadline_s + ENDS_WITHIN_S,
        f"the stream of a group took {took_s:.1f} s, its deadline_s is {SHORTEST_S}",
    )
    kinds = [event.WhichOneof("event") for event in events]
    must(kinds[-1:] == ["summary"], f"a group whose deadline passed ends with {', '.join(kinds) or 'nothing'}")
    reasons = {event.failure.reason for event in events if event.WhichOneof("event") == "failure"}
    must(reasons <= {Reason.DEADLINE_PASSED.name}, f"rollouts that were late failed with {', '.join(sorted(reasons))}")
    must(events[-1].summary.cancelled == 0, "rollouts that were late count as cancelled, not as failed")
    streamed = len(kinds) - 1
    must(streamed == request.group_size, f"{streamed} rollouts and failures of a group of {request.group_size} came")
