"""What auto chooses for models, rows and machines, and that what a user gave stays as it is."""

import functools
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from meshrl.models.load import empty_model
from meshrl.models.logprobs import KEPT_SHARE
from meshrl.training import auto_settings
from meshrl.training.auto_settings import (
    LOGITS_CPU,
    LOGITS_GPU,
    BlockShape,
    Chosen,
    choose,
    choose_layout,
    resolve_auto,
    ways_to_fit,
)
from meshrl.training.config import OptimConfig
from meshrl.training.memory_estimate import MemoryNeed, memory_need
from meshrl.training.model_config import ActivationCheckpointConfig, CompileConfig, LoraConfig, TrainerModelConfig
from meshrl.training.parallel.fsdp import transformer_blocks
from meshrl.training.parallel.plan import ParallelPlan
from meshrl.training.parallel.rank_group import RankGroup
from tiny_families import tiny_config, tiny_model

SHAPES = Path(__file__).parents[2] / "benchmarks" / "shapes"
ROWS = (4096, 16384, 65536)


@functools.cache
def outline(shape: str) -> BlockShape:
    config = TrainerModelConfig(name=str(SHAPES / f"qwen3-{shape}"), device="cpu")
    return BlockShape.of(empty_model(config, dtype=torch.bfloat16))


@functools.cache
def need_of(shape: str, ranks: int, lora: bool, publishes: bool) -> MemoryNeed:
    config = TrainerModelConfig(
        name=str(SHAPES / f"qwen3-{shape}"), device="cpu", dtype="bfloat16", lora=LoraConfig() if lora else None
    )
    group = RankGroup(ParallelPlan(dp_shard=ranks, local_world_size=ranks))
    return memory_need(config, OptimConfig(), group, publishes=publishes)


def chosen(
    shape: str,
    gigabytes: float | None,
    *,
    on_gpu: bool = True,
    ranks: int = 1,
    lora: bool = False,
    publishes: bool = False,
) -> list[Chosen]:
    need, sizes = need_of(shape, ranks, lora, publishes), outline(shape)
    free = None if gigabytes is None else int(gigabytes * 1e9)
    return [
        choose(sizes, need, seq_len=row, on_gpu=on_gpu, free_bytes=free, itemsize=2 if on_gpu else 4) for row in ROWS
    ]


@pytest.mark.parametrize(
    ("shape", "gigabytes", "ranks", "lora", "expected"),
    [
        ("0.6b", 79, 1, False, [None, None, "selective"]),
        ("0.6b", 138, 1, False, [None, None, None]),
        ("4b", 79, 1, True, [None, "selective", "attention"]),
        ("4b", 138, 1, False, [None, "selective", "attention"]),  # 91 and 84 GiB were measured with these
        ("4b", 79, 8, False, [None, "selective", "attention"]),
        ("8b", 79, 8, False, [None, "selective", "full"]),
        ("8b", 138, 1, True, [None, None, "attention"]),
        ("32b", 138, 8, False, ["selective", "attention", "full"]),
    ],
)
def test_longer_rows_and_less_memory_keep_less(
    shape: str, gigabytes: float, ranks: int, lora: bool, expected: list[str | None]
) -> None:
    found = chosen(shape, gigabytes, ranks=ranks, lora=lora)
    assert [one.ac for one in found] == expected
    assert all(one.compiled for one in found)


def test_a_snapshot_that_is_published_meanwhile_takes_its_room() -> None:
    """4B beside an engine, rows of 16k tokens: with `attention` the second step ran out of memory on an H200."""
    assert [one.ac for one in chosen("4b", 92)][1] == "attention"
    assert [one.ac for one in chosen("4b", 92, publishes=True)][1] == "full"


def test_what_does_not_fit_is_checkpointed_in_full_and_said() -> None:
    assert [(one.ac, one.fits) for one in chosen("32b", 79, lora=True)] == [("full", False)] * 3


