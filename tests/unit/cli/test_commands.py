"""The commands on folders made here: what they print, their exit codes, and their words when they cannot."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import socket
import sqlite3
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import jsonschema
import pytest
from click.testing import CliRunner, Result
from packaging.specifiers import SpecifierSet

from meshrl.cli import versions
from meshrl.cli.command import ago, print_json
from meshrl.cli.doctor import examine
from meshrl.cli.main import main
from meshrl.cli.run_folder import RunFolder
from meshrl.cli.status import RunStatus, ServiceRow, status_schema
from meshrl.client.authority import Authority
from meshrl.client.trust import Role
from meshrl.orchestrator.ledger.rows import SCHEMA
from meshrl.wire.errors import FieldViolation, invalid
from meshrl.wire.program_state import ProgramState, WaitState
from meshrl.wire.types import AgentState


def meshrl(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


def examined(folder: Path, what: str) -> dict[str, str]:
    """What the doctor finds of one thing."""
    result = meshrl("doctor", "--json", "-o", str(folder))
    findings = json.loads(result.output)
    assert result.exit_code == (1 if "fail" in [finding["state"] for finding in findings] else 0)
    (found,) = [finding for finding in findings if finding["what"] == what]
    return found


def span(name: str, span_id: str, start_s: float, seconds: float, parent_id: str = "", **more: Any) -> dict[str, Any]:
    return {
        "name": name,
        "traceId": "a" * 32,
        "spanId": span_id,
        "parentSpanId": parent_id,
        "startTimeUnixNano": str(round(start_s * 1e9)),
        "endTimeUnixNano": str(round((start_s + seconds) * 1e9)),
        **more,
    }


@pytest.fixture
def traced(tmp_path: Path) -> Path:
    step = [{"key": "rl.step", "value": {"intValue": "3"}}]
    programs = {
        "orchestrator": [span("rl.step", "01", 100.0, 9.0, attributes=step)],
        "rollout": [span("rl.rollout", "02", 101.0, 4.0, "01"), span("rl.rollout", "03", 102.0, 5.0, "01")],
        "trainer": [span("rl.train", "04", 107.0, 1.0, "01", links=[{"spanId": "02"}, {"spanId": "03"}])],
    }
    (tmp_path / "traces").mkdir()
    for program, spans in programs.items():
        line = json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": spans}]}]})
        (tmp_path / "traces" / f"{program}.jsonl").write_text(f'{line}\n{{"resourceSp')
    return tmp_path


def test_a_rollout_and_its_trace_are_found_either_way(traced: Path) -> None:
    with closing(sqlite3.connect(traced / "ledger.sqlite")) as ledger, ledger:
        ledger.executescript(SCHEMA)
        row = "INSERT INTO rollouts VALUES (?, 1, 'g', 'echo', 0, 3, 'trained', ?, 2, 3, '', 0, ?)"
        ledger.executemany(row, [("g/0", "5eed", "a" * 32), ("g/1", "0ther", "b" * 32), ("g/2", "01d", "")])
    by_rollout = meshrl("trace", "show", "5ee", "--json", "-o", str(traced))
    assert by_rollout.exit_code == 0, by_rollout.output
    assert [each["span_id"] for each in json.loads(by_rollout.output)] == ["01", "02", "03", "04"]
    assert meshrl("trace", "show", "aaaa", "--json", "-o", str(traced)).output == by_rollout.output
    by_trace = json.loads(meshrl("rollouts", "show", "aaaa", "--json", "-o", str(traced)).output)
    assert (by_trace["rollout_id"], by_trace["trace_id"]) == ("5eed", "a" * 32)
    nothing = meshrl("rollouts", "tail", "--state", "failed", "-o", str(traced)).output
    assert nothing.split() == ["ROLLOUT", "ENVIRONMENT", "TASK", "STATE", "STEP", "VERSION", "AGO", "REASON"]
    assert "no span of '0ther'" in meshrl("trace", "show", "0ther", "-o", str(traced)).output
    with closing(sqlite3.connect(traced / "ledger.sqlite")) as ledger, ledger:  # as another version writes it
        ledger.execute("ALTER TABLE rollouts DROP COLUMN trace_id")
    refused = meshrl("rollouts", "tail", "-o", str(traced))
    assert refused.exit_code == 1
    assert "is it a ledger of this version of meshrl?" in refused.output
    assert len(refused.output.splitlines()) == 1


def test_help_lists_every_command_and_each_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = meshrl("--help").output
    for name in ("call", "doctor", "envs", "logs", "rollouts", "status", "trace", "trainer", "ui", "watch", "weights"):
        assert f"\n  {name} " in listed
        assert meshrl(name, "--help").exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("stats",), "Error: No such command 'stats'; see main --help"),
        (("weights", "delete"), "Error: No such command 'delete'; see main weights --help"),
        (("conformance",), "Error: Missing option '--address'; see main conformance --help"),
        (
            ("watch", "--count", "0"),
            "Error: Invalid value for '--count': 0 is not in the range x>=1; see main watch --help",
        ),
    ],
)
def test_a_wrong_command_line_is_one_line_that_says_where_help_is(arguments: tuple[str, ...], line: str) -> None:
    result = meshrl(*arguments)
    assert result.exit_code == 2
    assert result.output == f"{line}\n"


@pytest.mark.parametrize(
    "arguments",
    [("weights", "engines"), ("weights", "list"), ("call", "weights", "ListEngines")],
)
def test_a_service_that_does_not_answer_is_one_line_with_a_remedy(
    arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(versions, "REACH_S", 0.2)
    result = meshrl(*arguments, "--address", "127.0.0.1:1")
    assert result.exit_code == 1
    assert result.output.startswith("Error: UNREACHABLE: ipv4:127.0.0.1:1: ")
    assert result.output.endswith("; start the service, or name another with --address, or its run's folder with -o\n")
    assert len(result.output.splitlines()) == 1


def test_numbers_that_json_does_not_have_are_null(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"lag_s": float("nan"), "rows": [{"best": float("inf"), "worst": -0.5}]})
    assert json.loads(capsys.readouterr().out) == {"lag_s": None, "rows": [{"best": None, "worst": -0.5}]}


def fields_of(kind: type) -> set[str]:
    return {one.name for one in dataclasses.fields(kind)}


def test_the_schema_of_the_status_has_its_fields_and_its_states() -> None:
    schema = json.loads(meshrl("status", "--schema").output)
    jsonschema.Draft202012Validator.check_schema(schema)
    rows, program, wait = (schema["$defs"][name]["properties"] for name in ("row", "program", "wait"))
    assert schema["properties"].keys() == fields_of(RunStatus) | {"well"}
    assert rows.keys() == fields_of(ServiceRow)
    assert program.keys() == fields_of(ProgramState)
    assert wait.keys() == fields_of(WaitState)
    assert {state.value for state in AgentState} <= set(rows["state"]["enum"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("rollouts", "tail"), "has no ledger.sqlite: name a run's output folder with -o"),
        (("trace", "slowest"), "has no traces: name a run's output folder with -o"),
        (("logs",), "has no logs: name a run's output folder with -o"),
        (("weights", "engines"), "names no address of `weights`"),
        (("call", "trainer", "GetTrainer"), "names no address of `trainer`"),
        (("status",), "holds no run: name its output folder with -o"),
    ],
)
def test_a_folder_without_a_run_is_one_line_with_a_remedy(
    tmp_path: Path, arguments: tuple[str, ...], words: str
) -> None:
    result = meshrl(*arguments, "-o", str(tmp_path))
    assert result.exit_code == 1
    assert words in result.output
    assert len(result.output.splitlines()) == 1


def test_a_service_that_is_gone_is_a_row(tmp_path: Path) -> None:
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs/trainer.toml").write_text('[server]\nhost = "127.0.0.1"\nport = 1\n')
    result = meshrl("status", "--json", "-o", str(tmp_path))
    assert result.exit_code == 1
    status = json.loads(result.output)
    jsonschema.validate(status, json.loads(status_schema()))
    (row,) = status["rows"]
    assert (row["service"], row["address"], row["state"]) == ("trainer", "127.0.0.1:1", "not answering")
    assert row["detail"] == "Connection refused"


def test_a_key_without_a_value_names_no_address(tmp_path: Path) -> None:
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs/orchestrator.toml").write_text('exchange = "None"\n[services]\nweights = "None"\n')
    folder = RunFolder(tmp_path)
    assert [folder.addresses(service) for service in ("exchange", "weights", "trainer")] == [(), (), ()]
    assert json.loads(meshrl("status", "--json", "-o", str(tmp_path)).output)["rows"][0]["service"] == "orchestrator"


TEXT = """2026-11-23T21:22:09.000 INFO    rl started trainer (pid 7), log in logs/trainer.log
    2026-11-23T21:22:10.000 ERROR   orchestrator step 6: loss nan is not finite
