import pytest
from pydantic import ValidationError

from meshrl.orchestrator.config import OrchestratorConfig
from meshrl.sampling.retry import RunError


def refusal(**values) -> str:
    with pytest.raises(ValidationError) as raised:
        OrchestratorConfig.model_validate(values)
    return str(raised.value)


@pytest.mark.parametrize(
    ("values", "told"),
    [
        (
            {"batch_size": 100, "group_size": 16},
            "orchestrator.batch_size must be a multiple of group_size (16), got 100; use 96 or 112",
        ),
        ({"batch_size": 8, "group_size": 16}, "got 8; use 16"),
        ({"max_inflight_rollouts": 4}, "orchestrator.max_inflight_rollouts must be at least group_size (8), got 4"),
        ({"train": {"env": [{"id": "echo"}] * 2}}, "must have distinct names, got echo more than once"),
        (
            {"train": {"env": [{"id": "a", "seq_len": 4096}]}},
            "seq_len of 'a' is 4096, but a row holds orchestrator.seq_len = 2048 tokens",
        ),
        (
            {"train": {"env": [{"id": "a", "sampling": {"temperature": 0}}]}},
            "orchestrator.sampling.temperature of 'a' is 0: a greedy sample has no distribution to correct for",
        ),
        ({"train": {"env": [{"id": "a"}]}, "sampling": {"temperature": 0}}, "temperature of 'a' is 0"),
        ({"seed": -3}, "greater than or equal to 0"),
        ({"eval": {"env": [{"id": "a", "num_examples": 0}]}}, "must be 1 or more, or -1 for all tasks, got 0"),
        ({"eval": {}}, "orchestrator.eval.env must name at least one environment"),
        ({"eval": {"env": [{"id": "a"}] * 2}}, "orchestrator.eval.env must have distinct names, got a more than once"),
    ],
)
def test_what_cannot_be_run_is_refused_with_what_can(values, told: str) -> None:
    assert told in refusal(**values)


def test_the_older_spelling_of_group_size_is_accepted() -> None:
    config = OrchestratorConfig.model_validate({"batch_size": 12, "rollouts_per_example": 4})
    assert config.group_size == 4


@pytest.mark.parametrize(
    ("given", "of_tasks", "of_rollouts"),
    [
        ({}, 0, None),
        ({"seed": 0}, 0, 0),
        ({"seed": 5}, 5, 5),
        ({"sampling": {"seed": 7}}, 0, 7),
        ({"seed": 5, "sampling": {"seed": 7}}, 5, 7),
        ({"seed": 5, "train": {"env": [{"id": "echo", "sampling": {"seed": 9}}]}}, 5, 5),
        ({"train": {"env": [{"id": "echo", "sampling": {"seed": 9}}]}}, 0, 0),
    ],
)
def test_rollouts_have_seeds_where_one_was_set_and_tasks_always(given, of_tasks: int, of_rollouts: int | None) -> None:
    config = OrchestratorConfig.model_validate(given)
    assert (config.task_seed, config.sampling_seed) == (of_tasks, of_rollouts)


def test_a_bench_run_is_short_unless_told_otherwise() -> None:
    assert OrchestratorConfig(bench=True).last_step == 5
    assert OrchestratorConfig(bench=True, max_steps=9).last_step == 9
    assert OrchestratorConfig().last_step is None


def test_environments_may_have_group_sizes_of_their_own() -> None:
    train = {"env": [{"id": "a", "group_size": 4}, {"id": "b", "rollouts_per_example": 16}, {"id": "c"}]}
    config = OrchestratorConfig.model_validate({"batch_size": 32, "train": train})
    assert config.group_sizes == {"a": 4, "b": 16, "c": 8}


def test_every_group_size_that_does_not_fit_is_named() -> None:
    train = {"env": [{"id": "a", "group_size": 12}, {"id": "b", "group_size": 1}, {"id": "c"}]}
    text = refusal(batch_size=20, train=train)
    assert "batch_size must be a multiple of the group_size of environment 'a' (12), got 20; use 12 or 24" in text
    assert "group_size of 'b' must be at least 2, got 1: an advantage compares the rollouts of one task" in text
    assert "batch_size must be a multiple of group_size (8), got 20; use 16 or 24" in text


