import torch

from meshrl.models.state import gather_state, hf_state
from tiny_qwen3 import tiny_qwen3


def test_names_are_sorted_and_those_of_the_checkpoint_and_a_tied_head_appears_once() -> None:
    names, tied = (list(hf_state(tiny_qwen3(tie_word_embeddings=tied))) for tied in (False, True))
    assert names == sorted(names)
    assert {"lm_head.weight", "model.embed_tokens.weight", "model.layers.0.self_attn.q_norm.weight"} <= set(names)
    assert set(names) - set(tied) == {"lm_head.weight"}


def test_state_shares_memory_and_snapshot_does_not() -> None:
    model = tiny_qwen3()
    live, copy = hf_state(model), gather_state(model)
    with torch.no_grad():
        model.model.norm.weight.fill_(7.0)
    assert live["model.norm.weight"].tolist() == [7.0] * 16
    assert copy["model.norm.weight"].tolist() == [1.0] * 16
