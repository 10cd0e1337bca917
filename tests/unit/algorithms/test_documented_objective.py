"""The loss and the advantage of docs/training.md, as they are printed there, give their values."""

from __future__ import annotations

import math
import re
import sys
from pathlib import Path

import pytest
import torch

from meshrl.algorithms.advantages import load_custom_advantage
from meshrl.algorithms.losses import LossInputs, load_custom_loss

PAGE = Path(__file__).parents[3] / "docs" / "training.md"


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    (tmp_path / "my_objective.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_objective", raising=False)


def test_the_loss_of_the_page_is_the_clipped_policy_gradient() -> None:
    loss = load_custom_loss("my_objective.reinforce", {"clip": 2.0})
    inputs = LossInputs(
        logprobs=torch.tensor([0.0, math.log(3.0), math.log(0.5)], requires_grad=True),
        inference_logprobs=torch.zeros(3),
        advantages=torch.tensor([1.0, 1.0, -1.0]),
        sequence_ids=torch.tensor([0, 0, 1]),
        num_sequences=2,
    )
    output = loss(inputs)
    torch.testing.assert_close(output.per_token, torch.tensor([-1.5, -1.5, 0.5]))  # a sequence's sum over its tokens
    torch.testing.assert_close(output.metrics["ratio_max"], torch.tensor([3.0, 3.0, 0.5]))
    output.per_token.sum().backward()
    torch.testing.assert_close(inputs.logprobs.grad, torch.tensor([-1.0, 0.0, 0.5]))  # none beyond the clip


def test_the_advantage_of_the_page_is_the_distance_from_the_median() -> None:
    advantage = load_custom_advantage("my_objective.above_median", {})
    assert advantage([0.0, 0.5, 1.0, 4.0], [3, 3, 3, 3]).tolist() == [-0.75, -0.25, 0.25, 3.25]
