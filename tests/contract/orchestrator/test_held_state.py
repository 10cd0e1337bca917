"""What an orchestrator holds in memory does not depend on how many steps it has done."""

from collections.abc import Sized


def sizes(*owners: object) -> dict[str, int]:
    """Number of things in each collection that the objects hold."""
    return {
        f"{type(owner).__name__}.{name}": len(value)
        for owner in owners
        for name, value in vars(owner).items()
        if isinstance(value, Sized) and not isinstance(value, str | bytes)
    }


async def test_nothing_is_kept_of_the_steps_that_are_done(mesh, make_config, start) -> None:
    async with start(make_config(mesh.services, max_steps=12)) as (loop, journal):
        await loop.train()
        held = sizes(loop, loop.run, loop.run.plan, loop.finisher.reporter, journal, journal.ledger, loop._uploader)
    assert held["StepReporter.records"] == 0
    assert {name: count for name, count in held.items() if count >= 12} == {}


async def test_a_benchmark_keeps_the_record_of_each_step(mesh, make_config, start) -> None:
    async with start(make_config(mesh.services, max_steps=3, bench=True)) as (loop, _):
        await loop.train()
        assert [record["progress/problems"] for record in loop.finisher.reporter.records] == [2, 4, 6]
