"""Services that run already are used, not started."""

import pytest

from run_config import COMPONENTS, load, parts_of, refusal

RUNNING = {"rollout": "10.0.0.1:7001", "trainer": "10.0.0.2:7002", "weights": "10.0.0.3:7003"}


@pytest.mark.parametrize("names", [("rollout", "weights"), ("trainer", "weights"), ("weights",), tuple(RUNNING)])
def test_services_that_run_already_are_used_and_not_started(names: tuple[str, ...]) -> None:
    flags = [word for name in names for word in (f"--orchestrator.services.{name}", RUNNING[name])]
    parts = parts_of(load("--inference", *flags))
    assert set(parts) == set(COMPONENTS) - set(names)
    services = parts["orchestrator"].config.services
    for name in RUNNING:
        here = f"127.0.0.1:{parts[name].config.server.port}" if name in parts else ""
        address = RUNNING[name] if name in names else here
        assert getattr(services, name) == ([address] if name == "rollout" else address), name
    assert parts["inference"].config.weight_broadcast.address == RUNNING["weights"]
    if "rollout" in parts:
        assert parts["rollout"].config.weights == RUNNING["weights"]
    if "trainer" in parts:
        assert parts["trainer"].config.weight_broadcast.address == RUNNING["weights"]


def test_a_run_whose_workers_dial_in_starts_no_rollout_program() -> None:
    parts = parts_of(load("--inference", "--orchestrator.services.rollout", "", "--orchestrator.exchange.port", "7004"))
    assert set(parts) == set(COMPONENTS) - {"rollout"}
    assert parts["orchestrator"].config.services.rollout == []
    assert parts["orchestrator"].config.exchange.address == "127.0.0.1:7004"
    beside = parts_of(load("--inference", "--orchestrator.exchange.port", "7004"))
    assert set(beside) == set(COMPONENTS)
    assert len(beside["orchestrator"].config.services.rollout) == 1


def test_keys_of_a_trainer_that_is_not_started_are_not_held_against_the_others() -> None:
    flags = ("--orchestrator.services.trainer", "h:1", "--orchestrator.services.weights", "h:2")
    own = ("--orchestrator.run-id", "theirs", "--orchestrator.seq-len", "9999", "--inference.model.name", "m")
    engine = ("--inference.max-model-len", "9999")
    parts = parts_of(load(*engine, *flags, *own, "--restarts", "1", "--ckpt.interval", "5"))
    assert parts["orchestrator"].config.run_id == "theirs"
    assert parts["orchestrator"].config.checkpoint_interval is None
    assert not parts["orchestrator"].config.checkpoint_at_end


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--orchestrator.services.trainer", "h:1"), "'h:1', a trainer that publishes to the hub that it was started"),
        (("--orchestrator.services.rollout", "h:1"), "'h:1', which cannot know the ports that rl chooses"),
        (
            ("--orchestrator.services.rollout", ""),
            "orchestrator.services.rollout must name at least one rollout service, got none; name one, or let workers",
        ),
    ],
)
def test_service_that_could_not_find_what_rl_starts_is_refused(
    capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], words: str
) -> None:
    assert words in refusal(capsys, "--inference", *flags)


def test_service_that_knows_the_port_of_what_rl_starts_is_taken() -> None:
    trainer = parts_of(load("--inference", "--orchestrator.services.trainer", "h:1", "--weights.server.port", "7003"))
    assert trainer["orchestrator"].config.services.weights == "127.0.0.1:7003"
    rollout = ("--orchestrator.services.rollout", "h:1")
    assert "rollout" not in parts_of(load("--inference", *rollout, "--inference.server.port", "7000"))
    assert "rollout" not in parts_of(load(*rollout))


COPY = ("--orchestrator.train.env.1.id", "mesh_old_words", "--orchestrator.train.env.1.name", "copy")
ELSEWHERE = ("--orchestrator.services.weights", "h:2", *COPY, "--no-orchestrator.train.env.1.local")


def test_local_in_the_list_starts_a_rollout_program_beside_the_listed_one_with_the_environments_that_are_local() -> (
    None
):
    config = load("--inference", *ELSEWHERE, "--orchestrator.services.rollout", "h:1,local")
    parts = parts_of(config)
    own = parts["rollout"].config
    assert parts["orchestrator"].config.services.rollout == ["h:1", f"127.0.0.1:{own.server.port}"]
    assert [entry.resolved_name for entry in own.env] == ["reverse-text"]
    assert [entry.resolved_name for entry in parts["orchestrator"].config.train.env] == ["reverse-text", "copy"]
    assert set(parts_of(load("--inference", "--orchestrator.services.rollout", "local"))) == set(COMPONENTS)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (ELSEWHERE, "copy has local = false, but orchestrator.services.rollout lists no service that could host it"),
        (
            (*ELSEWHERE, "--orchestrator.services.rollout", "local,h:1", "--no-orchestrator.train.env.0.local"),
            "every training environment has local = false",
        ),
    ],
)
def test_environments_that_nobody_hosts_and_a_program_with_nothing_to_host_are_refused(
    capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], words: str
) -> None:
    assert words in refusal(capsys, "--inference", *flags)
