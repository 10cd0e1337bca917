"""Calls from `VllmEngine` to vLLM's engine process and its workers, each with a deadline; failures are MeshErrors."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from typing import TYPE_CHECKING, Any, TypeVar

from meshrl.inference.vllm.jobs import JobEnds
from meshrl.wire.errors import MeshError, Reason

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

AnswerT = TypeVar("AnswerT")

LOOK_S = (0.001, 15.0)
"""Seconds between two looks at the workers' job: the first look is once one of them has ended.

vLLM's workers spin on sched_yield for a second after every call: quick looks would take a core for each worker, and
Linux 6.18 gave other programs nothing for up to 30 s beside such loops.
"""
RPC_DEADLINE_S = 60.0


class EngineCalls:
    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm
        self.ends = JobEnds()

    async def rpc(self, method: str, *args: object, deadline_s: float = RPC_DEADLINE_S) -> Any:
        """Calls every worker and returns the first failure, else the first answer; None while any has none."""
        answers = await self.answers(method, *args, deadline_s=deadline_s)
        for answer in answers:
            if answer is None or (isinstance(answer, dict) and "reason" in answer):
                return answer
        return answers[0] if answers else None

    async def answers(self, method: str, *args: object, deadline_s: float = RPC_DEADLINE_S) -> list[Any]:
        return await self.core(self._llm.collective_rpc(method, timeout=deadline_s, args=args), deadline_s)

    async def wait_for_job(self, deadline_s: float) -> None:
        """Raises what the workers' job failed with, or MeshError DEADLINE_PASSED."""
        end_s, wait_s = time.monotonic() + deadline_s, LOOK_S[1]
        while (outcome := await self.rpc("meshrl_outcome")) is None:
            if time.monotonic() > end_s:
                raise MeshError(Reason.DEADLINE_PASSED, f"vLLM's workers did not finish within {deadline_s:g} s")
            # Workers of other hosts end about when the first one here does.
            wait_s = LOOK_S[0] if await self.ends.next(wait_s) else min(2 * wait_s, LOOK_S[1])
        if "reason" in outcome:
            raise MeshError(Reason[outcome["reason"]], outcome["message"])

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