@pytest.mark.parametrize(
    ("shape", "gigabytes", "ranks", "lora", "expected"),
    [
        ("0.6b", 79, 1, False, [True, True, True]),
        ("0.6b", 79, 8, False, [True, True, True]),
        ("4b", 79, 1, False, [False, False, False]),
        ("4b", 138, 1, False, [True, True, True]),
        ("4b", 79, 1, True, [True, True, True]),
        ("4b", 79, 8, False, [True, True, False]),  # 24 GB of parameters and gradients that ranks would divide
        ("8b", 79, 8, False, [False, False, False]),
    ],
)
def test_parameters_stay_gathered_over_a_step_where_they_fit(
    shape: str, gigabytes: float, ranks: int, lora: bool, expected: list[bool]
) -> None:
    assert [one.gathered for one in chosen(shape, gigabytes, ranks=ranks, lora=lora)] == expected


@pytest.mark.parametrize(
    ("shape", "seq_len", "expected"),
    [("0.6b", 640, 16000), ("0.6b", 4096, 16384), ("0.6b", 10000, None), ("4b", 4096, None)],
)
def test_short_rows_go_together_as_far_as_that_takes_no_more_checkpointing(
    shape: str, seq_len: int, expected: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """4B in full keeps attention's output of 4k tokens on a card of 79 GB, and of 8k nothing but inputs."""
    monkeypatch.setattr(auto_settings, "available_bytes", lambda device: int(79e9))
    config = TrainerModelConfig(name=str(SHAPES / f"qwen3-{shape}"), device="cpu", dtype="bfloat16")
    group = RankGroup(device=torch.device("cuda"))
    found, _ = resolve_auto(config, OptimConfig(), group, seq_len=seq_len, max_logits_mib=None)
    assert found.pass_tokens == expected
    on_a_cpu, _ = resolve_auto(config, OptimConfig(), RankGroup(), seq_len=seq_len, max_logits_mib=None)
    assert on_a_cpu.pass_tokens is None
    options = {"seq_len": seq_len, "max_logits_mib": None, "beside_engine": True}
    beside, logits = resolve_auto(config, OptimConfig(), group, **options)  # type: ignore[arg-type]  # mixed
    assert beside.pass_tokens is None
    assert logits <= LOGITS_GPU


def test_logits_shrink_with_the_room_and_never_exceed_the_row() -> None:
    roomy, tight = chosen("4b", 100)[0], chosen("4b", 76)[0]
    assert tight.logits_bytes < roomy.logits_bytes <= 4096 * 151936 * 4


def test_gradients_of_logits_are_kept_where_there_is_room_and_the_head_is_trained() -> None:
    kept = 16384 * 151936 * 2 / KEPT_SHARE
    for shape, gigabytes, lora, expected in (
        ("0.6b", 79, False, True),
        ("0.6b", 40, False, False),
        ("0.6b", 79, True, False),
        ("4b", 79, False, False),
        ("4b", 138, False, True),
    ):
        one = chosen(shape, gigabytes, lora=lora)[1]
        assert (one.logits_bytes >= kept) == expected, (shape, gigabytes, lora, one)


def test_estimates_are_near_the_peaks_that_were_measured() -> None:
    """Activations of `bench_trainer.py` on an H200: the peak less static memory (16 bytes a parameter, 12 where one row
    is a step) and 3 GiB of logits."""
    small, large = outline("0.6b"), outline("4b")
    for shape, mode, tokens, measured in (
        (small, None, 16384, 22.4),
        (small, "selective", 65536, 35.2),
        (large, None, 16384, 65.2),
        (large, "selective", 16384, 28.5),
        (large, "attention", 65536, 36.4),
    ):
        estimate = shape.activation_bytes(mode, tokens=tokens, itemsize=2) / 2**30  # type: ignore[arg-type]  # a literal
        assert estimate == pytest.approx(measured, rel=0.1), (mode, tokens)


@pytest.mark.parametrize("gigabytes", [40.0, None])
def test_a_cpu_keeps_what_it_always_had(gigabytes: float | None) -> None:
    for one in chosen("0.6b", gigabytes, on_gpu=False)[:1]:
        assert (one.ac, one.compiled, one.logits_bytes) == (None, False, LOGITS_CPU)


def test_a_cpu_without_room_for_activations_computes_them_again() -> None:
    assert [one.ac for one in chosen("0.6b", 40, on_gpu=False)] == [None, "selective", "full"]


def test_what_a_user_gave_stays_and_the_rest_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto_settings, "available_bytes", lambda device: int(79e9))
    name = str(SHAPES / "qwen3-0.6b")
    given = TrainerModelConfig(
        name=name,
        device="cpu",
        ac=ActivationCheckpointConfig(mode="full", freq=2),
        compile=CompileConfig(backend="aot_eager"),
        reshard_after_forward=False,
        pass_tokens=1024,
    )
    config, logits = resolve_auto(given, OptimConfig(), RankGroup(), seq_len=512, max_logits_mib=7)
    assert (config, logits) == (given, 7 * 2**20)
    off = TrainerModelConfig.model_validate(
        {"name": name, "device": "cpu", "ac": None, "compile": None, "reshard_after_forward": True, "pass_tokens": None}
    )
    assert resolve_auto(off, OptimConfig(), RankGroup(), seq_len=512, max_logits_mib=None) == (off, LOGITS_CPU)
    config, _ = resolve_auto(
        TrainerModelConfig(name=name, device="cpu"), OptimConfig(), RankGroup(), seq_len=512, max_logits_mib=None
    )
    assert config.compile is None
    assert config.ac != "auto"


