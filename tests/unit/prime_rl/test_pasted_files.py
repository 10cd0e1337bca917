"""What stands in other launchers' documentation is taken as it is, or refused in sentences that say what to do."""

from __future__ import annotations

import pytest

from pasted_files import commands, paste

EXPLAINED = {
    "rl @ rl_many_nodes.toml": 1,
    "rl @ rl_one_gpu.toml": 1,
    "rl @ rl_one_gpu.toml --ckpt --ckpt.interval 5 --ckpt.keep-last 3": 1,
    "rl @ rl_2026_august_cluster.toml": 6,
    "sft @ sft_2026_august.toml --resume.step 20 --eval.interval 5": 1,
    "rl @ rl_2026_may.toml --orchestrator.training-mode opd": 1,
    "trainer --model.ac --max-concurrent-runs 4": 1,
    "synthesize": 1,
}
"""Commands that ask for what is not there, and how many lines the refusal has."""


@pytest.mark.parametrize("command", commands())
def test_what_is_pasted_is_accepted_or_explained(command: str) -> None:
    pasted = paste(command)
    assert pasted.verdict == ("explained" if command in EXPLAINED else "accepted"), pasted.refusal
    assert len(pasted.refusal) == EXPLAINED.get(command, 0), pasted.refusal
