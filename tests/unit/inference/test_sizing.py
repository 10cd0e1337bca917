"""What vLLM is started with, for a GPU, a model and a context."""

import dataclasses

import pytest
from transformers import DeepseekV3Config, Gemma3TextConfig, LlamaConfig, Qwen3Config

from meshrl.inference.sizing import GIB, ModelShape, engine_size, fits, graph_sizes, shape_of

H100, H200, SMALL = int(79.1 * GIB), int(139.8 * GIB), int(23.6 * GIB)
QWEN3 = {
    name: ModelShape(parameters=parameters, layers=layers, kv_heads=8, head_dim=128, vocab_size=151_936)
    for name, parameters, layers in (
        ("0.6B", 596_049_920, 28), ("4B", 4_022_468_096, 36), ("8B", 8_190_735_360, 36), ("32B", 32_762_123_264, 64),
    )
}  # fmt: skip


@pytest.mark.parametrize(
    ("gpu", "name", "context", "slots", "share", "batched"),
    [
        (H100, "0.6B", 2048, 1024, 0.92, 8192),
        (H100, "4B", 2048, 512, 0.92, 8192),
        (H100, "8B", 2048, 512, 0.92, 8192),
        (H100, "0.6B", 16384, 512, 0.92, 8192),
        (H100, "8B", 16384, 256, 0.92, 8192),
        (H200, "0.6B", 2048, 1024, 0.92, 8192),
        (H200, "4B", 2048, 1024, 0.92, 8192),
        (H200, "8B", 2048, 1024, 0.92, 8192),
        (H200, "32B", 2048, 32, 0.92, 8192),
        (H200, "4B", 32768, 512, 0.92, 8192),
        (SMALL, "0.6B", 2048, 256, 0.87, 2048),
        (SMALL, "4B", 2048, 32, 0.87, 2048),
    ],
)
def test_slots_and_share_suit_the_gpu_and_the_model(
    gpu: int, name: str, context: int, slots: int, share: float, batched: int
) -> None:
    size = engine_size(QWEN3[name], gpu_bytes=gpu, max_model_len=context, versions=True)
    assert (size.max_num_seqs, size.gpu_memory_utilization, size.max_num_batched_tokens) == (slots, share, batched)
    assert (1 - size.gpu_memory_utilization) * gpu >= 3 * GIB, "transfers find room"


def test_the_second_copy_of_the_weights_is_within_the_share() -> None:
    """vLLM measures its room with both copies there: a 4B model filled an H200 when only one of them counted."""
    model = QWEN3["8B"]
    sizes = {
        versions: engine_size(model, gpu_bytes=H100, max_model_len=2048, versions=versions)
        for versions in (True, False)
    }
    assert {size.gpu_memory_utilization for size in sizes.values()} == {0.92}
    tokens = {
        versions: int(size.reason.split("about ")[1].split()[0].replace(",", "")) for versions, size in sizes.items()
    }
    one_copy = model.weight_bytes() / model.kv_bytes_per_token()
    assert tokens[False] - tokens[True] == pytest.approx(one_copy, rel=0.1)


def test_a_server_without_versions_needs_no_room_for_a_second_copy() -> None:
    size = engine_size(QWEN3["32B"], gpu_bytes=H200, max_model_len=2048, versions=False)
    assert (size.max_num_seqs, size.gpu_memory_utilization) == (512, 0.92)


def test_weights_that_do_not_fit_twice_are_said_so_and_fit_over_more_gpus() -> None:
    model = QWEN3["32B"]
    assert not fits(model, gpu_bytes=H100)
    assert fits(model, gpu_bytes=H100, gpus=2)
    assert fits(model, gpu_bytes=H200)
    assert engine_size(model, gpu_bytes=H100, max_model_len=2048, gpus=4, versions=True).max_num_seqs == 1024
    assert engine_size(model, gpu_bytes=H100, max_model_len=2048, versions=True).max_num_seqs == 64


def test_a_given_share_bounds_the_slots() -> None:
    half = engine_size(QWEN3["8B"], gpu_bytes=H100, max_model_len=2048, versions=True, share=0.5)
    assert (half.max_num_seqs, half.gpu_memory_utilization) == (64, 0.5)


def test_grouped_heads_count_once_and_are_repeated_where_there_are_fewer_than_gpus() -> None:
    model = QWEN3["0.6B"]
    assert model.kv_bytes_per_token() == 2 * 28 * 8 * 128 * 2 == 114_688
    assert model.kv_bytes_per_token(gpus=4) == 28_672
    assert model.kv_bytes_per_token(gpus=16) == 114_688 // 8
    assert dataclasses.replace(model, bytes_per_value=4).kv_bytes_per_token() == 229_376


@pytest.mark.parametrize(
    ("config", "kv_heads", "head_dim"),
    [
        (Qwen3Config(hidden_size=1024, num_attention_heads=16, num_key_value_heads=8, head_dim=128), 8, 128),
        (LlamaConfig(num_hidden_layers=2, hidden_size=512, num_attention_heads=8), 8, 64),
        (Gemma3TextConfig(num_hidden_layers=6), None, 256),  # most of its layers keep a window only
        (DeepseekV3Config(num_hidden_layers=2), None, 64),  # latents in place of heads
    ],
)  # fmt: skip
def test_the_shape_is_read_from_the_models_configuration(config, kv_heads: int | None, head_dim: int) -> None:
    shape = shape_of(config, parameters=10, bytes_per_value=2)
    assert (shape.kv_heads, shape.head_dim) == (kv_heads, head_dim)
    assert (shape.kv_bytes_per_token() is None) == (kv_heads is None)


def test_a_cache_of_another_form_gets_a_middling_number_of_slots() -> None:
    model = dataclasses.replace(QWEN3["4B"], kv_heads=None)
    assert engine_size(model, gpu_bytes=H100, max_model_len=2048, versions=True).max_num_seqs == 256


@pytest.mark.parametrize(("slots", "most"), [(1, 1), (16, 5), (256, 15), (512, 23), (1024, 31), (1000, 31)])
def test_every_batch_up_to_the_slots_has_a_cuda_graph_that_is_little_larger(slots: int, most: int) -> None:
    sizes = graph_sizes(slots)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == slots
    assert len(sizes) <= most, "each takes its time at the start"
    for batch in range(1, slots + 1):
        graph = next(size for size in sizes if size >= batch)
        assert graph - batch <= max(31, batch / 8), f"{batch} runs as {graph}"
        assert graph <= max(16, 1.5 * batch), f"{batch} runs as {graph}"