@pytest.mark.parametrize(
    ("seq_len", "free_gb", "ranks", "ways"),
    [
        (131072, 79, 2, ["model.cp = 2", "model.lora.rank = 16", "rows of 65536 tokens"]),
        (262144, 79, 2, ["model.cp = 2 with deployment.num_train_gpus = 4", "rows of 65536 tokens"]),
        (65536, 20, 1, ["model.cp = 4 with deployment.num_train_gpus = 8"]),  # alone not even the weights fit
    ],
)
def test_a_row_that_does_not_fit_comes_with_the_keys_that_help(
    seq_len: int, free_gb: int, ranks: int, ways: list[str]
) -> None:
    config = TrainerModelConfig(name=str(SHAPES / "qwen3-4b"), device="cpu", dtype="bfloat16")
    plan, free = ParallelPlan(dp_shard=ranks, local_world_size=ranks), int(free_gb * 1e9)

    def fits(config: TrainerModelConfig, times: int, tokens: int) -> bool:
        need = need_of("4b", ranks, config.lora is not None, publishes=False).over(times)
        return choose(outline("4b"), need, seq_len=tokens, on_gpu=True, free_bytes=free, itemsize=2).fits

    assert ways_to_fit(config, empty_model(config, dtype=torch.bfloat16), plan, seq_len, fits) == ways


def test_ranks_that_share_products_each_keep_a_part_of_a_blocks_activations() -> None:
    config = TrainerModelConfig(name=str(SHAPES / "qwen3-4b"), device="cpu", dtype="bfloat16")
    model = empty_model(config, dtype=torch.bfloat16)
    whole, half = BlockShape.of(model), BlockShape.of(model, tp=2)
    assert (half.queries, half.keys, half.mlp, half.vocab) == (
        whole.queries / 2, whole.keys / 2, whole.mlp / 2, whole.vocab / 2
    )  # fmt: skip
    assert half.kept("full") == whole.kept("full") < half.kept(None) < whole.kept(None)


