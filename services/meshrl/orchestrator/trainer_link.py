"""The orchestrator's line to the trainer: uploads batches, follows steps until each is done or failed."""

from __future__ import annotations

import asyncio
from collections import defaultdict

from loguru import logger

from meshrl.client import TrainerClient
from meshrl.orchestrator.retry import RunError, failed
from meshrl.wire.errors import MeshError
from meshrl.wire.types import StepEvent, StepState


class StepWatch:
    """Follows the events of one run. `follow` runs beside the loop; `done` waits for one step."""

    def __init__(self, client: TrainerClient, *, address: str, run_id: str, after_revision: int) -> None:
        self._client = client
        self._address = address
        self._run_id = run_id
        self._after_revision = after_revision
        self._done: defaultdict[int, asyncio.Future[StepEvent]] = defaultdict(
            lambda: asyncio.get_running_loop().create_future()
        )

    async def follow(self) -> None:
        """Until cancelled. Raises RunError when a step fails, the trainer drains or does not answer any more."""
        try:
            async for event in self._client.watch_steps(self._run_id, self._after_revision):
                logger.debug(f"trainer: step {event.step} {event.state.value}")
                if event.state is StepState.FAILED:
                    raise RunError(
                        f"trainer at {self._address} failed step {event.step}: {event.reason}: {event.message};"
                        f" the weights are those of step {event.step - 1}"
                    )
                if event.state is StepState.DONE and not self._done[event.step].done():
                    self._done[event.step].set_result(event)
        except MeshError as error:  # the client reconnected for as long as it may
            raise failed("trainer", self._address, "reporting its steps", error) from error
        raise RunError(f"trainer at {self._address} ended its stream of steps: it is draining")

    async def done(self, step: int, deadline_s: float) -> StepEvent:
        """The event that ended `step`. Raises RunError after `deadline_s`."""
        try:
            async with asyncio.timeout(deadline_s):
                return await asyncio.shield(self._done[step])
        except TimeoutError:
            raise RunError(
                f"trainer at {self._address} did not finish step {step} within {deadline_s:g} s;"
                " raise orchestrator.deadlines.step_s if it needs longer"
            ) from None
        finally:
            if self._done[step].done():
                del self._done[step]
