"""Writes the golden file of the algorithms' streams from plain Python; run it only to add a case.

    python tests/golden/recipes/make_golden.py

It shares no code with the package: each algorithm is a loop over the rollouts of a group, from its paper.
"""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

Group = list[dict[str, Any]]
Stream = dict[str, Any]
DECAY, ECHO_WEIGHT, FLOOR, ROOM = 0.9, 0.25, -20.0, 40


def sample(rng: random.Random, turns: int) -> dict[str, Any]:
    """A chat of given and sampled messages, turn by turn; the policy samples what `assistant` says."""
    tokens: list[int] = []
    mask: list[bool] = []
    spans: list[Any] = []
    for turn in range(turns):
        for role, length in (("user" if turn == 0 else "tool", rng.randint(2, 4)), ("assistant", rng.randint(2, 5))):
            spans.append([len(tokens), len(tokens) + length, role])
            tokens += [rng.randint(3, 60) for _ in range(length)]
            header = 1 if role == "assistant" else 0  # the template's, which nobody samples
            mask += [role == "assistant" and at >= header for at in range(length)]
    scores = [None, *(round(-rng.expovariate(0.5), 3) for _ in tokens[1:])]
    return {"tokens": tokens, "mask": mask, "spans": spans, "scores": scores}


def group(rng: random.Random, agents: list[str], episodes: int, rewards: list[float]) -> Group:
    made = []
    for episode in range(episodes):
        for place, agent in enumerate(agents):
            made.append(
                {
                    "id": f"{episode}-{place}", "agent": agent, "episode": f"e{episode}",
                    "reward": rewards[(episode * len(agents) + place) % len(rewards)],
                    "samples": [sample(rng, rng.randint(1, 3)) for _ in range(rng.randint(1, 2))],
                }
            )  # fmt: skip
    return made


def mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)


def rl(values: dict[str, float], group: Group) -> dict[str, list[Stream]]:
    return {one["id"]: [{"advantage": values[one["id"]]} for _ in one["samples"]] for one in group}


def peers(group: Group, one: dict[str, Any]) -> list[float]:
    return [other["reward"] for other in group if other["agent"] == one["agent"]]


def grpo(group: Group) -> dict[str, list[Stream]]:
    """Minus the mean of the same agent's rollouts (Dr. GRPO, the package's default advantage)."""
    return rl({one["id"]: one["reward"] - mean(peers(group, one)) for one in group}, group)


def max_rl(group: Group) -> dict[str, list[Stream]]:
    values = {}
    for one in group:
        centre = mean(peers(group, one))
        values[one["id"]] = (one["reward"] - centre) / centre if centre else 0.0
    return rl(values, group)


def rae(groups: list[Group]) -> list[dict[str, list[Stream]]]:
    baselines: dict[str, float] = {}
    made = []
    for each in groups:
        values = {}
        for one in each:
            before = baselines.get(one["agent"], 0.0)
            values[one["id"]] = one["reward"] - before
            baselines[one["agent"]] = DECAY * before + (1 - DECAY) * one["reward"]
        made.append(rl(values, each))
    return made


def hierarchical(group: Group) -> dict[str, list[Stream]]:
    """Solvers against those of their episode, others against their like in all episodes."""
    values = {}
    for one in group:
        with_whom = [
            other["reward"]
            for other in group
            if other["agent"] == one["agent"] and (one["agent"] != "solver" or other["episode"] == one["episode"])
        ]
        values[one["id"]] = one["reward"] - mean(with_whom)
    return rl(values, group)


def echo(group: Group) -> dict[str, list[Stream]]:
    made = grpo(group)
    for one in group:
        for stream, each in zip(made[one["id"]], one["samples"], strict=True):
            stream["ce"] = [0.0] * len(each["tokens"])
            for start, end, role in each["spans"]:
                for at in range(start, end):
                    stream["ce"][at] = ECHO_WEIGHT if role == "tool" and not each["mask"][at] else 0.0
    return made


def towards_scores(each: dict[str, Any]) -> Stream:
    known = [on and score is not None for on, score in zip(each["mask"], each["scores"], strict=True)]
    return {
        "ref_kl": [1.0 if on else 0.0 for on in known],
        "ref": [max(FLOOR, score) if on else 0.0 for on, score in zip(known, each["scores"], strict=True)],
    }


def opd(group: Group) -> dict[str, list[Stream]]:
    return {one["id"]: [towards_scores(each) for each in one["samples"]] for one in group}


def opsd(group: Group) -> dict[str, Any]:
    """Who sees whom: each rollout the first of the best of its agent, where that is better than itself."""
    made: dict[str, Any] = {}
    for one in group:
        best = max(peers(group, one))
        shown = next(other for other in group if other["agent"] == one["agent"] and other["reward"] == best)
        context = shown["samples"][-1]["tokens"]
        made[one["id"]] = [
            {"shown": context, **towards_scores(each)}
            if one["reward"] < best and len(context) + len(each["tokens"]) <= ROOM
            else {}
            for each in one["samples"]
        ]
    return made


def sft(group: Group) -> dict[str, list[Stream]]:
    """Cross-entropy on what the teacher said in rollouts that got at least 0.5."""
    return {
        one["id"]: [
            {"ce": [float(on) for on in each["mask"]]} if one["reward"] >= 0.5 else {} for each in one["samples"]
        ]
        for one in group
    }


def main() -> None:
    rng = random.Random(1)
    groups = [
        group(rng, [""], 4, [1.0, 0.0, 0.0, 0.5]),
        group(rng, ["white", "black"], 3, [1.0, 0.0, 0.25, 0.75, 1.0, 0.5]),
        group(rng, ["proposer", "solver", "solver", "solver"], 3, [0.25, 1.0, 0.0, 0.0, 0.75, 1.0, 1.0, 0.5, 0.0]),
        group(rng, [""], 3, [0.0]),
    ]
    each = {"grpo": grpo, "max_rl": max_rl, "hierarchical_grpo": hierarchical, "echo": echo, "opd": opd, "opsd": opsd,
            "sft": sft}  # fmt: skip
    streams: dict[str, Any] = {name: [of(one) for one in groups] for name, of in each.items()}
    streams["rae"] = rae(groups)
    record = {"decay": DECAY, "echo_weight": ECHO_WEIGHT, "room": ROOM, "groups": groups, "streams": streams}
    (Path(__file__).parent / "streams.json").write_text(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
