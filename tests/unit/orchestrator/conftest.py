from collections.abc import Awaitable, Callable

import numpy as np
import pytest

from meshrl.core import sqlite_files
from meshrl.orchestrator.ledger.journal import Journal
from meshrl.orchestrator.work.batches import assemble
from meshrl.sampling.groups import GroupTicket, RolloutGroup, TaskRef
from meshrl.wire.types import Rollout, Sample, VersionSpan
from rl_streams import rl_streams

MakeRollout = Callable[..., Rollout]
MakeGroup = Callable[..., RolloutGroup]
FinishGroup = Callable[[Journal, str, int], RolloutGroup]
BatchGroup = Callable[[Journal, RolloutGroup, int], Awaitable[None]]


@pytest.fixture(params=["disk", "nfs"])
def ledger_disk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What the ledger takes its file system for."""
    if request.param == "nfs":
        monkeypatch.setattr(sqlite_files, "file_system", lambda folder: 0x6969)
    return request.param


@pytest.fixture
def make_rollout() -> MakeRollout:
    """A rollout of `prompt` given tokens and `sampled` tokens, all sampled by `version`."""

    def make(
        rollout_id: str = "r0",
        *,
        reward: float = 0.0,
        version: int = 0,
        prompt: int = 2,
        sampled: int = 3,
        group_id: str = "g0",
        environment: str = "echo",
        agent: str = "",
        truncated: bool = False,
    ) -> Rollout:
        length = prompt + sampled
        mask = np.arange(length) >= prompt
        sample = Sample(
            token_ids=np.arange(length, dtype=np.int32),
            loss_mask=mask,
            logprobs=np.where(mask, -0.5, 0.0).astype(np.float32),
            version_spans=(VersionSpan(start=prompt, end=length, version=version),) if sampled else (),
        )
        return Rollout(
            rollout_id=rollout_id,
            group_id=group_id,
            task_key="t0",
            environment=environment,
            agent=agent,
            samples=(sample,),
            reward=reward,
            truncated=truncated,
        )

    return make


@pytest.fixture
def make_group() -> MakeGroup:
    def make(
        group_id: str = "g0", rollouts: tuple[Rollout, ...] = (), *, size: int = 4, environment: str = "echo"
    ) -> RolloutGroup:
        ticket = GroupTicket(
            group_id=group_id,
            task=TaskRef(environment=environment, index=3),
            size=size,
            for_step=1,
            min_version=0,
            active_version=0,
            seed=0,
        )
        return RolloutGroup(ticket=ticket, rollouts=list(rollouts))

    return make


@pytest.fixture
def finish_group(make_group: MakeGroup, make_rollout: MakeRollout) -> FinishGroup:
    """Dispatches a group of 3 rollouts, of which so many come back with rewards 0, 1, 2."""

    def finish(journal: Journal, name: str, count: int) -> RolloutGroup:
        rollouts = tuple(make_rollout(f"{name}{place}", reward=float(place), group_id=name) for place in range(count))
        group = make_group(name, rollouts, size=3)
        journal.dispatch(group.ticket)
        for rollout in rollouts:
            journal.record_event(group.ticket, rollout)
        journal.close_group(group, cancelled_for="stale")
        return group

    return finish


@pytest.fixture
def batch_group() -> BatchGroup:
    """Makes the batch of a step of one group."""

    async def batch(journal: Journal, group: RolloutGroup, step: int) -> None:
        assembled = assemble(
            [group.rollouts],
            run_id="main",
            step=step,
            streams=rl_streams([group.rollouts], lambda rewards, lengths: np.asarray(rewards)),
            environments={"echo": 64},
            seq_len=64,
            dp_size=1,
            traceparent="00-1-2-01",
        )
        group.kept = tuple(group.rollouts)
        await journal.batch([group], assembled, drawn={"echo": step})

    return batch
