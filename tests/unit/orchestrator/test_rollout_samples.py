"""Which rollouts of a step are kept to be read, and in how many bytes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard

from meshrl.algorithms.recipes.base import SampleStreams
from meshrl.orchestrator.config import RolloutSamplesConfig
from meshrl.orchestrator.reports.rollout_samples import RolloutSamplesWriter, chosen, within
from meshrl.orchestrator.work.batches import AssembledBatch, SubmittedStep, assemble
from meshrl.orchestrator.work.screening import StepTally
from meshrl.sampling.groups import GroupTicket, RolloutGroup, TaskRef
from meshrl.trainer.metrics import rollout_logprobs
from meshrl.wire.types import Batch, MessageSpan, Rollout, RolloutFailure, Sample, VersionSpan

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def rollout(rollout_id: str, reward: float, environment: str = "words") -> Rollout:
    mask = np.array([False, True, True])
    sample = Sample(
        token_ids=np.array([5, 6, 7], dtype=np.int32),
        loss_mask=mask,
        logprobs=np.array([0.0, -0.25, -1.0], dtype=np.float32),
        version_spans=(VersionSpan(start=1, end=3, version=4),),
        message_spans=(
            MessageSpan(start=0, end=1, role="user", text="say b"),
            MessageSpan(start=1, end=3, role="assistant", text="b"),
        ),
    )
    return Rollout(
        rollout_id=rollout_id,
        group_id=f"group of {environment}",
        task_key="1",
        environment=environment,
        samples=(sample,),
        reward=reward,
        reward_parts={"exact": reward},
        traceparent=TRACEPARENT,
    )


def group(rollouts: Sequence[Rollout], failures: Sequence[RolloutFailure] = ()) -> RolloutGroup:
    ticket = GroupTicket(
        group_id=rollouts[0].group_id,
        task=TaskRef(environment=rollouts[0].environment, index=9),
        size=len(rollouts) + len(failures),
        for_step=3,
        min_version=0,
        active_version=0,
        seed=None,
    )
    return RolloutGroup(ticket=ticket, rollouts=list(rollouts), failures=list(failures))


def submitted(trained: Sequence[RolloutGroup], discarded: Sequence[RolloutGroup] = (), step: int = 3) -> SubmittedStep:
    batch = Batch(run_id="main", step=step, micro_batches=(), loss_tokens=1, environments=("words",))
    return SubmittedStep(
        step=step,
        groups=tuple(replace(one, kept=tuple(one.rollouts)) for one in trained),
        assembled=AssembledBatch(
            batch=batch,
            advantages={"a0": -1.5},
            untrainable=frozenset(),
            truncated_samples=0,
            dropped_samples=0,
            dp_size=1,
        ),
        tally=StepTally(discarded=list(discarded)),
    )


def picks(step: SubmittedStep, **keys: Any) -> list[tuple[str, str]]:
    return [(line["picked"], line["rollout_id"]) for line in chosen(step, RolloutSamplesConfig(**keys), {})]


def test_the_worst_and_the_best_of_each_environment_are_kept_once() -> None:
    words = group([rollout(f"a{place}", place / 10) for place in range(6)])
    sums = group([rollout("b0", 1.0, "sums"), rollout("b1", 0.0, "sums")])
    assert picks(submitted([words, sums]), worst=1, best=2, random=0) == [
        ("worst", "a0"), ("worst", "b1"), ("best", "a5"), ("best", "a4"), ("best", "b0"),
    ]  # fmt: skip


def test_those_drawn_by_chance_are_the_same_each_time_and_none_twice() -> None:
    step = submitted([group([rollout(f"a{place}", place / 10) for place in range(9)])])
    drawn = picks(step, worst=1, best=1, random=3)
    assert drawn == picks(step, worst=1, best=1, random=3)
    assert len({rollout_id for _, rollout_id in drawn}) == 5
    assert len(picks(step, worst=1, best=1, random=100)) == 9


def test_dropped_rollouts_and_every_failure_are_among_them() -> None:
    failure = RolloutFailure(
        rollout_id="f0", group_id="group of words", reason="ENVIRONMENT_FAILED", message="KeyError: 'x'", retryable=True
    )
    step = submitted([group([rollout("a0", 0.0)], [failure])], discarded=[group([rollout("d0", 1.0)])])
    lines = list(chosen(step, RolloutSamplesConfig(worst=1, best=1, random=0), {}))
    assert [(line["picked"], line["rollout_id"]) for line in lines] == [
        ("failed", "f0"), ("worst", "a0"), ("best", "d0"),
    ]  # fmt: skip
    assert (lines[0]["task_index"], lines[0]["message"]) == (9, "KeyError: 'x'")
    assert (lines[1]["advantage"], lines[2]["advantage"]) == (-1.5, None)


def test_a_line_has_what_was_said_and_every_token() -> None:
    (line,) = chosen(submitted([group([rollout("a0", 0.5)])]), RolloutSamplesConfig(best=0, worst=1, random=0), {})
    (sample,) = line["samples"]
    assert sample["token_ids"] == [5, 6, 7]
    assert sample["logprobs"] == [None, -0.25, -1.0]
    assert sample["versions"] == [[1, 3, 4]]
    assert sample["messages"] == [
        {"role": "user", "text": "say b", "tokens": [0, 1]},
        {"role": "assistant", "text": "b", "tokens": [1, 3]},
    ]
    assert line["trace_id"] == "0af7651916cd43dd8448eb211c80319c"


def test_a_reward_that_is_no_number_is_the_worst_and_null_in_the_file() -> None:
    step = submitted([group([rollout("a0", 0.5), rollout("a1", float("nan")), rollout("a2", -3.0)])])
    assert picks(step, worst=1, best=1, random=0) == [("worst", "a1"), ("best", "a0")]
    (worst,) = chosen(step, RolloutSamplesConfig(worst=1, best=0, random=0), {})
    assert (worst["reward"], worst["reward_parts"]) == (None, {"exact": None})


def of_turns(rollout_id: str, reward: float, *turns: Sequence[int], group_id: str = "g") -> Rollout:
    """A rollout of a sample a turn: two tokens of a prompt that all share, then what was sampled."""
    samples = tuple(
        Sample(
            token_ids=np.array([1, 2, *turn], dtype=np.int32),
            loss_mask=np.array([False, False, *(True for _ in turn)]),
            logprobs=np.full(len(turn) + 2, -0.5, dtype=np.float32),
            version_spans=(VersionSpan(start=2, end=len(turn) + 2, version=4),),
        )
        for turn in turns
    )
    return replace(rollout(rollout_id, reward), samples=samples, group_id=group_id)


@pytest.mark.parametrize("min_shared_prefix", [None, 0.0])
@pytest.mark.parametrize("dp_size", [1, 2, 3])
def test_those_that_trained_have_the_trainers_logprob_of_each_token_however_they_were_packed(
    dp_size: int, min_shared_prefix: float | None
) -> None:
    rollouts = [of_turns(f"a{n}", n / 10, [10 * n + 11, 10 * n + 12], [10 * n + 13, 10 * n + 14]) for n in range(6)]
    assembled = assemble(
        [rollouts],
        run_id="main",
        step=3,
        streams={one.rollout_id: [SampleStreams(advantage=1.0)] * 2 for one in rollouts},
        environments={"words": 3 if dp_size == 3 else 16},  # 3: the last token of each sample is cut off
        seq_len=16,
        dp_size=dp_size,
        min_shared_prefix=min_shared_prefix,
    )
    step = replace(submitted([group(rollouts)], [group([rollout("d0", -1.0)])]), assembled=assembled)
    config = RolloutSamplesConfig(worst=2, best=1, random=1)
    writer = RolloutSamplesWriter(config, Path("unused"))
    asked = writer.request_logprobs(step)
    batch = asked.assembled.batch
    assert len(batch.logprob_rollouts) == 3  # one of the worst trained nothing
    assert {"a0", "a5"} < set(batch.logprob_rollouts)
    ranks = [row for rank in range(dp_size) for row in batch.micro_batches if row.dp_rank == rank]
    gathered = np.concatenate([row.token_ids[row.loss_mask] for row in ranks]) / np.float32(-1000)
    given = rollout_logprobs(batch, gathered.astype(np.float32))
    assert set(given) == set(batch.logprob_rollouts)
    lines = list(chosen(asked, config, given))
    assert [("trainer_logprobs" in line["samples"][0]) for line in lines] == [False, True, True, True]
    for line in lines[1:]:
        for sample in line["samples"]:
            expected = [None, None, *(-token / 1000 for token in sample["token_ids"][2:])]
            assert sample["trainer_logprobs"] == (expected if dp_size < 3 else [*expected[:3], None])
    short = {key: values[1:] for key, values in given.items()}  # not one for each token
    assert not any("trainer_logprobs" in line["samples"][0] for line in chosen(asked, config, short))


def test_a_trainer_gives_what_fits_and_nothing_unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    rollouts = [of_turns("long", 0.0, [5, 6, 7]), of_turns("short", 1.0, [8])]
    streams = {one.rollout_id: [SampleStreams(advantage=1.0)] for one in rollouts}
    batch = assemble(
        [rollouts], run_id="main", step=3, streams=streams, environments={"words": 8}, seq_len=16, dp_size=1
    ).batch
    values = np.array([-5, -6, -7, -8], dtype=np.float32)
    assert rollout_logprobs(batch, values) == {}
    asking = replace(batch, logprob_rollouts=("long", "short", "unknown"))
    assert {key: len(found) for key, found in rollout_logprobs(asking, values).items()} == {"long": 3, "short": 1}
    monkeypatch.setattr("meshrl.trainer.metrics.MAX_BYTES", 8)
    assert set(rollout_logprobs(asking, values)) == {"short"}


def test_files_of_steps_that_are_not_of_the_run_are_set_aside(tmp_path: Path) -> None:
    names = [f"step_{step}.jsonl.zst" for step in (12, 4, "mine")]
    for name in names:
        (tmp_path / name).touch()
    RolloutSamplesWriter(RolloutSamplesConfig(), tmp_path).set_aside_after(4)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([f"superseded_{names[0]}", *names[1:]])


def test_a_step_takes_no_more_bytes_than_it_may() -> None:
    lines = [{"text": "x" * length} for length in (10, 1000, 20)]
    assert [len(written) for written in within(lines, 60)] == [22, 32]


def test_a_file_holds_the_step_and_a_full_disk_is_said_once(tmp_path: Path, warned: list[str]) -> None:
    step = submitted([group([rollout("a0", 0.5), rollout("a1", 1.0)])], step=4)
    RolloutSamplesWriter(RolloutSamplesConfig(interval=3), tmp_path / "rollouts").write(step, {})
    assert not (tmp_path / "rollouts").exists()  # step 4 is none of every three
    RolloutSamplesWriter(RolloutSamplesConfig(interval=2), tmp_path / "rollouts").write(step, {})
    packed = (tmp_path / "rollouts/step_4.jsonl.zst").read_bytes()
    lines = zstandard.ZstdDecompressor().decompress(packed).decode().splitlines()
    assert [json.loads(line)["rollout_id"] for line in lines] == ["a0", "a1"]

    (tmp_path / "file").touch()
    blocked = RolloutSamplesWriter(RolloutSamplesConfig(), tmp_path / "file")
    blocked.write(step, {})
    blocked.write(step, {})
    (line,) = warned
    assert "no rollouts are kept to be read" in line


@pytest.mark.parametrize("keys", [{"interval": 0}, {"best": -1}, {"max_mib": 0.0}])
def test_senseless_keys_are_refused(keys: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="greater than"):
        RolloutSamplesConfig(**keys)
