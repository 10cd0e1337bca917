"""Which modules of a model are checkpointed, compiled and sharded each for itself."""

from collections.abc import Iterator

import pytest
import torch._dynamo
from torch import nn
from torch._dynamo.utils import counters

from loss_curves import stream_batch
from meshrl.models.logprobs import PackedPolicy
from meshrl.training.learner import to_row
from meshrl.training.model_config import TrainerModelConfig
from meshrl.training.parallel.fsdp import prepare_blocks, transformer_blocks
from tiny_families import VOCAB, tiny_model


def test_a_list_of_experts_is_not_taken_for_the_layers() -> None:
    """It is the longer list: 128 experts in 48 layers."""
    model = tiny_model("qwen3")
    for layer in model.model.layers:
        layer.mlp = nn.ModuleList(nn.Linear(2, 2) for _ in range(5))
    assert transformer_blocks(model) == list(model.model.layers)


@pytest.mark.parametrize(
    ("family", "kinds"),
    [
        ("qwen3_moe", {"Qwen3MoeDecoderLayer"}),
        ("mixtral", {"MixtralDecoderLayer"}),
        ("gemma3", {"Gemma3DecoderLayer", "SiglipEncoderLayer"}),  # a tower beside the text model
        ("zamba2", {"Zamba2HybridLayer", "Zamba2MambaDecoderLayer"}),
        ("electra", {"ElectraLayer"}),  # names no class that must stay whole
    ],
)
def test_the_layers_of_a_family(family: str, kinds: set[str]) -> None:
    model = tiny_model(family)
    blocks = transformer_blocks(model)
    assert {type(block).__name__ for block in blocks} == kinds
    assert len(blocks) >= model.config.get_text_config().num_hidden_layers
    assert not any(block in list(outer.modules())[1:] for block in blocks for outer in blocks), "one in another"


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()
    counters.clear()


@pytest.mark.usefixtures("fresh_compiler")
def test_activations_wait_on_the_host_for_blocks_that_are_compiled_whole() -> None:
    breaks = []
    for offloading in ({}, {"ac_offloading": {}}):
        policy = PackedPolicy(tiny_model("qwen3"))
        prepare_blocks(
            policy, TrainerModelConfig.model_validate({"ac": {}, "compile": {"backend": "eager"}, **offloading})
        )
        row = to_row(stream_batch(0, dp_size=1, vocab_size=VOCAB)[0], torch.device("cpu"), policy.kernels)
        logprobs, _ = policy(row)
        torch.autograd.backward(logprobs.sum())
        breaks.append(set(counters["graph_break"]))
    assert breaks[0] == breaks[1]
