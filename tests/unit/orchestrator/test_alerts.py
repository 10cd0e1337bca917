"""Each alert is logged once when it begins, is in the record while it lasts, and is silent in a run that is well."""

from collections.abc import Mapping

import pytest

from meshrl.core.metrics.catalogue import Source
from meshrl.core.metrics.names import CATALOGUE
from meshrl.diagnosis.causes import RECENT
from meshrl.orchestrator.reports.alerts import Alerts

WELL = {
    "time/step": 4.0,
    "reward/all/mean": 0.6,
    "mismatch_kl/all/mean": 1e-3,
    "time/wait_for_batch": 0.5,
    "time/train_step": 4.0,
    "errored_rollouts/all": 0.01,
    "weights/engines": 2.0,
}


class Watched:
    """A run whose steps are looked at one by one."""

    def __init__(self, alerts: Alerts) -> None:
        self._alerts = alerts
        self._step = 0
        self.begun: list[str] = []

    def after(self, steps: int, changed: Mapping[str, float]) -> dict[str, float]:
        """What the last of so many steps gets, which are well but for what is `changed`."""
        found: dict[str, float] = {}
        for _ in range(steps):
            self._step += 1
            found, begun = self._alerts.check(self._step, {**WELL, **changed}, {"trainer": 0.01})
            self.begun += [finding.cause for finding in begun]
        return found


@pytest.mark.parametrize(
    ("changed", "name", "words"),
    [
        ({"reward/all/mean": 0.2}, "reward_collapse", "the mean reward of the last 5 steps is 0.2"),
        ({"mismatch_kl/all/mean": 0.5}, "mismatch_growth", "mismatch_kl of the last 5 steps is 0.5, and was 0.001"),
        ({"time/wait_for_batch": 3.5}, "starved_trainer", "of the last 5 steps: sampling is what takes long"),
        ({"weights/engines": 1.0}, "stale_engine", "1 of 2 engines took the version"),
        ({"errored_rollouts/all": 0.06}, "errored_rollouts", "6% of the rollouts of step 31 failed"),
    ],
)
def test_an_alert_is_logged_once_and_is_in_every_record_while_it_lasts(
    warned: list[str], changed: dict[str, float], name: str, words: str
) -> None:
    run = Watched(Alerts(synchronous=False))
    assert run.after(30, {}) == {}
    found = run.after(6, changed)
    assert found == {f"alert/{name}": 1.0}
    assert CATALOGUE.record(Source.ORCHESTRATOR, found) == found
    (line,) = warned
    assert line.startswith(f"alert {name}: ")
    assert words in line
    assert run.after(1, {}) == {f"alert/{name}": 1.0}, "one that comes and goes is one alert"
    assert run.after(2 * RECENT, {}) == {}
    run.after(6, changed)
    assert run.begun == [name, name], "it has begun anew"
    assert len(warned) == 2


def test_an_alert_that_is_ignored_is_not_looked_for(warned: list[str]) -> None:
    run = Watched(Alerts(synchronous=False, ignored=["stale_engine"]))
    run.after(5, {})
    assert run.after(5, {"weights/engines": 1.0}) == {}
    assert warned == []


def test_a_late_event_loop_is_named(warned: list[str]) -> None:
    alerts = Alerts(synchronous=False)
    lasting, _ = alerts.check(1, WELL, {"trainer": 0.2, "rollout_worker_2": 12.5})
    assert lasting == {"alert/loop_lag": 1.0}
    assert warned[0].startswith("alert loop_lag: rollout_worker_2 answers 12.5 s late")


def test_a_run_that_learns_and_a_synchronous_one_are_not_alarmed(warned: list[str]) -> None:
    alerts = Alerts(synchronous=True)
    for step in range(1, 60):
        noisy = 0.2 + 0.01 * step + (0.1 if step % 2 else -0.1)
        lasting, _ = alerts.check(step, {**WELL, "reward/all/mean": noisy, "time/wait_for_batch": 3.9}, {})
        assert lasting == {}
    assert warned == []