def test_algorithms_say_which_keys_are_theirs_and_who_compares() -> None:
    def algo(**values) -> dict:
        return {"algo": values, "train": {"env": [{"id": "a"}]}}

    assert "algo: decay belongs to another type than 'grpo'; leave it out" in refusal(**algo(decay=0.5))
    assert "algo.type custom needs algo.import_path" in refusal(**algo(type="custom"))
    assert "group_size of 'a' must be at least 2, got 1: an advantage compares the rollouts of one task (max_rl)" in (
        refusal(**algo(type="max_rl"), group_size=1)
    )
    train = {"env": [{"id": "a", "algo": {"type": "rae", "decay": 0.9}}, {"id": "b", "group_size": 4}]}
    config = OrchestratorConfig.model_validate({"group_size": 1, "algo": {"type": "echo"}, "train": train})
    assert [algo.type for algo in config.algos.values()] == ["rae", "echo"]
    assert config.group_sizes == {"a": 1, "b": 4}


def test_training_modes_name_an_algorithm_and_say_whether_there_is_a_teacher() -> None:
    teacher, train = {"client": {"base_url": "http://127.0.0.1:9"}, "model": {"name": "t"}}, {"env": [{"id": "a"}]}
    assert "no environment learns from a teacher (training_mode 'rl')" in refusal(teacher=teacher, train=train)
    assert "orchestrator.teacher is missing: 'a' is trained by opd, which needs an engine that gives prompt" in refusal(
        training_mode="opd", train=train
    )
    assert "training_mode is 'opd' but orchestrator.algo.type is 'grpo'; set one of them" in refusal(
        training_mode="opd", algo={"type": "grpo"}, teacher=teacher, train=train
    )
    config = OrchestratorConfig.model_validate({"training_mode": "opd", "teacher": teacher, "train": train})
    assert (config.algos["a"].type, config.teachers["a"]) == ("opd", config.teacher)
    assert config.teacher is not None
    assert config.teacher.client.base_url == ["http://127.0.0.1:9"]
    assert "'a' is trained by sft, which needs any server of /v1/chat/completions" in refusal(
        training_mode="sft", train=train
    )
    own = {"env": [{"id": "a", "algo": {"type": "opd", "teacher": teacher}}]}
    assert OrchestratorConfig.model_validate({"train": own}).teacher is None
    kept = {"env": [{"id": "a", "algo": {"type": "opsd", "teacher": teacher}}]}
    config = OrchestratorConfig.model_validate({"train": kept})
    assert config.teachers["a"] == config.train.env[0].algo.teacher
    assert "no environment learns from a teacher" in refusal(algo={"type": "opsd"}, teacher=teacher, train=train)


def test_group_size_of_the_run_is_held_against_nobody_where_each_environment_has_its_own() -> None:
    train = {"env": [{"id": "a", "group_size": 5}]}
    assert OrchestratorConfig.model_validate({"batch_size": 20, "train": train}).group_sizes == {"a": 5}


def test_eval_environments_override_what_the_section_says() -> None:
    own = {"id": "b", "interval": 5, "num_examples": 3, "rollouts_per_example": 4}
    section = {"interval": 10, "num_examples": 7, "group_size": 2, "env": [{"id": "a"}, own]}
    config = OrchestratorConfig.model_validate({"eval": section}).eval
    assert config is not None
    found = [(config.interval_of(env), config.num_examples_of(env), config.group_size_of(env)) for env in config.env]
    assert found == [(10, 7, 2), (5, 3, 4)]


def test_ratios_are_of_tasks_and_the_mixture_of_rollouts() -> None:
    train = {"env": [{"id": "a", "ratio": 3.0, "group_size": 4}, {"id": "b", "ratio": 1.0, "group_size": 12}]}
    assert OrchestratorConfig.model_validate({"batch_size": 24, "train": train}).mixture == {"a": 0.5, "b": 0.5}


def test_a_teacher_that_plays_needs_a_rollout_service_once_the_run_starts() -> None:
    values = {"training_mode": "sft", "train": {"env": [{"id": "a"}]}}
    config = OrchestratorConfig.model_validate({**values, "teacher": {"model": {"name": "t"}}})
    with pytest.raises(RunError, match=r"orchestrator\.teacher\.rollout must name the rollout service"):
        _ = config.teacher_services
    named = OrchestratorConfig.model_validate({**values, "teacher": {"rollout": "h:1"}})
    assert named.teacher_services == ["h:1"]
    assert OrchestratorConfig.model_validate({"train": values["train"]}).teacher_services == ()
