"""What a run does when the engines' logprobs are not the trainer's."""

import pytest

from meshrl.sampling.retry import RunError

APART = {"mismatch_abs/all/mean": 2.3, "mismatch_abs/all/max": 9.0}


async def test_run_whose_engines_differ_says_so_once_and_goes_on(mesh, script, make_config, start, warned) -> None:
    script.metrics |= APART
    async with start(make_config(mesh.services)) as (loop, _):
        await loop.train()
    (warning,) = [line for line in warned if "logprobs of step" in line]
    assert warning.startswith("logprobs of step 1's tokens by the engines and by the trainer differ by 2.3 nats")
    assert script.engine_version == 4


async def test_fatal_check_ends_the_run_before_the_version_is_served(mesh, script, make_config, start) -> None:
    script.metrics |= APART
    async with start(make_config(mesh.services, logprob_check={"fatal": True})) as (loop, _):
        with pytest.raises(RunError, match=r"2\.3 nats on average, 9 at most, though both are of version 0; more than"):
            await loop.train()
    assert script.engine_version == 0
