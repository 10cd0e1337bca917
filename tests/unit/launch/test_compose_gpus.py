"""What the GPUs of a run mean for its programs: one process or engine on each, and what sharing one brings."""

import pytest

from meshrl.core.config import ConfigError
from meshrl.launch.compose import compose
from run_config import load, parts_of, refusal


def test_several_engines_have_ports_gpus_and_seeds_of_their_own() -> None:
    parts = parts_of(
        load("--inference.tensor-parallel-size", "2", "--inference-gpu-ids", "0,1,2,3", "--trainer-gpu-ids", "4",
             "--seed", "7")
    )  # fmt: skip
    assert parts["inference"].environ == {"CUDA_VISIBLE_DEVICES": "0,1"}
    assert parts["inference_2"].environ == {"CUDA_VISIBLE_DEVICES": "2,3"}
    assert parts["trainer"].environ == {"CUDA_VISIBLE_DEVICES": "4"}
    assert parts["weights"].config.min_engines == 2
    assert parts["inference"].config.server.port != parts["inference_2"].config.server.port
    assert (parts["inference"].config.seed, parts["inference_2"].config.seed) == (7, 8)


def test_the_trainer_runs_a_process_on_each_of_its_gpus() -> None:
    trainer = parts_of(load("--trainer-gpu-ids", "6,7"))["trainer"]
    assert trainer.config.deployment.num_train_gpus == 2
    assert trainer.environ == {"CUDA_VISIBLE_DEVICES": "6,7"}
    assert parts_of(load("--trainer-gpu-ids", "6"))["trainer"].config.deployment.num_train_gpus == 1
    fewer = load("--trainer-gpu-ids", "6,7", "--deployment.num-train-gpus", "1")
    assert parts_of(fewer)["trainer"].config.deployment.num_train_gpus == 1


def test_more_training_processes_than_gpus_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    message = refusal(capsys, "--trainer-gpu-ids", "6", "--deployment.num-train-gpus", "2")
    assert "deployment.num_train_gpus is 2 but trainer_gpu_ids lists 1 GPU(s); list as many" in message


def test_versions_travel_by_files_where_trainer_and_engine_share_a_gpu() -> None:
    shared = ("--inference-gpu-ids", "0", "--trainer-gpu-ids", "0")
    config = load("--inference", *shared, "--trainer.weight-broadcast.bucket-mib", "8")
    parts = {part.name: part for part in compose(config, lambda _: 40001, gpus=("0",))}
    assert parts["trainer"].config.weight_broadcast.type == "filesystem"
    assert parts["inference"].config.share_gpu
    apart = load("--inference", "--inference-gpu-ids", "0", "--trainer-gpu-ids", "1")
    parts = {part.name: part for part in compose(apart, lambda _: 40001, gpus=("0", "1"))}
    assert parts["trainer"].config.weight_broadcast.type == "auto"
    with pytest.raises(ConfigError, match="share a GPU"):
        compose(load("--inference", *shared, "--weights.transport", "nccl"), lambda _: 40001, gpus=("0",))


def test_a_trainer_starts_after_the_engine_on_its_gpu_and_is_waited_for_longer() -> None:
    ids = ("--inference", "--inference-gpu-ids", "0,1", "--deployment.num-infer-gpus", "2", "--trainer-gpu-ids")
    parts = {part.name: part for part in compose(load(*ids, "1"), lambda _: 40001, gpus=("0", "1", "2"))}
    assert parts["trainer"].after == ("inference_2",)
    assert [part.name for part in parts.values() if part.after] == ["trainer"]
    assert parts["orchestrator"].config.deadlines.startup_s == 600.0
    parts = {part.name: part for part in compose(load(*ids, "2"), lambda _: 40001, gpus=("0", "1", "2"))}
    assert parts["trainer"].after == ()
    assert parts["orchestrator"].config.deadlines.startup_s == 300.0


SLEEPS = ("--inference", "--inference.sleep-while-training", "--max-async-level", "0")


@pytest.mark.parametrize(
    ("argv", "gpus"),
    [
        (("--inference-gpu-ids", "0", "--trainer-gpu-ids", "0"), ("0", "1")),
        ((), ("0",)),
        (("--inference.share-gpu",), ()),
    ],
    ids=["listed", "the only one", "said"],
)
def test_engines_that_sleep_are_asked_to_and_find_room_when_they_wake(
    argv: tuple[str, ...], gpus: tuple[str, ...]
) -> None:
    parts = {part.name: part.config for part in compose(load(*SLEEPS, *argv), lambda _: 40001, gpus=gpus)}
    assert parts["inference"].vllm_arguments()["enable_sleep_mode"] is True
    assert parts["orchestrator"].sleep_engines
    assert parts["trainer"].release_memory
    awake = {part.name: part.config for part in compose(load("--inference"), lambda _: 40001, gpus=("0",))}
    assert not awake["orchestrator"].sleep_engines
    assert not awake["trainer"].release_memory


def test_sleep_while_training_needs_a_shared_gpu() -> None:
    apart = ("--inference-gpu-ids", "0", "--trainer-gpu-ids", "1")
    for argv, gpus in ((apart, ("0", "1")), ((), ())):
        with pytest.raises(ConfigError, match="list the same GPU in inference_gpu_ids and trainer_gpu_ids"):
            compose(load(*SLEEPS, *argv), lambda _: 40001, gpus=gpus)


def test_sleep_while_training_needs_level_0_and_vllm(capsys: pytest.CaptureFixture[str]) -> None:
    message = refusal(capsys, *SLEEPS[:2], "--max-async-level", "1")
    assert "inference.sleep_while_training needs max_async_level 0, got 1" in message
    assert "set max_async_level to 0" in message
    assert "the embedded engine has no" in refusal(capsys, *SLEEPS, "--inference.engine", "embedded")
    message = refusal(capsys, "--orchestrator.sleep-engines")
    assert "orchestrator.sleep_engines needs max_async_level 0, got 2" in message
