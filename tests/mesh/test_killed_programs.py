"""A run ends loudly when one of its programs dies; the others are killed in `test_run`, `test_ranks` and
`test_live_run`."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from mesh_run import Run, check_kill

pytestmark = [pytest.mark.mesh, pytest.mark.timeout(420)]


@pytest.mark.parametrize("victim", ["weights", "inference"])
def test_a_killed_program_ends_the_run_and_is_named(start_run: Callable[..., Run], victim: str) -> None:
    run = start_run("--max-steps", "500")
    run.wait_for(lambda: len(run.steps()) >= 1)
    check_kill(run, victim)
