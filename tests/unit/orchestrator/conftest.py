from collections.abc import Callable

import numpy as np
import pytest

from meshrl.core import sqlite_files
from meshrl.sampling.groups import GroupTicket, RolloutGroup, TaskRef
from meshrl.wire.types import Rollout, Sample, VersionSpan

MakeRollout = Callable[..., Rollout]
MakeGroup = Callable[..., RolloutGroup]


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
