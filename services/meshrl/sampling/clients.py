"""What the rollout pool asks of a service, whichever side has dialled the other."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Protocol

from meshrl.wire.types import EnvironmentInfo, RolloutEvent, RolloutRequest, RolloutStatus


class RolloutServiceClient(Protocol):
    """A `RolloutClient`, or a worker that has dialled in. Methods raise MeshError as those of `RolloutClient` do."""

    address: str

    async def wait_until_serving(
        self, deadline_s: float, on_wait: Callable[[str], None] = lambda why: None
    ) -> None: ...

    async def why_not_serving(self, deadline_s: float) -> str: ...

    async def list_environments(self, deadline_s: float | None = None) -> tuple[EnvironmentInfo, ...]: ...

    async def get_status(self, deadline_s: float | None = None) -> RolloutStatus: ...

    def run_rollouts(self, request: RolloutRequest) -> AsyncGenerator[RolloutEvent, None]: ...

    async def cancel_rollouts(self, group_ids: Sequence[str] = ()) -> int: ...

    async def close(self) -> None: ...
