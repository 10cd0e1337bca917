"""`eval` against the real engine: all checkpoints, stopped in the middle and gone on with; and against chat servers."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from http_servers import chat_answer, serving_http
from meshrl.core.config import ConfigError
from meshrl.core.telemetry.monitor import Monitor
from meshrl.eval.checkpoints import weights_to_evaluate
from meshrl.eval.config import EvaluationConfig
from meshrl.eval.program import Evaluation
from meshrl.sampling.groups import RolloutGroup
from meshrl.trials.plan import Trial
from meshrl.trials.results import TrialResults

pytestmark = pytest.mark.timeout(900)  # imports, on a machine that may be busy

TASKS, SIZE = 4, 2
HELD_OUT = {"id": "reverse_text", "name": "held_out", "args": {"split": "held_out"}}


def config_of(folder: Path, url: str, **more: Any) -> EvaluationConfig:
    options: dict[str, Any] = {
        "env": [HELD_OUT],
        "num_examples": TASKS,
        "group_size": SIZE,
        "sampling": {"max_tokens": 8, "temperature": 1.0},
        "client": {"base_url": [url], "probe_interval_s": 0.1},
        "workers": 0,
        "output_dir": folder,
        **more,
    }
    return EvaluationConfig.model_validate(options)


class Stopping(TrialResults):
    """Asks for the end once so many trials have ended."""

    def __init__(self, config: EvaluationConfig, after: int | None = None) -> None:
        super().__init__(config.output_dir, config.result_settings(), clean=config.clean_output_dir)
        self.stop = asyncio.Event()
        self.played: list[tuple[str, int, int]] = []
        self._after = after

    def record(self, checkpoint: str, trial: Trial, group: RolloutGroup) -> list[dict[str, Any]]:
        self.played.append((checkpoint, trial.task, trial.number))
        if len(self.played) == self._after:
            self.stop.set()
        return super().record(checkpoint, trial, group)


def work_of(config: EvaluationConfig) -> Any:
    weights = weights_to_evaluate(config.weights_dir, config.steps, base=config.eval_base)
    return Evaluation(
        weights,
        Monitor([]),
        loads=config.weights_dir is not None,
        pass_threshold=config.pass_threshold,
        bootstrap_samples=config.bootstrap_samples,
    ).run


async def test_an_evaluation_of_all_checkpoints_is_stopped_and_goes_on(
    models: Path, engine: str, tmp_path: Path, play: Any, read: Any
) -> None:
    def config(name: str) -> EvaluationConfig:
        more = {"model": {"name": str(models / "base")}, "weights_dir": models / "weights", "max_concurrent": 2}
        return config_of(tmp_path / name, engine, **more)

    begun = Stopping(config("halves"), after=TASKS * SIZE + 3)
    assert await play(config("halves"), begun, work_of(config("halves")), begun.stop) == 1
    first = read(tmp_path / "halves" / "results.jsonl")
    assert TASKS * SIZE < len(first) < 3 * TASKS * SIZE  # base is whole, step_1 is not
    resumed = Stopping(config("halves"))
    assert await play(config("halves"), resumed, work_of(config("halves"))) == 0
    rows = read(tmp_path / "halves" / "results.jsonl")
    wanted = {
        (name, task, number) for name in ("base", "step_1", "step_2") for task in range(TASKS) for number in (0, 1)
    }
    assert Counter((row["checkpoint"], row["task"], row["number"]) for row in rows) == Counter(wanted)
    assert rows[: len(first)] == first  # nothing is repeated
    assert set(resumed.played) == wanted - {(row["checkpoint"], row["task"], row["number"]) for row in first}
    assert len({row["rollout_id"] for row in rows}) == len(rows)
    assert {(row["checkpoint"], row["version"]) for row in rows} == {("base", 0), ("step_1", 1), ("step_2", 2)}

    whole = Stopping(config("whole"))
    assert await play(config("whole"), whole, work_of(config("whole"))) == 0
    said = [
        {(row["checkpoint"], row["task"], row["number"]): (row["completion"], row["reward"]) for row in each}
        for each in (rows, read(tmp_path / "whole" / "results.jsonl"))
    ]
    assert said[0] == said[1]  # the same seeds and weights say the same
    assert len({said[0][(name, 0, 0)][0] for name in ("base", "step_1", "step_2")}) == 3  # by three models
    for name in ("halves", "whole"):
        table = (tmp_path / name / "table.md").read_text()
        assert table == (tmp_path / "whole" / "table.md").read_text()
        assert [line.split()[1] for line in table.splitlines()[2:]] == ["base", "step_1", "step_2"]
        assert [record["step"] for record in read(tmp_path / name / "metrics.jsonl")] == [0.0, 1.0, 2.0]


async def test_an_engine_that_is_killed_ends_the_evaluation_with_its_cause_and_the_same_command_goes_on(
    models: Path, tmp_path: Path, play: Any, read: Any, said: list[str]
) -> None:
    tasks, engine = 24, {"max_model_len": 96, "max_num_seqs": 2, "torch_threads": 1}
    config = EvaluationConfig.model_validate(
        {
            "model": {"name": str(models / "base")},
            "inference": engine,
            "env": [HELD_OUT],
            "num_examples": tasks,
            "sampling": {"max_tokens": 8, "temperature": 1.0},
            "workers": 0,
            "output_dir": tmp_path,
        }
    )

    class Killing(Stopping):
        def record(self, checkpoint: str, trial: Trial, group: RolloutGroup) -> list[dict[str, Any]]:
            rows = super().record(checkpoint, trial, group)
            if len(self.played) == 3:
                (pid,) = (
                    int(match[1]) for line in said if (match := re.search(r"started inference \(pid (\d+)", line))
                )
                os.kill(pid, signal.SIGKILL)
            return rows

    assert await play(config, Killing(config), work_of(config)) == 1
    first = read(tmp_path / "results.jsonl")
    assert 3 <= len(first) < tasks
    assert any(line.startswith("inference died: was killed by SIGKILL (9)") for line in said)
    goes_on = f"failed with {len(first)} rollouts in {tmp_path / 'results.jsonl'}; the same command goes on from there"
    assert any(goes_on in line for line in said)

    assert await play(config, Stopping(config), work_of(config)) == 0
    rows = read(tmp_path / "results.jsonl")
    assert rows[: len(first)] == first
    assert sorted(row["task"] for row in rows) == list(range(tasks))
    assert len({row["rollout_id"] for row in rows}) == tasks


async def test_results_of_other_settings_are_not_gone_on_with(tmp_path: Path, play: Any, read: Any) -> None:
    config = config_of(tmp_path, "http://127.0.0.1:1")
    with Stopping(config):
        pass
    colder = config_of(tmp_path, "http://127.0.0.1:1", sampling={"max_tokens": 8, "temperature": 0.0})
    with pytest.raises(ConfigError, match=r"sampling.temperature was 1.0 and is 0.0\); choose another"):
        Stopping(colder).__enter__()
    anew = config_of(tmp_path, "http://127.0.0.1:1", sampling={"temperature": 0.0}, clean_output_dir=True)
    with Stopping(anew) as results:
        assert (results.done, read(tmp_path / "results.jsonl")) == (set(), [])


class ChatServer:
    """A server of /v1/chat/completions and nothing else. It refuses what `refused` says."""

    def __init__(self) -> None:
        self.keys: list[str] = []
        self.refused: set[str] = set()
        self.url = ""

    async def complete(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.keys.append(request.headers["Authorization"])
        text = body["messages"][-1]["content"]
        if text in self.refused:
            return web.json_response({"error": {"message": "not this one"}}, status=400)
        return chat_answer(body, {"content": text[::-1]})


@pytest.fixture
async def chat() -> AsyncIterator[ChatServer]:
    server = ChatServer()
    app = web.Application()
    app.router.add_post("/v1/chat/completions", server.complete)
    async with serving_http(app) as url:
        server.url = f"{url}/v1"
        yield server


async def test_a_foreign_server_is_recognised_and_what_failed_is_played_again(
    chat: ChatServer, tmp_path: Path, play: Any, read: Any, monkeypatch: pytest.MonkeyPatch, warned: list[str]
) -> None:
    from meshrl.environments.reverse_text.sentences import sentences

    monkeypatch.setenv("SOME_KEY", "secret-1")
    options = {"client": {"base_url": [chat.url], "api_key_var": "SOME_KEY"}, "model": {"name": "gpt-x"}}
    config = config_of(tmp_path, chat.url, **options)
    chat.refused = {sentences("held_out")[1]}
    first = Stopping(config)
    assert await play(config, first, work_of(config)) == 0
    assert set(chat.keys) == {"Bearer secret-1"}
    failures = read(tmp_path / "failures.jsonl")
    assert {(row["task"], row["number"]) for row in failures} == {(1, 0), (1, 1)}
    assert all("not this one" in row["error"] for row in failures)
    assert f"{TASKS * SIZE - SIZE}/{TASKS * SIZE}" in (tmp_path / "table.md").read_text()
    why = f"base: {SIZE} rollouts failed, {tmp_path / 'failures.jsonl'} says why; the same command plays them again"
    assert [line for line in warned if "the same command" in line] == [why]

    chat.refused = set()
    warned.clear()
    again = Stopping(config)
    assert await play(config, again, work_of(config)) == 0
    assert not [line for line in warned if "the same command" in line]
    assert sorted(again.played) == [("base", 1, 0), ("base", 1, 1)]
    rows = read(tmp_path / "results.jsonl")
    assert (len(rows), {row["reward"] for row in rows}) == (TASKS * SIZE, {1.0})
    metrics = read(tmp_path / "metrics.jsonl")[0]
    assert (metrics["eval/held_out/avg@2"], metrics["eval/held_out/pass@2"]) == (1.0, 1.0)


async def test_checkpoints_are_not_for_a_server_that_cannot_load_them(
    chat: ChatServer, models: Path, tmp_path: Path, play: Any, read: Any, caplog: pytest.LogCaptureFixture
) -> None:
    config = config_of(tmp_path, chat.url, weights_dir=models / "weights")
    assert await play(config, Stopping(config), work_of(config)) == 1
    assert read(tmp_path / "results.jsonl") == []
