"""The server of `meshrl ui` over a folder made here: what it answers, to whom, and how it follows a run."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import zstandard
from aiohttp import ClientSession, CookieJar
from aiohttp.test_utils import TestClient, TestServer
from click.testing import CliRunner

from made_run import add_ledger, add_span, add_step, add_version, make_run, rollout
from meshrl.cli.main import main
from meshrl.cli.run_folder import RunFolder
from meshrl.cli.trace_file import read_lines
from meshrl.cli.ui import views
from meshrl.cli.ui.command import runs_in
from meshrl.cli.ui.server import Page, ShownRun, serve
from meshrl.diagnosis.history import MetricsHistory


@pytest.fixture
def run_path(tmp_path: Path) -> Path:
    return make_run(tmp_path / "run", steps=10)


async def client_of(path: Path, **guard: object) -> TestClient:
    app = Page([RunFolder(path)]).application(**{"hosts": None, "token": None, **guard})
    client = TestClient(TestServer(app), cookie_jar=CookieJar(unsafe=True))  # of addresses without a name, too
    await client.start_server()
    return client


@pytest.fixture
async def client(run_path: Path) -> AsyncIterator[TestClient]:
    client = await client_of(run_path)
    yield client
    await client.close()


def test_points_are_the_means_of_equal_stretches(run_path: Path) -> None:
    history = MetricsHistory(run_path / "metrics.jsonl")
    assert history.read_on()
    assert history.points(["reward/all/mean", "nobody/wrote/it"], 5) == {
        "reward/all/mean": ([2, 4, 6, 8, 10], pytest.approx([0.15, 0.35, 0.55, 0.75, 0.95]), [2, 4, 6, 8, 10])
    }
    assert history.points(["reward/all/mean"], 5, "time")["reward/all/mean"][0] == [2, 4, 6, 8, 10], "steps of 1 s"
    assert history.points(["reward/all/mean"], 5, "tokens")["reward/all/mean"][0] == [0.0] * 5, "nobody counted them"
    assert history.points(["reward/all/mean"], 100)["reward/all/mean"][0] == list(range(1, 11))
    assert not history.read_on()


def test_a_file_is_read_whole_in_pieces_that_cut_its_lines(run_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshrl.wire.growing_file._READ_BYTES", 7)
    history = MetricsHistory(run_path / "metrics.jsonl")
    assert history.read_on()
    assert history.points(["time/step"], 100) == {"time/step": (list(range(1, 11)), [1.0] * 10, list(range(1, 11)))}
    assert not history.read_on()


def test_a_half_written_line_is_read_when_it_is_whole_and_a_new_file_anew(run_path: Path) -> None:
    path = run_path / "metrics.jsonl"
    history = MetricsHistory(path)
    history.read_on()
    line = json.dumps({"step": 11, "reward/all/mean": 1.1, "time/step": 1.0}) + "\n"
    for part in (line[:20], line[20:]):
        with path.open("a") as file:
            file.write(part)
        history.read_on()
    assert history.last is not None
    assert history.last["step"] == 11
    path.write_text(json.dumps({"step": 1, "time/step": 1.0}) + "\n")
    assert history.read_on()
    assert (history.last["step"], history.names) == (1, ["time/step"])


async def test_a_run_that_died_has_when_and_why_with_the_end_of_the_log(client: TestClient, run_path: Path) -> None:
    assert (await (await client.get("/api/runs/0/now")).json())["end"] is None
    (run_path / "logs").mkdir()
    lines = ["2026-11-23T03:47:00.000 INFO    rl started trainer (pid 7)",
             "2026-11-23T03:48:33.991 ERROR   rl trainer died: was killed by SIGKILL. Ending all other programs. Last",
             "    2026-11-23T03:48:32.919 INFO    trainer step 7",
             "2026-11-23T03:48:35.544 INFO    rl the run failed"]  # fmt: skip
    (run_path / "logs/rl.log").write_text("".join(f"{line}\n" for line in lines))
    end = RunFolder(run_path).end()
    assert end is not None
    assert (end.program, end.at, end.why) == (
        "trainer",
        "2026-11-23T03:48:33.991",
        "trainer died: was killed by SIGKILL",
    )
    assert "trainer step 7" in end.log
    (row,) = await (await client.get("/api/runs")).json()
    assert (row["live"], row["ended_by"], row["step"]) == (False, "trainer died: was killed by SIGKILL", 10)


async def test_the_doctor_the_differences_and_words_are_asked_for_by_address(
    client: TestClient, run_path: Path
) -> None:
    assert await (await client.get("/api/runs/0/doctor")).json() == []
    found = await (await client.get("/api/runs/0/rollouts?step=4&words=GOOD")).json()
    assert [row["rollout_id"] for row in found["rollouts"]] == ["best-4"]
    (run_path / "configs/trainer.toml").write_text("[optim]\nlr = 0.1\n[server]\nport = 1\n")
    assert await (await client.get("/api/differences?runs=0,0")).json() == []
    other = {"trainer.optim.lr": "0.2", "trainer.server.port": "2"}
    found = views.differences([RunFolder(run_path).settings(), other])
    assert found == [{"key": "trainer.optim.lr", "values": ["0.1", "0.2"]}]


def test_runs_are_found_below_a_folder(tmp_path: Path) -> None:
    make_run(tmp_path / "all/a/rl", steps=1)
    make_run(tmp_path / "all/b", steps=1)
    assert runs_in(tmp_path / "all") == [tmp_path / "all/a/rl", tmp_path / "all/b"]
    assert runs_in(tmp_path / "all/b") == [tmp_path / "all/b"]
    (tmp_path / "all/b/run_one/configs").mkdir(parents=True)
    assert runs_in(tmp_path / "all/b") == [tmp_path / "all/b", tmp_path / "all/b/run_one"]


async def test_the_page_and_what_it_asks_for(client: TestClient) -> None:
    assert "<title>meshrl</title>" in await (await client.get("/")).text()
    for name in ("app.js", "style.css", "uPlot.iife.min.js"):
        assert (await client.get(f"/static/{name}")).status == 200
    (run,) = await (await client.get("/api/runs")).json()
    assert run["live"] is False
    found = await (await client.get("/api/runs/0/rollouts")).json()
    assert (found["step"], found["steps"]) == (10, list(range(1, 11)))
    assert [(row["picked"], row["reward"], row["says"]) for row in found["rollouts"]] == [
        ("worst", 0.0, "<img src=x onerror=alert(1)>"), ("best", 1.0, "good 10"),
    ]  # fmt: skip
    whole = await (await client.get(f"/api/runs/0/rollouts/10/{found['rollouts'][1]['rollout_id']}")).json()
    assert whole["first"] == {
        "token_ids": [1, 2, 3, 4],
        "logprobs": [None, None, -0.5, -0.5],
        "trainer_logprobs": [None, None, -0.48, -0.7],
        "pieces": None,
    }
    assert (whole["samples"][0]["compared"], "token_ids" in whole["samples"][0]) == (True, False)
    timeline = await (await client.get("/api/runs/0/timeline?step=3")).json()
    assert timeline["seconds"] == pytest.approx(9.0)
    assert {name: [span["name"] for span in lane] for name, lane in timeline["lanes"].items()} == {
        "orchestrator": ["rl.step"], "trainer": ["rl.train"],
    }  # fmt: skip
    assert (await (await client.get("/api/runs/0/ledger")).json())["rows"] == []


@pytest.mark.parametrize(
    ("address", "status", "words"),
    [
        ("/api/runs/1/now", 404, "no run 1; there are 1"),
        ("/api/runs/x/now", 404, "no run x"),
        ("/api/runs/0/rollouts?step=last", 400, "step must be a whole number, got 'last'"),
        ("/api/runs/0/rollouts/10/nobody", 404, "no rollout nobody is kept of step 10"),
        (f"/api/runs/{'9' * 5000}/now", 404, "no run 999"),
        (f"/api/runs/0/rollouts/{'9' * 300}/nobody", 404, "no rollout nobody is kept of step 999"),
        (f"/api/runs/0/rollouts/{'9' * 5000}/nobody", 404, "no rollout nobody is kept of step 999"),
        (f"/api/runs/0/rollouts?step={'9' * 5000}", 200, '"rollouts": []'),
        ("/api/runs/0/timeline?step=99", 404, "no trace of step 99; the last one is of step 3"),
        ("/static/../server.py", 404, ""),
    ],
)
async def test_what_is_not_there_is_said(client: TestClient, address: str, status: int, words: str) -> None:
    answer = await client.get(address)
    assert answer.status == status
    assert words in await answer.text()
    assert "script-src 'self'" in answer.headers["Content-Security-Policy"]


@pytest.mark.parametrize(
    ("name", "address"), [("ledger.sqlite", "ledger"), ("rollouts/step_10.jsonl.zst", "rollouts?step=10")]
)
async def test_a_damaged_file_is_named_in_a_sentence(
    client: TestClient, run_path: Path, name: str, address: str
) -> None:
    (run_path / name).write_bytes(b"damaged" * 1000)
    answer = await client.get(f"/api/runs/0/{address}")
    assert answer.status == 503
    said = await answer.text()
    assert said.startswith(f"the files of {run_path} cannot be read: ")
    assert len(said.splitlines()) == 1


async def test_a_page_elsewhere_cannot_read_it_under_a_name_of_its_own(run_path: Path) -> None:
    client = await client_of(run_path, hosts=frozenset({"127.0.0.1:1"}))
    assert (await client.get("/api/runs", headers={"Host": "rebound.example"})).status == 403
    assert (await client.get("/api/runs", headers={"Host": "127.0.0.1:1"})).status == 200
    await client.close()


async def test_off_loopback_every_request_needs_the_token_which_becomes_a_cookie(run_path: Path) -> None:
    client = await client_of(run_path, token="secret")
    for address in ("/", "/api/runs", "/static/app.js", "/?token=guess", "/?token=%C3%BC"):
        assert (await client.get(address)).status == 401
    assert not list(client.session.cookie_jar)
    assert (await client.get("/?token=secret")).status == 200
    assert (await client.get("/api/runs")).status == 200
    await client.close()


async def test_events_tell_of_every_growth_and_end_with_the_server(
    client: TestClient, run_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meshrl.cli.ui.server.REST_S", 0.05)
    async with client.get("/api/runs/0/events") as answer, asyncio.timeout(60.0):
        seen = []
        while len(seen) < 2:
            line = (await answer.content.readline()).decode()
            if line.startswith("data: "):
                seen.append(int(line[6:]))
                add_step(run_path, 11)
        assert seen[1] > seen[0]
        await client.server.close()
        await answer.content.read()  # to its end


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["ui", str(tmp_path)])
    assert result.exit_code == 1
    assert "holds no run: name the output folder of one" in result.output


async def test_tokens_come_with_what_they_say_where_the_vocabulary_is_here(
    run_path: Path, client: TestClient, tmp_path: Path
) -> None:
    without = await (await client.get("/api/runs/0/rollouts/3/best-3")).json()
    assert without["first"]["pieces"] is None
    vocabulary = {"Hi": 1, "\u0120you": 2, "\u010a": 3}  # Ġ is a space and Ċ a line feed in byte-level vocabularies
    tokenizer = {
        "model": {"type": "BPE", "vocab": vocabulary}, "decoder": {"type": "ByteLevel"}, "pre_tokenizer": None,
        "added_tokens": [{"id": 4, "content": "<|end|>"}],
    }  # fmt: skip
    (tmp_path / "model").mkdir()
    (tmp_path / "model/tokenizer.json").write_text(json.dumps(tokenizer))
    (run_path / "configs/rollout.toml").write_text(f'[model]\nname = "{tmp_path / "model"}"\n')
    again = await client_of(run_path)
    found = await (await again.get("/api/runs/0/rollouts/3/best-3")).json()
    await again.close()
    assert found["first"]["pieces"] == ["Hi", " you", "\n", "<|end|>"]


@pytest.mark.parametrize(
    "tokenizer",
    [
        {"model": None, "added_tokens": []},
        {"model": {"vocab": {"a": 0}}, "added_tokens": 5},
        {"model": {"vocab": [[]]}},
        [],
    ],
)
async def test_tokens_come_without_what_they_say_where_the_tokenizer_is_of_another_kind(
    run_path: Path, tmp_path: Path, tokenizer: object
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model/tokenizer.json").write_text(json.dumps(tokenizer))
    (run_path / "configs/rollout.toml").write_text(f'[model]\nname = "{tmp_path / "model"}"\n')
    client = await client_of(run_path)
    answer = await client.get("/api/runs/0/rollouts/3/best-3")
    assert (answer.status, (await answer.json())["first"]["pieces"]) == (200, None)
    await client.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
async def test_a_free_port_is_taken_at_either_kind_of_loopback(run_path: Path, host: str) -> None:
    ready: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    serving = asyncio.create_task(serve([RunFolder(run_path)], host=host, port=0, token=None, ready=ready.set_result))
    await asyncio.wait({serving, ready}, return_when=asyncio.FIRST_COMPLETED, timeout=60.0)
    assert ready.done(), serving
    url = f"http://{f'[{host}]' if ':' in host else host}:{ready.result()}/api/runs"
    async with ClientSession() as session, session.get(url) as answer:
        assert answer.status == 200
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)


async def test_tokens_of_a_long_rollout_come_window_by_window(run_path: Path) -> None:
    with zstandard.open(run_path / "rollouts/step_4.jsonl.zst", "wt", encoding="utf-8") as lines:
        lines.write(json.dumps(rollout(4, "long", 0.5, "long", tokens=2500)) + "\n")
    client = await client_of(run_path)
    whole = await (await client.get("/api/runs/0/rollouts/4/long-4")).json()
    assert (whole["window"], whole["first"]["token_ids"]) == (1024, list(range(1, 1025)))
    last = await (await client.get("/api/runs/0/rollouts/4/long-4/tokens?window=2")).json()
    assert last["token_ids"] == list(range(2049, 2501))
    assert {len(values) for values in last.values() if values} == {452}
    missing = await client.get("/api/runs/0/rollouts/4/long-4/tokens?sample=1")
    assert (missing.status, await missing.text()) == (404, "no sample 1; there are 1")
    await client.close()


async def test_versions_are_anchors_and_deltas_with_the_engines_that_took_them(
    run_path: Path, client: TestClient
) -> None:
    add_version(run_path, 7, {"e0": 0.1, "e1": 2.6})
    add_version(run_path, 8, {"e0": 0.1}, base=7)
    found = await (await client.get("/api/runs/0/versions")).json()
    assert found["engines"] == ["e0", "e1"]
    delta, anchor = found["versions"]
    assert {"version": 8, "kind": "delta", "base": 7, "bytes": 80_000, "full_bytes": 8_000_000}.items() <= delta.items()
    assert (anchor["version"], anchor["kind"], anchor["lag"]) == (7, "full", pytest.approx(0.5))
    assert anchor["engines"]["e1"] == {"pause": 0.125, "at": pytest.approx(72.6), "after": pytest.approx(2.5)}
    assert delta["engines"].keys() == {"e0"}


def test_of_many_versions_the_newest_are_kept_in_whatever_order_files_are_read(
    run_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(views, "KEPT_VERSIONS", 5)
    for version in range(1, 31):
        add_version(run_path, version, {"e0": 0.1})
    traces = views.Traces(RunFolder(run_path))
    traces.read_on()
    found = traces.versions(5)["versions"]
    assert [(one["version"], one["bytes"], *one["engines"]) for one in found] == [
        (version, 8_000_000, "e0") for version in range(30, 25, -1)
    ]


async def test_each_engine_has_a_lane_of_its_own_in_the_timeline(run_path: Path, client: TestClient) -> None:
    add_version(run_path, 10, {"e0": 1.0, "e1": 2.0})
    lanes = (await (await client.get("/api/runs/0/timeline?step=3")).json())["lanes"]
    assert {name: [span["name"] for span in lane] for name, lane in lanes.items() if name.startswith("engine")} == {
        "engine e0": ["rl.sync.apply"], "engine e1": ["rl.sync.apply"],
    }  # fmt: skip


async def test_of_long_traces_the_ends_are_read_and_older_steps_when_they_are_asked_for(
    run_path: Path, client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in range(4, 400):
        add_span(run_path, "orchestrator", "rl.step", 100.0 + 10.0 * step, 9.0, {"rl.step": step})
        add_span(run_path, "rollout", "rl.rollout", 101.0 + 10.0 * step, 3.0, {})
    monkeypatch.setattr(views, "NEWEST_BYTES", 60_000)
    monkeypatch.setattr(views, "LEAST_BYTES", 1_000)
    newest = await (await client.get("/api/runs/0/timeline?step=399")).json()
    assert (newest["steps"], [*newest["lanes"]]) == ([1, 399], ["orchestrator", "rollout"])
    traces = views.Traces(RunFolder(run_path))
    traces.read_on()
    assert 300 < traces.steps[0] < 399
    for step in (3, traces.steps[0] - 1):
        older = await (await client.get(f"/api/runs/0/timeline?step={step}")).json()
        assert (older["step"], older["seconds"]) == (step, pytest.approx(9.0))
        assert older["lanes"].keys() == {"orchestrator", "trainer" if step == 3 else "rollout"}
    missing = await client.get("/api/runs/0/timeline?step=1000")
    assert (missing.status, await missing.text()) == (404, "no trace of step 1000; the last one is of step 399")


async def test_rollouts_of_an_environment_are_counted_by_what_became_of_them_and_lately(
    run_path: Path, client: TestClient
) -> None:
    add_ledger(run_path, [("made", "trained", "", 100.0 + second) for second in range(100)])
    found = await (await client.get("/api/runs/0/ledger")).json()
    assert found == {
        "rows": [{"environment": "made", "state": "trained", "reason": "", "count": 100, "lately": 60}], "over_s": 60.0,
    }  # fmt: skip


async def test_rollouts_that_came_to_their_state_at_once_are_counted_over_the_time_since_the_run_began(
    run_path: Path, client: TestClient
) -> None:
    add_ledger(run_path, [("made", "trained", "", 100.0 + 0.001 * part) for part in range(2)], began_s=96.0)
    found = await (await client.get("/api/runs/0/ledger")).json()
    assert (found["over_s"], found["rows"][0]["lately"]) == (pytest.approx(4.001), 2)


def test_traces_that_are_moved_aside_while_they_are_read_are_read_the_next_time(
    run_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def moved_first(path: Path, begin: int = 0) -> tuple[list[bytes], int]:
        path.rename(path.with_name(path.name.replace(".jsonl", ".1.jsonl")))
        return read_lines(path, begin)

    traces, untroubled = views.Traces(RunFolder(run_path)), views.Traces(RunFolder(run_path))
    untroubled.read_on()
    monkeypatch.setattr(views, "read_lines", moved_first)
    traces.read_on()
    assert traces.steps == []
    monkeypatch.undo()
    traces.read_on()
    assert traces.steps == untroubled.steps != []


async def test_a_request_that_is_cancelled_leaves_no_two_readings_of_the_same_files(tmp_path: Path) -> None:
    run = ShownRun(RunFolder(tmp_path))
    began, go_on = threading.Event(), threading.Event()
    reading, most = 0, 0

    def read() -> None:
        nonlocal reading, most
        reading += 1
        most = max(most, reading)
        began.set()
        assert go_on.wait(60.0)
        reading -= 1

    first = asyncio.create_task(run.read(read))
    assert await asyncio.to_thread(began.wait, 60.0)
    first.cancel()  # the page is gone
    second = asyncio.create_task(run.read(read))
    with pytest.raises(asyncio.CancelledError):
        await first
    await asyncio.sleep(0.1)  # in which the second would begin
    go_on.set()
    await asyncio.wait_for(second, 60.0)
    assert (most, reading) == (1, 0)