2026-11-23T21:22:11.000 ERROR   rl weights died: was killed by SIGKILL (9). Ending all other programs. Last lines of x:
    2026-11-23T21:22:10.900 INFO    weights version 5 is decided
"""
JSON = json.dumps(
    {
        "text": "",
        "record": {
            "time": {"repr": "2026-11-23 21:22:11.000000+00:00"},
            "level": {"name": "ERROR"},
            "message": "weights died: was killed by SIGKILL (9)",
        },
    }
)


@pytest.mark.parametrize(
    ("log", "why"),
    [
        (TEXT, "weights died: was killed by SIGKILL (9)"),
        (f"{JSON}\n", "weights died: was killed by SIGKILL (9)"),
        (
            f"{TEXT}    2026-11-23T21:22:10.910 ERROR   weights the disk is full\n",
            "weights died: was killed by SIGKILL (9): the disk is full",
        ),
        (TEXT + "2026-11-23T21:30:00.000 INFO    rl started trainer (pid 8), log in logs/trainer.log\n", ""),
    ],
)
def test_the_status_of_a_run_that_failed_says_why_and_when(tmp_path: Path, log: str, why: str) -> None:
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs/orchestrator.toml").write_text("max_steps = 9\n")
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/rl.log").write_text(log)
    status = json.loads(meshrl("status", "--json", "-o", str(tmp_path)).output)
    jsonschema.validate(status, json.loads(status_schema()))
    assert status["ended_by"] == why
    end = RunFolder(tmp_path).end()
    assert (None if end is None else end.at) == ("2026-11-23T21:22:11.000" if why else None)
    assert (f"it ended by: {why}\n" in meshrl("status", "-o", str(tmp_path)).output) == bool(why)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "time/step": 1.0}\n')
    assert ("nothing is wrong with the run" in meshrl("doctor", "-o", str(tmp_path)).output) == (not why)


def test_programs_that_were_started_by_hand_are_a_run_that_goes_on(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    state = ProgramState(program="trainer", host="another machine", pid=1, at_s=time.time(), stuck_s=8.0)
    (tmp_path / "state/trainer.json").write_text(state.to_json())
    status = json.loads(meshrl("status", "--json", "-o", str(tmp_path)).output)
    assert status["headline"] == f"{tmp_path}: running, no step has ended yet"
    assert status["waiting"] == "trainer answers nobody: its event loop is stuck for 8 s"
    (tmp_path / "state/trainer.json").write_text(dataclasses.replace(state, at_s=time.time() - 3600.0).to_json())
    assert json.loads(meshrl("status", "--json", "-o", str(tmp_path)).output)["waiting"] == ""


def test_a_mesh_is_no_run_whose_steps_are_missing(tmp_path: Path) -> None:
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs/rl.toml").write_text("max_steps = 3\n")
    (tmp_path / "configs/trainer.toml").write_text('[server]\nhost = "127.0.0.1"\nport = 1\n')

    def headline() -> str:
        return str(json.loads(meshrl("status", "--json", "-o", str(tmp_path)).output)["headline"])

    assert headline() == f"{tmp_path}: not running, a mesh without a run"
    for name in ("run_b", "run_a"):
        (tmp_path / name).mkdir()
    assert headline() == f"{tmp_path}: not running, a mesh; its runs are in run_a, run_b"
    for command in (("report", str(tmp_path)), ("rollouts", "worst", "-o", str(tmp_path))):
        assert "; those of this mesh are run_a, run_b" in meshrl(*command).output


def test_an_engine_that_takes_requests_while_it_prepares_a_version_is_well() -> None:
    row = ServiceRow(service="engine", address="http://127.0.0.1:1", state="prepared", figures={"routable": True})
    assert row.is_well
    assert not dataclasses.replace(row, figures={"routable": False}).is_well


def test_the_doctor_says_that_a_mistyped_folder_is_none(tmp_path: Path) -> None:
    run = examined(tmp_path / "mistyped", "run")
    assert (run["state"], run["found"]) == ("warn", f"there is no folder {tmp_path / 'mistyped'}")


def test_a_trainer_without_a_run_for_the_caller_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    async def of_another_tenant(*arguments: object) -> SimpleNamespace:
        return SimpleNamespace(runs=())

    monkeypatch.setattr("meshrl.client.trainer.TrainerClient.get_trainer", of_another_tenant)
    result = meshrl("doctor", "--address", "127.0.0.1:1")
    assert result.exit_code == 1
    assert result.output == (
        "Error: the trainer at 127.0.0.1:1 shows this caller no run: name a run's folder with -o\n"
    )


def test_a_server_with_a_certificate_that_is_called_without_one_is_explained(tmp_path: Path) -> None:
    hub = tmp_path / "hub"
    Authority.create(tmp_path / "credentials", "run").issue(hub, Role.HUB, "hub")
    key, chain, ca = ((hub / name).read_bytes() for name in ("key.pem", "cert.pem", "ca.pem"))
    server = grpc.server(ThreadPoolExecutor())
    port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([(key, chain)], ca, True))
    server.start()
    result = meshrl("weights", "engines", "--address", f"127.0.0.1:{port}", "-o", str(tmp_path / "none"))
    server.stop(None).wait()
    assert result.exit_code == 1
    assert "; if it has certificates, it closes calls without one: name the run's folder with -o" in result.output


def test_an_address_without_a_port_is_not_called_at_another() -> None:
    for command in (("run", "list"), ("doctor",), ("conformance", "--service", "rollout")):
        result = meshrl(*command, "--address", "127.0.0.1:")
        assert result.exit_code == 2
        assert "'--address': expected HOST:PORT with a port from 1 to 65535" in result.output


def test_the_wait_for_the_rollouts_of_a_step_is_no_part_of_its_time(tmp_path: Path) -> None:
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs/orchestrator.toml").write_text("max_steps = 9\n")
    record = {"step": 6, "time/step": 5.5, "time/wait_for_rollouts": 6.2, "reward/all/mean": 0.5}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    shown = meshrl("status", "-o", str(tmp_path)).output
    assert re.search(
        r"step 6 ended \S+ ago, 5.5s after the one before; its rollouts were waited for 6.2s; reward", shown
    )


def test_logs_are_in_the_order_of_time_over_days(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    for name, times in (
        ("trainer", ("25T12:00:00.000", "26T23:59:59.000", "27T00:00:02.000")),
        ("weights", ("26T23:59:58.000",)),
        ("rollout", ("26T11:00:00.000", "27T00:00:01.000")),
    ):
        log = tmp_path / "logs" / f"{name}.log"
        log.write_text("".join(f"2026-11-{time} INFO    {name} works\n" for time in times))
    shown = [line.split()[1] for line in meshrl("logs", "-o", str(tmp_path)).output.splitlines()]
    assert shown == sorted(shown)
    assert len(shown) == 6


def test_a_call_names_the_methods_that_there_are() -> None:
    result = meshrl("call", "trainer", "Train", "--address", "127.0.0.1:1")
    assert result.exit_code == 2
    assert "meshrl.v1.TrainerService has no Train; it has: GetTrainer, SubmitBatch, WatchSteps" in result.output
    result = meshrl("call", "trainer", "GetTrainer", '{"epoch": 1}', "--address", "127.0.0.1:1")
    assert result.exit_code == 2
    assert (
        'not a GetTrainerRequest: Message type "meshrl.v1.GetTrainerRequest" has no field named "epoch"'
        in result.output
    )


def test_a_refused_request_is_shown_with_its_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(*arguments: object, **more: object) -> None:
        raise invalid([FieldViolation("spec.learning_rate", "must be finite")], "CreateRunRequest")

    monkeypatch.setattr("meshrl.client.trainer.TrainerClient.create_run", refuse)
    result = meshrl("run", "create", "x", "--lr", "inf", "--address", "127.0.0.1:1")
    assert result.exit_code == 1
    assert result.output == (
        "Error: INVALID_REQUEST: 1 field is wrong in CreateRunRequest; spec.learning_rate: must be finite\n"
    )


def test_a_server_without_tls_that_is_called_with_a_certificate_is_explained(tmp_path: Path) -> None:
    Authority.create(tmp_path / "credentials", "run")
    server = grpc.server(ThreadPoolExecutor())
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    result = meshrl("weights", "engines", "--address", f"127.0.0.1:{port}", "-o", str(tmp_path))
    server.stop(None).wait()
    assert result.exit_code == 1
    assert "; the server uses no TLS, and the credentials of this call are certificates" in result.output


def test_rollouts_of_no_environment_or_state_are_refused(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "ledger.sqlite")) as ledger, ledger:
        ledger.executescript(SCHEMA)
        row = "INSERT INTO rollouts VALUES ('g/0', 1, 'g', 'echo', 0, 3, 'finished', '5eed', 2, 3, '', 0, '')"
        ledger.execute(row)
    tail = ("rollouts", "tail", "-o", str(tmp_path))
    assert "5eed" in meshrl(*tail, "--state", "ready", "--env", "echo").output
    assert meshrl(*tail, "--state", "failed", "--env", "echo").exit_code == 0
    assert "'done' is not one of 'in_flight', 'ready', 'batched'" in meshrl(*tail, "--state", "done").output
    mistyped = meshrl(*tail, "--env", "ecko")
    assert mistyped.exit_code == 1
    assert "no rollouts of 'ecko' in" in mistyped.output
    assert "there are some of echo" in mistyped.output


def test_a_step_is_a_tree_in_the_order_of_time(traced: Path) -> None:
    result = meshrl("trace", "show", "3", "-o", str(traced))
    assert [line.split()[2:] for line in result.output.splitlines()] == [
        ["orchestrator", "rl.step"],
        ["rollout", "rl.rollout"],
        ["rollout", "rl.rollout"],
        ["trainer", "rl.train", "->", "2", "linked"],
    ]
    assert "there are steps 3 to 3" in meshrl("trace", "show", "4", "-o", str(traced)).output
    (traced / "traces/orchestrator.jsonl").unlink()
    assert "there are no steps yet" in meshrl("trace", "show", "3", "-o", str(traced)).output
    (traced / "run_a").mkdir()  # a mesh, whose runs have the steps
    assert "with -o; those of this mesh are run_a" in meshrl("trace", "show", "3", "-o", str(traced)).output


def test_the_slowest_spans_come_first(traced: Path) -> None:
    rows = json.loads(meshrl("trace", "slowest", "--json", "-o", str(traced)).output)
    assert [(row["name"], row["count"], row["median_s"], row["max_s"]) for row in rows] == [
        ("rl.step", 1, 9.0, 9.0),
        ("rl.rollout", 2, 4.5, 5.0),
        ("rl.train", 1, 1.0, 1.0),
    ]


def test_spans_that_overlap_without_nesting_lie_on_tracks_of_their_own(traced: Path, tmp_path: Path) -> None:
    target = tmp_path / "timeline.json"
    assert meshrl("trace", "export", "--perfetto", str(target), "-o", str(traced)).exit_code == 0
    events = json.loads(target.read_text())["traceEvents"]
    slices = {event["args"]["span_id"]: event for event in events if event["ph"] == "X"}
    assert (slices["02"]["pid"], slices["02"]["tid"]) != (slices["03"]["pid"], slices["03"]["tid"])
    assert (slices["02"]["ts"], slices["02"]["dur"]) == (1e6, 4e6)
    flows = [event for event in events if event["ph"] in "sf"]
    assert [(event["ph"], event["ts"]) for event in flows] == [("s", 1e6), ("f", 7e6), ("s", 2e6), ("f", 7e6)]
    processes = {event["pid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    assert set(processes.values()) == {"orchestrator", "rollout", "trainer"}
    threads = {(one["pid"], one["tid"]) for one in slices.values()}
    assert len({tid for _, tid in threads} - processes.keys()) == len(threads)  # a thread's id is nobody else's
    assert [event["id"] for event in flows] == [1, 1, 2, 2]


def test_an_arrow_begins_at_the_earlier_span_also_where_that_one_has_the_link(tmp_path: Path) -> None:
    """A rollout links to the commit of a version that came while it was sampled; Perfetto drops arrows back in time."""
    (tmp_path / "traces").mkdir()
    spans = [span("rl.rollout", "01", 100.0, 9.0, links=[{"spanId": "02"}]), span("rl.sync", "02", 104.0, 1.0)]
    line = json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": spans}]}]})
    (tmp_path / "traces" / "rollout.jsonl").write_text(f"{line}\n")
    target = tmp_path / "timeline.json"
    assert meshrl("trace", "export", "--perfetto", str(target), "-o", str(tmp_path)).exit_code == 0
    events = json.loads(target.read_text())["traceEvents"]
    tracks = {event["args"]["span_id"]: event["tid"] for event in events if event["ph"] == "X"}
    arrows = [(event["ph"], event["ts"], event["tid"]) for event in events if event["ph"] in "sf"]
    assert arrows == [("s", 0.0, tracks["01"]), ("f", 4e6, tracks["02"])]


def test_logs_of_several_programs_are_one_in_the_order_of_time(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    day = "2026-11-23T10:00"
    (tmp_path / "logs/trainer.log").write_text(f"{day}:01.000 INFO a\n  more of a\n{day}:03.000 INFO c\n")
    (tmp_path / "logs/weights.log").write_text(f"{day}:02.000 INFO b\n")
    result = meshrl("logs", "-o", str(tmp_path))
    assert [line.split()[-1] for line in result.output.splitlines()] == ["a", "a", "b", "c"]
    assert [line.split()[0] for line in result.output.splitlines()] == ["trainer", "trainer", "weights", "trainer"]
    refused = meshrl("logs", "hub", "-o", str(tmp_path))
    assert "no log of hub" in refused.output
    assert "there are: trainer, weights" in refused.output
    assert "no attempt 3 in" in meshrl("logs", "-a", "3", "-o", str(tmp_path)).output


def test_logs_in_json_are_one_in_the_order_of_time(tmp_path: Path) -> None:
    def record(at: str, message: str) -> str:
        level, time = {"name": "INFO"}, {"repr": f"2026-11-23 {at}123+00:00"}
        return json.dumps({"text": message, "record": {"level": level, "time": time, "message": message}})

    (tmp_path / "logs").mkdir()
    lines = [record("10:00:01.000", "a"), record("10:00:03.000", "c")]
    (tmp_path / "logs/trainer.log").write_text("\n".join([*lines, "{half a rec"]))
    (tmp_path / "logs/weights.log").write_text(record("10:00:02.000", "b"))
    shown = [line[15:] for line in meshrl("logs", "-o", str(tmp_path)).output.splitlines()]
    assert shown == [lines[0], record("10:00:02.000", "b"), lines[1], "{half a rec"]


def interrupted(seconds: float) -> None:
    raise KeyboardInterrupt


def test_what_follows_ends_well_with_ctrl_c(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/trainer.log").write_text("10:00:01.000 INFO a\n")
    with closing(sqlite3.connect(tmp_path / "ledger.sqlite")) as ledger, ledger:
        ledger.executescript(SCHEMA)
    monkeypatch.setattr(time, "sleep", interrupted)
    for command in (("logs", "-f"), ("rollouts", "tail", "-f")):
        result = meshrl(*command, "-o", str(tmp_path))
        assert (result.exit_code, "Aborted" in result.output) == (0, False)


def test_a_ledger_that_cannot_be_opened_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "ledger.sqlite").mkdir()
    result = meshrl("rollouts", "tail", "-o", str(tmp_path))
    assert result.exit_code == 1
    assert f"{tmp_path}/ledger.sqlite cannot be opened: " in result.output
    assert len(result.output.splitlines()) == 1


def test_a_timeline_that_cannot_be_written_names_the_option(traced: Path) -> None:
    result = meshrl("trace", "export", "--perfetto", str(traced / "none" / "x.json"), "-o", str(traced))
    assert result.exit_code == 1
    assert "x.json cannot be written: No such file or directory; name another file with --perfetto" in result.output


def test_logs_of_a_program_are_those_of_all_its_runs(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    for name, line in (("eval", "10:00:01.000 INFO a"), ("eval.2", "10:00:02.000 INFO b"), ("rl", "10:00:03.000 c")):
        (tmp_path / f"logs/{name}.log").write_text(f"{line}\n")
    shown = [line.split()[0] for line in meshrl("logs", "eval", "-o", str(tmp_path)).output.splitlines()]
    assert shown == ["eval", "eval.2"]
    only = meshrl("logs", "-s", "eval.2", "-o", str(tmp_path)).output
    assert only.split()[0] == "eval.2"
    assert len(only.splitlines()) == 1


def test_a_log_that_has_gone_before_it_is_read_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/trainer.log").write_text("10:00:01.000 INFO a\n")
    (tmp_path / "logs/gone.log").symlink_to("nowhere")  # listed, and not there when it is opened
    result = meshrl("logs", "-o", str(tmp_path))
    assert (result.exit_code, result.output.splitlines()) == (0, [f"{'trainer':14} 10:00:01.000 INFO a"])


def test_the_doctor_says_what_it_looked_at(tmp_path: Path) -> None:
    result = meshrl("doctor", "--json", "-o", str(tmp_path))
    looked_at = {finding["what"]: finding["state"] for finding in json.loads(result.output)}
    assert {"python", "open files", "memory", "disk", "GPUs", "network", "packages", "run"} <= looked_at.keys()
    assert set(looked_at.values()) <= {"ok", "warn", "fail"}
    assert result.exit_code == (1 if "fail" in looked_at.values() else 0)


def test_the_doctor_names_a_ledger_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "ledger.sqlite").write_text("not one")
    ledger = examined(tmp_path, "ledger")
    assert (ledger["state"], ledger["found"]) == ("fail", "ledger.sqlite cannot be read: file is not a database")


def test_the_doctor_names_programs_that_were_killed_with_their_rl(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    killed = ProgramState(program="trainer", host=socket.gethostname(), pid=2**22 + 1, at_s=time.time() - 60.0)
    (tmp_path / "state/trainer.json").write_text(killed.to_json())
    run = examined(tmp_path, "run")
    assert run["state"] == "warn"
    assert re.search(r"it ended by: trainer is gone: process 4194305 ended 6\d s ago without saying so", run["found"])


def test_the_doctor_names_why_a_program_does_not_answer(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    stuck = ProgramState(
        program="trainer", host=socket.gethostname(), pid=os.getpid(), at_s=time.time() + 60.0, stuck_s=8.0,
        serves=("127.0.0.1:1",),
    )  # fmt: skip
    (tmp_path / "state/trainer.json").write_text(stuck.to_json())
    trainer = examined(tmp_path, "trainer")
    assert trainer["state"] == "fail"
    assert trainer["found"].endswith("; it answers nobody: its event loop is stuck for 8 s")


def test_the_doctor_takes_the_pythons_that_the_distribution_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "clients/python/pyproject.toml").read_text())["project"]
    taken = SpecifierSet(project["requires-python"])
    for minor in range(10, 15):
        monkeypatch.setattr("meshrl.cli.doctor.sys", SimpleNamespace(version_info=(3, minor, 1)))
        python = next(examine(RunFolder(tmp_path)))
        assert (python.what, python.state == "ok") == ("python", taken.contains(f"3.{minor}.1"))


@pytest.mark.parametrize(("hard", "state"), [(64, "fail"), (1024, "warn"), (4096, "ok")])
def test_the_doctor_judges_open_files_as_preflight_and_programs_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hard: int, state: str
) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda what: (64, hard))
    assert examined(tmp_path, "open files")["state"] == state


def test_the_doctor_names_congestion_control_and_packet_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshrl.cli.doctor.CONGESTION_CONTROL", tmp_path / "control")
    monkeypatch.setattr("meshrl.cli.doctor.INTERFACES", tmp_path / "net")
    (tmp_path / "control").write_text("cubic\n")
    for name, mtu in (("lo", 65536), ("eth0", 1500)):
        (tmp_path / "net" / name).mkdir(parents=True)
        (tmp_path / "net" / name / "mtu").write_text(f"{mtu}\n")

    network = examined(tmp_path, "network")
    assert (network["state"], network["found"]) == ("ok", "congestion control cubic; MTU 1500 of eth0")
    assert "bbr" in network["remedy"]
    (tmp_path / "control").write_text("bbr\n")
    assert examined(tmp_path, "network")["remedy"] == ""
    (tmp_path / "net" / "eth0" / "mtu").write_text("1200\n")
    assert examined(tmp_path, "network")["state"] == "warn"


@pytest.mark.parametrize(
    ("seconds", "words"), [(4.21, "4.2s"), (59.9, "59.9s"), (185.0, "3m05s"), (3599.7, "1h00m"), (7620.0, "2h07m")]
)
def test_a_duration_is_short(seconds: float, words: str) -> None:
    assert ago(seconds) == words
