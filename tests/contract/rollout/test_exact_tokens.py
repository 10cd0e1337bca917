"""What samples hold is what the engine generated: tokens, logprobs and versions, whatever a template does to them."""

from pathlib import Path

import pytest

from recorded_engine import CASES, play

# verifiers 0.4 passes an argument of tenacity by its old name when it connects to a tool server.
pytestmark = pytest.mark.filterwarnings("ignore:The 'initial' parameter is deprecated:DeprecationWarning")


@pytest.mark.parametrize("case", CASES)
async def test_every_token_that_trains_was_sampled_in_just_that_context(case: str, tmp_path: Path):
    seen = await play(case, 10, tmp_path, seed=sorted(CASES).index(case))
    assert seen.rollouts == 10
    assert seen.turns > 25
    assert seen.split > 0
    assert len(seen.versions) > 10
    if case == "keeps every turn":
        assert seen.samples < seen.turns
    if case == "strips earlier replies":
        assert seen.samples > seen.rollouts
