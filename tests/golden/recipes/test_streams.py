"""What each algorithm makes of a group, beside an independent reference in plain Python (make_golden.py)."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from meshrl.algorithms.advantages import mean_baseline_advantages
from meshrl.algorithms.recipes.base import Recipe, SampleStreams, Scores, TokenScores
from meshrl.algorithms.recipes.echo import Echo
from meshrl.algorithms.recipes.grpo import GRPO
from meshrl.algorithms.recipes.hierarchical_grpo import HierarchicalGRPO
from meshrl.algorithms.recipes.max_rl import MaxRL
from meshrl.algorithms.recipes.opd import OnPolicyDistillation
from meshrl.algorithms.recipes.opsd import SelfDistillation
from meshrl.algorithms.recipes.rae import RoleBaseline
from meshrl.algorithms.recipes.sft import Imitation
from meshrl.wire.types import MessageSpan, Rollout, Sample, VersionSpan

GOLDEN = json.loads((Path(__file__).parent / "streams.json").read_text())
RECIPES = {
    "grpo": lambda: GRPO(mean_baseline_advantages),
    "max_rl": MaxRL,
    "rae": lambda: RoleBaseline(GOLDEN["decay"]),
    "hierarchical_grpo": lambda: HierarchicalGRPO(mean_baseline_advantages, episode_agents=["solver"]),
    "opd": lambda: OnPolicyDistillation(weight=1.0),
    "opsd": lambda: SelfDistillation(weight=1.0, context_tokens=GOLDEN["room"]),
    "sft": lambda: Imitation(weight=1.0, min_reward=0.5),
    "echo": lambda: Echo(mean_baseline_advantages, roles=["tool"], weight=GOLDEN["echo_weight"]),
}


def rollouts(group: list[dict]) -> list[Rollout]:
    return [
        Rollout(
            rollout_id=one["id"],
            group_id="g",
            task_key="t",
            environment="e",
            agent=one["agent"],
            samples=tuple(map(sample, one["samples"])),
            reward=one["reward"],
            episode_id=one["episode"],
        )
        for one in group
    ]


def sample(each: dict) -> Sample:
    mask = np.array(each["mask"])
    return Sample(
        token_ids=np.array(each["tokens"], dtype=np.int32),
        loss_mask=mask,
        logprobs=np.where(mask, -0.5, 0.0).astype(np.float32),
        version_spans=(VersionSpan(start=0, end=len(mask), version=0),),
        message_spans=tuple(MessageSpan(start=start, end=end, role=role) for start, end, role in each["spans"]),
    )


def scores(recipe: Recipe, group: list[dict]) -> Scores:
    """What was asked for, as the golden file has it."""
    known = {(one["id"], place): each for one in group for place, each in enumerate(one["samples"])}
    made = {}
    for request in recipe.score_requests(rollouts(group)):
        each = known[request.rollout_id, request.place]
        assert request.token_ids[request.context :].tolist() == each["tokens"]
        logprobs = np.array([np.nan if score is None else score for score in each["scores"]], dtype=np.float32)
        made[request.rollout_id, request.place] = TokenScores(logprobs=logprobs)
    return made


def assert_equal(found: SampleStreams, expected: dict) -> None:
    names = {"ce_weights": "ce", "ref_kl_weights": "ref_kl", "ref_logprobs": "ref"}
    if "advantage" in expected:
        assert found.advantage == pytest.approx(expected["advantage"], rel=1e-6, abs=1e-7)
    else:
        assert found.advantage is None
    for field, name in names.items():
        array = getattr(found, field)
        if name in expected:
            assert array.dtype == np.float32
            assert array.tolist() == pytest.approx(expected[name], rel=1e-6)
        else:
            assert array is None, field


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_streams_are_those_of_the_plain_reference(name: str) -> None:
    recipe: Recipe = RECIPES[name]()
    for group, expected in zip(GOLDEN["groups"], GOLDEN["streams"][name], strict=True):
        found = recipe.streams(rollouts(group), scores(recipe, group))
        assert found.keys() == expected.keys()
        for rollout_id, streams in expected.items():
            for one, other in zip(found[rollout_id], streams, strict=True):
                assert_equal(one, other)


def test_a_demonstration_is_the_first_of_the_best_attempts_of_the_same_agent() -> None:
    for group, expected in zip(GOLDEN["groups"], GOLDEN["streams"]["opsd"], strict=True):
        asked = RECIPES["opsd"]().score_requests(rollouts(group))
        shown = {(one.rollout_id, one.place): one.token_ids[: one.context].tolist() for one in asked}
        assert shown == {
            (rollout_id, place): stream["shown"]
            for rollout_id, streams in expected.items()
            for place, stream in enumerate(streams)
            if stream
        }


def test_scores_are_of_temperature_one() -> None:
    warm = [replace(rollouts(GOLDEN["groups"][0])[0])]
    warm[0] = replace(warm[0], samples=tuple(replace(each, temperature=0.7) for each in warm[0].samples))
    known = {
        (warm[0].rollout_id, place): TokenScores(logprobs=np.zeros(len(each.token_ids), dtype=np.float32))
        for place, each in enumerate(warm[0].samples)
    }
    with pytest.raises(ValueError, match=r"sampled at temperature 0\.7, but scores are of temperature 1"):
        RECIPES["opd"]().streams(warm, known)


def test_rae_goes_on_from_the_state_that_it_gave() -> None:
    first, second = RECIPES["rae"](), RECIPES["rae"]()
    groups = [rollouts(group) for group in GOLDEN["groups"]]
    first.streams(groups[1], {})
    second.restore(json.loads(json.dumps(first.state())))
    assert set(first.state()) == {"white", "black"}
    again, there = first.streams(groups[1], {}), second.streams(groups[1], {})
    assert {key: one[0].advantage for key, one in again.items()} == {
        key: one[0].advantage for key, one in there.items()
    }


def test_max_rl_refuses_rewards_whose_mean_says_nothing() -> None:
    group = [dict(one, reward=-1.0) for one in GOLDEN["groups"][0]]
    with pytest.raises(ValueError, match="max_rl divides by the mean reward, so rewards must be finite and 0 or more"):
        RECIPES["max_rl"]().streams(rollouts(group), {})


def test_solvers_without_an_episode_are_an_error() -> None:
    group = [dict(one, episode="") for one in GOLDEN["groups"][2]]
    with pytest.raises(ValueError, match=r"compares the rollouts of agent 'solver' within an episode.*name none"):
        RECIPES["hierarchical_grpo"]().streams(rollouts(group), {})


def test_echo_learns_what_a_tool_says_without_the_markup_around_it_where_that_is_known() -> None:
    spans = (
        MessageSpan(start=0, end=2, role="user", content_start=1, content_end=2),
        MessageSpan(start=2, end=6, role="tool", content_start=3, content_end=5),
        MessageSpan(start=6, end=8, role="tool", content_start=6, content_end=6),
        MessageSpan(start=8, end=10, role="tool"),
    )
    one = sample({"tokens": list(range(12)), "mask": 10 * [False] + 2 * [True], "spans": []})
    rollout = replace(rollouts(GOLDEN["groups"][0])[0], samples=(replace(one, message_spans=spans),))
    ((streams,),) = RECIPES["echo"]().streams([rollout], {}).values()
    assert (streams.ce_weights > 0).nonzero()[0].tolist() == [3, 4, 8, 9]
