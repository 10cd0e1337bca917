"""What the model section of a trainer refuses, and what a bare switch means."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from meshrl.core.config import load_config
from meshrl.trainer.config import TrainerConfig
from meshrl.training.model_config import TrainerModelConfig


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"fsdp_cpu_offload": True, "optim_cpu_offload": True}, "leave model.optim_cpu_offload out"),
        ({"ac_offloading": {}}, "set model.ac as well"),
        ({"lora": {"rank": 0}}, "greater than or equal to 1"),
        ({"ac": {"mode": "half"}}, "'full', 'attention' or 'selective'"),
    ],
)
def test_what_does_not_fit_together_is_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        TrainerModelConfig.model_validate(settings)


def test_bare_switches_turn_sections_on_with_their_defaults() -> None:
    config = load_config(
        TrainerConfig,
        ["--model.ac", "--model.compile", "--model.lora.rank", "4", "--bench"],
        prog="trainer",
        environ={},
    )
    assert (config.model.ac and config.model.ac.mode, config.model.ac and config.model.ac.freq) == ("full", 1)
    assert config.model.compile is not None
    assert config.model.lora is not None
    assert (config.model.lora.rank, config.model.lora.alpha) == (4, 32.0)
    assert config.bench is not None
