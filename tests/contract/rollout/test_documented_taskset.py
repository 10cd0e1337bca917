"""The taskset and the tasks of docs/environments.md, as they are printed there, are played and scored."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parents[3] / "docs" / "environments.md"


def block(language: str) -> str:
    """The one block of a language in the page."""
    (text,) = re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    return str(text)


async def test_the_taskset_of_the_page_plays_the_tasks_beside_it(
    start_mesh: Any, engine: Any, make_group: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_tasks.py").write_text(block("python"))
    (tmp_path / "tasks.jsonl").write_text(block("json"))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_tasks", raising=False)
    engine.reply = lambda request: "4"
    args = {"path": str(tmp_path / "tasks.jsonl"), "difficulty": 3}
    env = [
        {"id": "my_tasks", "name": "mine", "args": args},
        {"id": "my_tasks", "name": "easy", "args": args | {"difficulty": 1}},
    ]
    mesh = await start_mesh([engine], env=env)
    assert {each.name: each.num_tasks for each in await mesh.client.list_environments()} == {"mine": 2, "easy": 1}
    rewards = []
    for task in (0, 1):
        request = make_group(environment="mine", task_index=task)
        *rollouts, _ = await mesh.collect(request)
        rewards += [(rollout.reward_parts, rollout.reward) for rollout in rollouts]
    assert rewards == [({"right": 1.0}, 1.0), ({"right": 0.0}, 0.0)]
