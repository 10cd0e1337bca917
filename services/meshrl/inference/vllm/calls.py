"""Calls from `VllmEngine` to vLLM's engine process and its workers, each with a deadline; failures are MeshErrors."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from typing import TYPE_CHECKING, Any, TypeVar

from meshrl.inference.vllm.jobs import JobEnds, JobOutcome
from meshrl.versions.placement import PartDigests
from meshrl.wire.errors import MeshError, Reason

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

AnswerT = TypeVar("AnswerT")

LOOK_S = (0.001, 15.0)
"""Seconds between two looks at the workers' job, of which the first is once one of them has ended: a call waits for the
end of the engine's step.

vLLM's workers spin on sched_yield for a second after every call: quick looks would take a core for each worker, and
Linux 6.18 gave other programs nothing for up to 30 s beside such loops.
"""
RPC_DEADLINE_S = 60.0


class EngineCalls:
    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm
        self.ends = JobEnds()

    async def rpc(self, method: str, *args: object, deadline_s: float = RPC_DEADLINE_S) -> Any:
        """Calls every worker and returns the first failure, else the first answer."""
        answers = await self.answers(method, *args, deadline_s=deadline_s)
        failures = (answer for answer in answers if isinstance(answer, dict) and "reason" in answer)
        return next(failures, answers[0] if answers else None)

    async def answers(self, method: str, *args: object, deadline_s: float = RPC_DEADLINE_S) -> list[Any]:
        return await self.core(self._llm.collective_rpc(method, timeout=deadline_s, args=args), deadline_s)

    async def job(self, method: str, *args: object, deadline_s: float) -> list[PartDigests]:
        """Has every worker do a job; returns each one's digests of the parts that it has made.

        Raises what the job failed with, or MeshError DEADLINE_PASSED.
        """
        self.ends.drain()
        await self.rpc(method, *args)
        end_s, wait_s = time.monotonic() + deadline_s, LOOK_S[1]
        while True:
            # Workers of other hosts end about when the first one here does.
            ended = await self.ends.next(min(wait_s, max(0.0, end_s - time.monotonic())))
            wait_s = LOOK_S[0] if ended else min(2 * wait_s, LOOK_S[1])
            outcomes: list[JobOutcome | None] = await self.answers("meshrl_outcome")
            found = [outcome for outcome in outcomes if outcome is not None]
            for outcome in found:
                if "reason" in outcome:
                    raise MeshError(Reason[outcome["reason"]], outcome["message"])
            if len(found) == len(outcomes):
                return [outcome.get("parts", {}) for outcome in found]
            if time.monotonic() > end_s:
                raise MeshError(Reason.DEADLINE_PASSED, f"vLLM's workers did not finish within {deadline_s:g} s")

    async def core(self, call: Awaitable[AnswerT], deadline_s: float = RPC_DEADLINE_S) -> AnswerT:
        """Raises MeshError ENGINE_FAILED for whatever goes wrong in the engine process."""
        try:
            return await asyncio.wait_for(call, deadline_s)
        except TimeoutError as error:
            text = f"vLLM's engine process did not answer within {deadline_s:g} s"
            raise MeshError(Reason.ENGINE_FAILED, text) from error
        except MeshError:
            raise
        except Exception as error:  # vLLM brings its workers' failures over as bare ones
            raise MeshError(Reason.ENGINE_FAILED, f"vLLM: {error}") from error
