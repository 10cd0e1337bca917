"""What the inference program's configuration says about its engine, and which engine `auto` comes to."""

from pathlib import Path

import pytest

from meshrl.core.config import dump_toml, load_config
from meshrl.inference.build import decide, open_engine
from meshrl.inference.config import ROUTER_DTYPE, InferenceConfig


def load(*argv: str) -> InferenceConfig:
    return load_config(InferenceConfig, list(argv), prog="inference", environ={})


def refusal(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    with pytest.raises(SystemExit):
        load(*argv)
    return capsys.readouterr().err


def test_arguments_of_vllm_are_what_is_set_and_the_model() -> None:
    config = load(
        "--model.name", "m", "--model.dtype", "bfloat16", "--max-model-len", "64", "--seed", "3",
        "--tensor-parallel-size", "2", "--enforce-eager", "--max-num-seqs", "8", "--kv-cache-bytes", "1024",
        "--router-dtype", "float32",
        "--vllm.block-size", "32", "--vllm.enable_prefix_caching", "false", "--vllm.hf-overrides.rope_theta", "1e4",
    )  # fmt: skip
    assert config.vllm_arguments() == {
        "model": "m",
        "dtype": "bfloat16",
        "trust_remote_code": False,
        "max_model_len": 64,
        "seed": 3,
        "tensor_parallel_size": 2,
        "enforce_eager": True,
        "max_num_seqs": 8,
        "kv_cache_memory_bytes": 1024,
        "block_size": 32,
        "enable_prefix_caching": False,
        "hf_overrides": {"head_dtype": "float32", "rope_theta": 1e4},
        "additional_config": {ROUTER_DTYPE: "float32"},
    }


def test_untouched_configuration_leaves_vllm_its_defaults() -> None:
    assert sorted(load().vllm_arguments()) == ["dtype", "hf_overrides", "max_model_len", "model", "trust_remote_code"]


def test_nodes_of_a_data_parallel_engine_are_configured_with_vllms_own_flags() -> None:
    node = load(
        "--data-parallel-size", "4", "--tensor-parallel-size", "4", "--data-parallel-size-local", "2",
        "--data-parallel-address", "10.0.0.1", "--data-parallel-rpc-port", "13345", "--data-parallel-start-rank", "2",
        "--headless",
    )  # fmt: skip
    arguments = node.vllm_arguments()
    assert {key: value for key, value in arguments.items() if "parallel" in key} == {
        "data_parallel_size": 4,
        "tensor_parallel_size": 4,
        "data_parallel_size_local": 2,
        "data_parallel_address": "10.0.0.1",
        "data_parallel_rpc_port": 13345,
        "data_parallel_start_rank": 2,
    }
    assert "headless" not in arguments
    assert node.headless
    assert node.gpus_per_engine() == 8


@pytest.mark.parametrize(
    ("argv", "gpus"),
    [
        ([], 1),
        (["--tensor-parallel-size", "4"], 4),
        (["--vllm.tensor_parallel_size", "4", "--vllm.pipeline_parallel_size", "2"], 8),
        (["--tensor-parallel-size", "2", "--data-parallel-size", "2"], 4),
    ],
)
def test_an_engine_takes_a_gpu_for_each_shard_of_each_copy(argv: list[str], gpus: int) -> None:
    assert load(*argv).gpus_per_engine() == gpus


def test_an_engine_that_shares_its_gpu_takes_half_of_it_unless_told_otherwise() -> None:
    def share(*argv: str) -> object:
        return load(*argv).vllm_arguments().get("gpu_memory_utilization")

    assert share() is None
    assert share("--gpu-memory-utilization", "auto") is None
    assert share("--share-gpu") == 0.5
    assert share("--share-gpu", "--gpu-memory-utilization", "0.3") == 0.3
    assert share("--share-gpu", "--vllm.gpu_memory_utilization", "0.3") == 0.3


def test_what_is_auto_is_not_handed_to_vllm_and_a_number_is_wherever_it_is_set() -> None:
    assert "max_num_seqs" not in load().vllm_arguments()
    assert "max_num_seqs" not in load("--max-num-seqs", "auto").vllm_arguments()
    assert load("--max-num-seqs", "300").vllm_arguments()["max_num_seqs"] == 300
    assert load("--vllm.max-num-seqs", "300").vllm_arguments()["max_num_seqs"] == 300
    assert load().vllm_only == ()
    assert load("--gpu-memory-utilization", "0.5").vllm_only == ("gpu_memory_utilization",)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ["--max-num-seqs", "8", "--vllm.max-num-seqs", "9"],
            "inference.max_num_seqs and inference.vllm.max_num_seqs are both set; keep only inference.max_num_seqs",
        ),
        (["--vllm.model", "m"], "inference.vllm.model is spelled inference.model.name here; set that one"),
        (["--vllm.headless", "true"], "inference.vllm.headless is spelled inference.headless here"),
        (
            ["--engine", "embedded", "--tensor-parallel-size", "2", "--vllm.block_size", "8"],
            "the embedded engine has no inference.tensor_parallel_size, inference.vllm.block_size; leave them out,"
            " or set inference.engine = 'vllm'",
        ),
    ],
)
def test_what_cannot_be_passed_on_is_refused(capsys: pytest.CaptureFixture[str], argv: list[str], message: str) -> None:
    assert message in refusal(capsys, *argv)


