"""A run ends loudly when one of its programs dies; the others are killed in `test_restarts`,
`test_ranks` and `test_live_run`."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from mesh_run import WITH_WORKERS, Run, check_kill

pytestmark = [pytest.mark.mesh, pytest.mark.timeout(420)]


@pytest.mark.parametrize(("victim", "flags"), [("rollout", WITH_WORKERS), ("weights", ())])
def test_a_killed_program_ends_the_run_and_is_named(
    start_run: Callable[..., Run], victim: str, flags: tuple[str, ...]
) -> None:
    run = start_run("--max-steps", "500", *flags)
    run.wait_for(lambda: len(run.steps()) >= 1)
    check_kill(run, victim)
