"""reasoning-gym's datasets as tasksets, by name."""

from __future__ import annotations

import random
import sys
from typing import Any

import pytest
from meshrl.environments.reasoning_mix import demonstrations as reasoning_demonstrations
from meshrl.environments.reasoning_mix import taskset as adapter

from meshrl.core.config import ConfigError
from meshrl.core.config.shared import EnvConfig
from meshrl.rollout import hosting
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.types import Sampling


def load(dataset: str, **args: Any) -> hosting.HostedEnvironment:
    config = EnvConfig(id=f"reasoning_gym:{dataset}", args=args)
    return hosting.load(
        config, model="m", harness="meshrl.environments.harness", max_turns=None, default_sampling=Sampling()
    )


async def test_a_task_follows_from_seed_and_index_alone():
    first, again, other = load("leg_counting"), load("leg_counting"), load("leg_counting", seed=1)
    late = await first.tasks.at(400)
    assert late.data.prompt.startswith("Your task is to count how many legs")
    assert "<answer>answer here</answer>" in late.data.system_prompt
    assert (await again.tasks.at(400)).key == late.key
    assert (await other.tasks.at(400)).data.prompt != late.data.prompt


async def test_size_is_the_number_of_tasks_and_none_is_made_for_it():
    hosted = load("leg_counting", size=10_000_000)
    assert hosted.info.num_tasks == 10_000_000
    assert (await hosted.tasks.at(9_999_999)).data.index == 9_999_999
    with pytest.raises(MeshError) as caught:
        await hosted.tasks.at(10_000_000)
    assert caught.value.reason is Reason.UNKNOWN_TASK


async def test_options_of_the_dataset_stand_beside_size_and_seed():
    hosted = load("leg_counting", min_animals=2, max_animals=2, prompt_style="direct")
    task = await hosted.tasks.at(3)
    assert task.data.prompt.count(",") == 2
    assert task.data.system_prompt.startswith("Answer the question directly.")
    mixed = load("composite", datasets=[{"name": "chain_sum", "weight": 1.0}])
    assert "=" in (await mixed.tasks.at(0)).data.prompt


@pytest.mark.parametrize(
    ("dataset", "args", "words"),
    [
        ("leg_countng", {}, "reasoning-gym has no dataset 'leg_countng'; did you mean leg_counting or"),
        ("qqqqqqq", {}, r"the \d+ datasets are "),
        ("leg_counting", {"max_animal": 3}, "leg_counting has no option max_animal; its options are max_animals, "),
        ("leg_counting", {"max_animals": 1}, "refuses its options: max_animals must be >= min_animals"),
        ("leg_counting", {"prompt_style": "long"}, "prompt_style must be one of .*default.*; got 'long'"),
        ("", {}, "ids with a colon are reasoning_gym:<dataset>"),
    ],
)
def test_what_does_not_fit_is_said_with_what_does(dataset: str, args: dict[str, Any], words: str):
    with pytest.raises(ConfigError, match=words):
        load(dataset, **args)


def test_without_the_package_it_is_said_how_to_install_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    adapter._package.cache_clear()
    with pytest.raises(
        ConfigError, match=r"uv sync --extra reasoning-gym, or uv pip install 'meshrl\[reasoning-gym\]'"
    ):
        load("leg_counting")
    adapter._package.cache_clear()


@pytest.mark.parametrize(
    ("dataset", "reply", "reward"),
    [
        ("leg_counting", "<answer>{answer}</answer>", 1.0),
        ("leg_counting", "{answer}", 0.0),
        ("chain_sum", "first <answer>1</answer> then <answer> {answer} </answer>", 1.0),
        ("prime_factorization", "<answer>no number</answer>", 0.0),
        ("graph_color", "<answer>{{}}</answer>", 0.01),
    ],
)
async def test_the_last_answer_between_the_tags_is_scored_by_the_dataset(dataset: str, reply: str, reward: float):
    task = await load(dataset).tasks.at(0)
    trace = _Trace(reply.format(answer=task.data.answer))
    assert await task.correct(trace) == pytest.approx(reward)
    assert trace.metrics == {"unreadable": float(dataset == "prime_factorization")}
    assert await task.answered(trace) == float("<answer>" in reply)


class _Trace:
    """What a reward reads and writes of a trace."""

    def __init__(self, last_reply: str) -> None:
        self.last_reply = last_reply
        self.metrics: dict[str, float] = {}

    def record_metric(self, name: str, value: float) -> None:
        self.metrics[name] = value


async def test_instructions_stand_in_place_of_those_of_the_package():
    task = await load("leg_counting", instructions="Reply <answer>so</answer>.").tasks.at(0)
    assert task.data.system_prompt == "Reply <answer>so</answer>."


def test_demonstrations_of_a_run_answer_in_its_form_and_right_at_the_given_rate(tmp_path):
    file = tmp_path / "rl.toml"
    file.write_text(
        '[[orchestrator.train.env]]\nid = "reverse_text"\n[[orchestrator.train.env]]\nid = "reasoning_gym:chain_sum"\n'
        'args = { seed = 1, instructions = "Reply.", min_terms = 2, max_terms = 2, min_digits = 1, max_digits = 1 }\n'
    )
    (drawn,) = reasoning_demonstrations.tasks(file, size=400, seed=7)
    rows = list(reasoning_demonstrations.demonstrations(drawn, share=0.4, source=random.Random(0)))
    assert rows[0]["prompt"][0] == {"role": "system", "content": "Reply."}
    right = [
        row["completion"][0]["content"] == f"<answer>{task.data.answer}</answer>"
        for row, task in zip(rows, drawn, strict=True)
    ]
    assert 0.34 < sum(right) / len(right) < 0.54  # a few of the others are right by chance
    file.write_text('[[orchestrator.train.env]]\nid = "reverse_text"\n')
    with pytest.raises(ValueError, match="whose id begins with reasoning_gym:"):
        reasoning_demonstrations.tasks(file, size=1, seed=0)