def test_free_arguments_survive_the_resolved_file(tmp_path: Path) -> None:
    config = load("--vllm.hf_overrides.text_config.x", "[1, 2]", "--vllm.swap", "None", "--vllm.spec", "a b")
    dump_toml(config, tmp_path / "inference.toml")
    assert load("@", str(tmp_path / "inference.toml")) == config


@pytest.mark.parametrize(
    ("argv", "has_vllm", "has_gpu", "engine", "reason"),
    [
        ([], True, True, "vllm", "vLLM is installed and there is a GPU"),
        ([], False, True, "embedded", "vLLM is not installed"),
        ([], True, False, "embedded", "there is no GPU"),
        (["--model.device", "cpu"], True, True, "embedded", "model.device is 'cpu'"),
        (["--engine", "vllm"], True, False, "vllm", "as configured"),
        (["--engine", "embedded"], True, True, "embedded", "as configured"),
    ],
)
def test_auto_takes_vllm_where_it_can_run_on_a_gpu(
    argv: list[str], has_vllm: bool, has_gpu: bool, engine: str, reason: str
) -> None:
    config = load(*argv)
    choice = decide(config.engine, config.model.device, has_vllm=has_vllm, has_gpu=has_gpu)
    assert choice.engine == engine
    assert reason in choice.reason
    slow = config.engine == "auto" and engine == "embedded" and has_gpu and config.model.device != "cpu"
    assert ("uv sync --extra vllm" in choice.cost) == slow


async def test_keys_of_vllm_are_refused_when_auto_comes_to_the_embedded_engine() -> None:
    with pytest.raises(ValueError, match=r"has no inference.headless; leave it out"):
        await open_engine(load("--headless", "--model.device", "cpu"))


def test_sleep_while_training_switches_vllms_sleep_mode_on(capsys: pytest.CaptureFixture[str]) -> None:
    assert load("--sleep-while-training").vllm_arguments()["enable_sleep_mode"] is True
    assert "enable_sleep_mode" not in load().vllm_arguments()
    message = refusal(capsys, "--sleep-while-training", "--vllm.enable-sleep-mode", "false")
    assert "leave inference.vllm.enable_sleep_mode out" in message
    message = refusal(capsys, "--sleep-while-training", "--engine", "embedded")
    assert "the embedded engine has no inference.sleep_while_training" in message


@pytest.mark.parametrize(
    ("engine", "says"), [("vllm", "no sleep mode on a CPU"), ("auto", "the embedded engine has no")]
)
async def test_sleep_while_training_is_refused_without_a_gpu(
    monkeypatch: pytest.MonkeyPatch, engine: str, says: str
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ValueError, match=says):
        await open_engine(load("--sleep-while-training", "--engine", engine))


def test_compiled_code_is_shared_only_where_that_is_asked_for() -> None:
    assert not load().share_compiled
    assert load("--share-compiled").vllm_only == ("share_compiled",)


def test_a_list_of_addresses_is_a_flag() -> None:
    config = load("--model.name", "m", "--weight-broadcast.relays", "10.0.0.5:50053,10.0.0.6:50053")
    assert config.weight_broadcast.relays == ["10.0.0.5:50053", "10.0.0.6:50053"]
