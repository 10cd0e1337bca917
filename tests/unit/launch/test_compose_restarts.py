"""How often each program of a run is started again, and how long the others wait for it."""

import pytest

from run_config import COMPONENTS, load, parts_of, refusal


def test_restarts_are_everybodys_and_the_orchestrator_waits_for_them() -> None:
    parts = parts_of(load("--restarts", "3", "--ckpt.interval", "2", "--inference.max-model-len", "4096"))
    assert {name: part.restarts for name, part in parts.items()} == dict.fromkeys(COMPONENTS, 3)
    assert (
        parts["orchestrator"].config.deadlines.unreachable_s == 180.0 + 240.0
    )  # a restarted trainer may look that long for engines
    assert parts_of(load())["orchestrator"].config.deadlines.unreachable_s == 8.0
    own = load("--restarts", "3", "--ckpt.interval", "2", "--orchestrator.deadlines.unreachable-s", "9")
    assert parts_of(own)["orchestrator"].config.deadlines.unreachable_s == 9.0


def test_a_program_may_restart_more_or_less_often_than_the_others() -> None:
    argv = ["--inference.max-model-len", "4096", "--engine-restarts", "7", "--orchestrator-restarts", "5"]
    alone = parts_of(load(*argv))
    assert {name: part.restarts for name, part in alone.items()} == dict.fromkeys(COMPONENTS, 0) | {
        "inference": 7,
        "orchestrator": 5,
    }
    assert alone["orchestrator"].config.deadlines.unreachable_s == 8.0
    trainer = parts_of(load("--ckpt.interval", "2", "--trainer-restarts", "1"))
    assert (trainer["trainer"].restarts, trainer["rollout"].restarts) == (1, 0)
    assert trainer["orchestrator"].config.deadlines.unreachable_s == 420.0
    spared = parts_of(load("--restarts", "3", "--trainer-restarts", "0"))
    assert (spared["trainer"].restarts, spared["orchestrator"].restarts) == (0, 3)


@pytest.mark.parametrize("key", ["restarts", "trainer-restarts"])
@pytest.mark.parametrize("ckpt", [(), ("--ckpt",), ("--ckpt.interval", "2", "--ckpt.weights-only")])
def test_restarts_need_checkpoints_to_go_on_from(
    key: str, ckpt: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    message = refusal(capsys, f"--{key}", "1", *ckpt)
    assert f"{key.replace('-', '_')} is 1" in message
    assert "ckpt" in message


def test_the_orchestrator_waits_longer_than_a_trainer_may_look_for_its_hub() -> None:
    deadlines = parts_of(load("--trainer.hub-deadline-s", "600"))["orchestrator"].config.deadlines
    assert deadlines.startup_s == 660.0
    assert parts_of(load())["orchestrator"].config.deadlines.startup_s == 300.0
    own = load("--trainer.hub-deadline-s", "600", "--orchestrator.deadlines.startup-s", "50")
    assert parts_of(own)["orchestrator"].config.deadlines.startup_s == 50.0
    patient = load("--restarts", "1", "--ckpt.interval", "1", "--trainer.hub-deadline-s", "600")
    assert parts_of(patient)["orchestrator"].config.deadlines.unreachable_s == 780.0
