"""An engine whose thread has died answers every request and command with an error, whenever it comes."""

import asyncio

import pytest

from inference_kit import ask, collect, make_model
from meshrl.inference.embedded.engine import EmbeddedEngine
from meshrl.wire.errors import MeshError, Reason

DEADLINE_S = 30.0


def make_engine() -> EmbeddedEngine:
    return EmbeddedEngine(make_model(), max_model_len=64, num_slots=2, seed=0)


def break_model(engine: EmbeddedEngine, *, after_steps: int) -> None:
    """From that many steps on the model raises, as one that meets shapes it cannot run."""
    step, left = engine._steps.runner.step, [after_steps]

    def failing(*args, **kwargs):
        left[0] -= 1
        if left[0] < 0:
            raise RuntimeError("shapes do not fit")
        return step(*args, **kwargs)

    engine._steps.runner.step = failing  # type: ignore[method-assign]  # stands for a model that fails


async def test_requests_running_and_waiting_hear_that_the_thread_died() -> None:
    engine = make_engine()
    break_model(engine, after_steps=3)
    engine.start()
    requests = [collect(engine, ask([3, 4, 5 + index], max_tokens=20)) for index in range(5)]
    async with asyncio.timeout(DEADLINE_S):
        failures = await asyncio.gather(*requests, return_exceptions=True)
    assert [type(failure) for failure in failures] == [MeshError] * 5
    assert {failure.reason for failure in failures} == {Reason.ENGINE_FAILED}
    assert engine.in_flight == 0
    await engine._steps.join()
    assert engine.lost == "its thread ended: RuntimeError: shapes do not fit"
    await engine.close()


async def test_requests_hear_of_it_though_the_table_is_damaged(monkeypatch: pytest.MonkeyPatch) -> None:
    """What broke the step may have left the slots half moved, so that taking rows out of them fails too."""
    engine = make_engine()

    def damaged(*args: object) -> None:
        raise IndexError("slots are half moved")

    break_model(engine, after_steps=2)
    monkeypatch.setattr(engine._steps.table, "remove", damaged)
    engine.start()
    requests = [collect(engine, ask([3, 4, 5 + index], max_tokens=20)) for index in range(4)]
    async with asyncio.timeout(DEADLINE_S):
        failures = await asyncio.gather(*requests, return_exceptions=True)
    assert [getattr(failure, "reason", failure) for failure in failures] == [Reason.ENGINE_FAILED] * 4
    await engine.close()


async def test_request_that_comes_while_the_thread_dies_hears_of_it() -> None:
    """It passes the check of the engine's health, and then nobody empties the inbox any more."""
    engine = make_engine()
    break_model(engine, after_steps=0)
    engine.start()
    async with asyncio.timeout(DEADLINE_S):
        with pytest.raises(MeshError):
            await collect(engine, ask([3, 4, 5]))
        await engine._steps.join()
        engine._steps.unfit = None  # as a request saw it that was checked just before
        with pytest.raises(MeshError) as late:
            await collect(engine, ask([3, 4, 5]))
    assert late.value.reason is Reason.ENGINE_FAILED
    assert engine.in_flight == 0
    await engine.close()