MIXED = {"hidden_size": 256, "vocab_size": 64, "num_hidden_layers": 2, "head_dim": 64, "num_experts_per_tok": 8}
MIXTURES: dict[str, dict[str, int]] = {
    "mixtral": {**MIXED, "intermediate_size": 896, "num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen3_moe": {**MIXED, "moe_intermediate_size": 96, "num_experts": 16},
    "gpt_oss": {**MIXED, "intermediate_size": 256, "num_local_experts": 16, "num_experts_per_tok": 4},
    "deepseek_v3": {
        **MIXED, "moe_intermediate_size": 72, "n_routed_experts": 16, "first_k_dense_replace": 0, "head_dim": 8,
    },
    "glm4_moe": {**MIXED, "moe_intermediate_size": 88, "n_routed_experts": 16, "first_k_dense_replace": 0},
    "minimax_m2": {**MIXED, "intermediate_size": 128, "num_local_experts": 16},
    "dots1": {**MIXED, "moe_intermediate_size": 88, "n_routed_experts": 16, "first_k_dense_replace": 0},
}  # fmt: skip


def kept_by_a_block(model: PreTrainedModel, tokens: int) -> float:
    """Elements a token that autograd keeps of the last block's forward pass, its parameters aside."""
    block, kept = transformer_blocks(model)[-1], {}
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    forward = block.forward

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if tensor.is_floating_point() and storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes(), tensor  # which holds on to it, so that its address stays its
        return tensor

    def watched(*args: object, **kwargs: object) -> object:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            return forward(*args, **kwargs)

    block.forward = watched
    model(input_ids=torch.arange(tokens)[None] % 64, use_cache=False)
    return sum(num_bytes for num_bytes, _ in kept.values()) / 4 / tokens


@pytest.mark.parametrize("family", MIXTURES)
def test_activations_of_a_mixture_are_near_what_is_kept(family: str) -> None:
    """Each expert that a token goes through has a copy of it: planning without was up to eight times too low."""
    model = tiny_model(family, **MIXTURES[family]).train()
    assert BlockShape.of(model).kept(None) == pytest.approx(kept_by_a_block(model, tokens=64), rel=0.25)


def test_dense_layers_of_a_mixture_count_as_such() -> None:
    shape = BlockShape.of(tiny_model("glm4_moe", **{**MIXTURES["glm4_moe"], "first_k_dense_replace": 1}))
    inner, shared, routed = 48, 88, 8 * 88  # `tiny_families` has an MLP of 48 and one shared expert
    assert shape.mlp == (inner + shared + routed) / 2
    assert shape.experts == 8 / 2


@pytest.mark.parametrize(
    ("ranks", "seq_len", "cp", "tp", "expected"),
    [
        (4, 16, 1, 1, 4),  # 8 experts of 3 * 32 * 16 numbers, gathered four times: 49k, and 16 tokens exchanged: 6k
        (4, 4096, 1, 1, 1),  # a long row is more to send than the experts
        (4, 32, 2, 1, 4),  # of which a rank has half
        (6, 16, 1, 1, 2),  # no other divisor of 6 ranks divides 8 experts
        (1, 16, 1, 1, 1),
        (4, 4096, 1, 2, 4),  # ranks that share products divide the experts in any case
    ],
)
def test_experts_are_divided_where_a_row_is_short_beside_them(
    ranks: int, seq_len: int, cp: int, tp: int, expected: int, tmp_path: Path
) -> None:
    tiny_config("qwen3_moe", num_experts=8).save_pretrained(tmp_path)
    config = TrainerModelConfig.model_validate(
        {"name": str(tmp_path), "device": "cpu", "ep": "auto", "cp": cp, "tp": tp}
    )
    environment = {name: str(ranks) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")}
    assert choose_layout(config, environment, seq_len=seq_len) == {
        "dp_replicate": 1, "cp": cp, "tp": tp, "ep": expected
    }  # fmt: skip


def test_a_dense_model_has_no_experts_to_divide(tmp_path: Path) -> None:
    tiny_config("qwen3").save_pretrained(tmp_path)
    config = TrainerModelConfig.model_validate({"name": str(tmp_path), "device": "cpu", "ep": "auto"})
    assert choose_layout(config, {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}, seq_len=8)["ep"] == 1
