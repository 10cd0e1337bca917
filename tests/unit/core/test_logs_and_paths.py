"""One log format, whoever logs; one place for every file."""

import asyncio
import errno
import json
import logging
import shutil
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path

import pytest
from aiohttp import web
from grpc._cython import cygrpc
from loguru import logger
from opentelemetry import context, trace

from meshrl.core.durable import disk_trouble
from meshrl.core.paths import Layout, is_gone
from meshrl.core.telemetry.log_folder import begin_attempt, log_place, own_log
from meshrl.core.telemetry.log_folder import main as log_folder_main
from meshrl.core.telemetry.logs import setup_logging
from meshrl.wire.trace import parse_traceparent
from small_disk import fill, make_read_only, mounted


@pytest.fixture(autouse=True)
def restored_logging() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    logging.captureWarnings(False)
    logger.remove()
    root.handlers[:] = handlers
    root.setLevel(level)


def test_lines_carry_day_time_level_and_process(tmp_path, capsys):
    began = datetime.now().replace(microsecond=0)
    setup_logging("trainer", "info", tmp_path / "logs" / "trainer.log")
    logger.info("step {} done", 3)
    logger.debug("not shown")
    line = (tmp_path / "logs" / "trainer.log").read_text()
    at, *rest = line.split()
    assert rest == ["INFO", "trainer", "step", "3", "done"]
    assert began <= datetime.fromisoformat(at) <= datetime.now()
    assert "trainer step 3 done" in capsys.readouterr().out.replace("\x1b[36m", "").replace("\x1b[0m", "")


def test_the_standard_library_logs_the_same_way(tmp_path):
    setup_logging("rollout", "info", tmp_path / "log")
    logging.getLogger("somelib").warning("odd {braces} %d", 7)
    logging.getLogger("somelib").log(25, "between levels")
    lines = (tmp_path / "log").read_text().splitlines()
    assert [line.split()[1:] for line in lines] == [
        ["WARNING", "rollout", "odd", "{braces}", "7"],
        ["Level", "25", "rollout", "between", "levels"],
    ]


@pytest.mark.parametrize(("level", "shown"), [("info", []), ("debug", ["session", "request"])])
def test_libraries_that_log_every_call_are_shown_at_debug_alone(tmp_path, level, shown):
    mcp_logger = logging.getLogger("mcp.client.streamable_http")  # its module, which takes a second to import
    setup_logging("rollout", level, tmp_path / "log")
    mcp_logger.info("session")
    logging.getLogger("httpx").info("request")
    logging.getLogger("httpcore.connection").debug("bytes")
    logging.getLogger("asyncio").debug("slow")
    assert [line.split()[-1] for line in (tmp_path / "log").read_text().splitlines()] == shown
    mcp_logger.warning("lost")
    assert (tmp_path / "log").read_text().splitlines()[-1].endswith("lost")


def test_debug_has_no_lines_of_grpcs_own_for_each_channel(tmp_path):
    setup_logging("rollout", "debug", tmp_path / "log")
    logging.getLogger("grpc._cython.cygrpc").debug("[_cygrpc] Loaded running loop: id(loop)=%d", 7)
    assert (tmp_path / "log").read_text() == ""


def test_json_lines_can_be_parsed(tmp_path):
    setup_logging("weights", "info", tmp_path / "log", json_logging=True)
    logger.bind(version=4).info("committed")
    record = json.loads((tmp_path / "log").read_text())["record"]
    assert record["message"] == "committed"
    assert record["extra"] == {"process": "weights", "version": 4}


def test_lines_inside_a_span_name_its_trace(tmp_path):
    setup_logging("rollout", "info", tmp_path / "text.log")
    inside = trace.set_span_in_context(trace.NonRecordingSpan(parse_traceparent(f"00-{'a' * 32}-{'b' * 16}-01")))
    token = context.attach(inside)
    try:
        logger.info("inside")
        logging.getLogger("somelib").warning("a library's")
        logger.bind(trace_id="c" * 32).info("of another")
        setup_logging("rollout", "info", tmp_path / "json.log", json_logging=True)
        logger.info("inside")
    finally:
        context.detach(token)
    setup_logging("rollout", "info", tmp_path / "text.log")
    logger.info("outside")
    lines = [line.split("rollout ")[1] for line in (tmp_path / "text.log").read_text().splitlines()]
    assert lines == [
        f"inside trace={'a' * 32}", f"a library's trace={'a' * 32}", f"of another trace={'c' * 32}", "outside"
    ]  # fmt: skip
    extra = json.loads((tmp_path / "json.log").read_text())["record"]["extra"]
    assert extra == {"process": "rollout", "trace_id": "a" * 32, "span_id": "b" * 16}


def test_setting_up_again_replaces_what_was_there(tmp_path):
    setup_logging("a", "info", tmp_path / "a.log")
    setup_logging("b", "info", tmp_path / "b.log")
    logger.info("once")
    assert (tmp_path / "a.log").read_text() == ""
    assert "once" in (tmp_path / "b.log").read_text()


async def test_a_strangers_bytes_that_are_no_http_are_one_line_and_no_traceback(tmp_path):
    """Bytes come in over a real connection: aiohttp answers 400 and logs what it could not read."""
    setup_logging("inference", "info", tmp_path / "log")
    runner = web.AppRunner(web.Application(), shutdown_timeout=1.0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    reader, writer = await asyncio.open_connection(*runner.addresses[0][:2])
    writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: nine\r\n\r\n")
    answer = await asyncio.wait_for(reader.read(-1), 60.0)
    writer.close()
    await runner.cleanup()
    assert b" 400 " in answer.splitlines()[0]
    (line,) = (tmp_path / "log").read_text().splitlines()
    assert line.split()[1:3] == ["WARNING", "inference"]
    assert "Error handling request from 127.0.0.1: 400" in line
    assert "Content-Length: nine" in line


@pytest.mark.parametrize(
    ("said", "level"),
    [
        ('Failed "execute_batch": (<grpc._cython.cygrpc.SendMessageOperation object at 0x7fb>,)', "DEBUG"),
        ("Failed grpc_call_start_batch: 8 with grpc_call_error value", "ERROR"),
    ],
)
def test_an_answer_that_a_callers_end_overtakes_is_no_error_of_grpc(tmp_path, said, level):
    setup_logging("weights", "debug", tmp_path / "log")
    try:
        raise cygrpc.ExecuteBatchError(said)
    except cygrpc.ExecuteBatchError:  # as gRPC does with what a servicer's call raises
        logging.getLogger(cygrpc.__name__).exception("ExecuteBatchError raised in core by servicer method [/s/Fetch]")
    first, *more = (tmp_path / "log").read_text().splitlines()
    assert first.split()[1:3] == [level, "weights"]
    assert ("Traceback (most recent call last):" in more) == (level == "ERROR")


def test_everything_lies_under_the_output_dir():
    layout = Layout(Path("out"))
    assert layout.log("trainer") == Path("out/logs/trainer.log")
    assert layout.config("rl") == Path("out/configs/rl.toml")
    for path in (layout.metrics_jsonl, layout.summary_json, layout.broadcasts, layout.ledger):
        assert path.parent == Path("out")


def read(folder: Path) -> dict[str, str]:
    """What the documents' paths of a run's logs hold."""
    return {name: (folder / "logs" / name).read_text() for name in ("trainer.log", "envs/train/words/env_server.log")}


def write(layout: Layout, text: str) -> None:
    for parts in (("trainer.log",), ("envs", "train", "words", "env_server.log")):
        path = log_place(layout, *parts)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as log:
            log.write(text)


def test_each_start_has_its_logs_and_the_documents_paths_are_the_newest(tmp_path):
    layout = Layout(tmp_path / "run")
    assert begin_attempt(layout).name == "attempt_1"
    write(layout, "first")
    assert begin_attempt(layout).name == "attempt_2"
    write(layout, "second")
    write(layout, ", more")  # a program of the same start, started again
    assert set(read(layout.output_dir).values()) == {"second, more"}
    assert (layout.logs / "attempt_1" / "trainer.log").read_text() == "first"
    assert (layout.logs / "latest" / "trainer.log").read_text() == "second, more"
    shutil.copytree(layout.output_dir, tmp_path / "copied", symlinks=True)
    shutil.rmtree(layout.output_dir)
    assert set(read(tmp_path / "copied").values()) == {"second, more"}


def test_programs_without_a_start_share_the_newest_and_older_logs_become_one(tmp_path):
    by_hand = Layout(tmp_path / "by_hand")
    assert log_place(by_hand, "trainer.log") == log_place(by_hand, "weights.log").with_name("trainer.log")
    assert [path.name for path in by_hand.logs.glob("attempt_*")] == ["attempt_1"]
    older = Layout(tmp_path / "older")
    (older.logs / "envs").mkdir(parents=True)
    (older.logs / "trainer.log").write_text("old")
    assert log_place(older, "trainer.log") == older.logs / "attempt_2" / "trainer.log"
    assert (older.logs / "attempt_1" / "trainer.log").read_text() == "old"
    assert (older.logs / "attempt_1" / "envs").is_dir()


def test_each_run_of_a_program_has_a_log_of_its_own_and_the_documents_path_is_the_newest(tmp_path):
    layout = Layout(tmp_path / "run")
    begin_attempt(layout)
    for run in ("first", "second", "third"):
        own_log(layout, "eval").write_text(run)
        assert layout.log("eval").read_text() == run
    found = {path.name: path.read_text() for path in (layout.logs / "attempt_1").iterdir()}
    assert found == {"eval.log": "first", "eval.2.log": "second", "eval.3.log": "third"}
    begin_attempt(layout)
    log_place(layout, "eval.log").write_text("of the next start")
    assert layout.log("eval").read_text() == "of the next start"


def test_runs_that_start_at_once_do_not_share_a_log(tmp_path):
    layout = Layout(tmp_path / "run")
    with ThreadPoolExecutor(8) as threads:
        logs = list(threads.map(lambda _: own_log(layout, "inference-0.5"), range(24)))
    assert len(set(logs)) == 24
    assert {log.parent.name for log in logs} == {"attempt_1"}
    assert {"inference-0.5.log", "inference-0.5.24.log"} <= {log.name for log in logs}


def test_a_batch_script_is_told_where_its_output_goes(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["log_folder", str(tmp_path), "sft"])
    log_folder_main()
    assert capsys.readouterr().out == f"{tmp_path}/logs/attempt_1/sft\n"
    assert (tmp_path / "logs" / "sft").samefile(tmp_path / "logs" / "attempt_1" / "sft")


def test_a_full_disk_costs_lines_of_the_log_and_is_said_once(tmp_path, capsys):
    with mounted(tmp_path / "disk", mebibytes=1) as disk:
        setup_logging("trainer", "info", disk / "logs" / "trainer.log")
        logger.info("before")
        filler = fill(disk)
        for step in range(200):
            logger.info("step {}", step)
        said = capsys.readouterr().err
        assert said.count("log lines are lost: cannot write: No space left on device; free some space") == 1
        assert "Traceback" not in said
        filler.unlink()
        logger.info("after")
        lines = (disk / "logs" / "trainer.log").read_text().splitlines()
        assert lines[0].endswith("before")
        assert lines[-1].endswith("after")
        logger.remove()


def test_a_folder_that_may_not_be_written_ends_the_program_with_a_sentence(tmp_path):
    with mounted(tmp_path / "disk") as disk:
        make_read_only(disk)
        with pytest.raises(SystemExit, match=r"disk/run: Read-only file system; output_dir must be a folder that this"):
            setup_logging("trainer", "info", disk / "run" / "logs" / "trainer.log")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            OSError(errno.ENOSPC, "No space left on device", "/out/a"),
            "cannot write to /out/a: No space left on device; f",
        ),
        (OSError(errno.ENOSPC, "No space left on device"), "cannot write: No space left on device; free some space"),
        (
            PermissionError(errno.EACCES, "Permission denied", "/out"),
            "cannot open /out: Permission denied; give this user",
        ),
        (PermissionError(errno.EACCES, "Permission denied"), None),  # of a port
        (FileNotFoundError(errno.ENOENT, "No such file or directory", "/out"), None),
        (ValueError("No space left on device"), None),
    ],
)
def test_only_what_a_disk_refuses_is_explained(error, said):
    trouble = disk_trouble(error)
    assert (trouble is None) if said is None else trouble is not None and trouble.startswith(said)


def test_a_path_is_gone_only_where_the_file_system_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    names = ("file", "none", "file/below", "none/below")
    assert [is_gone(tmp_path / name) for name in names] == [False, True, True, True]

    def stale(path: Path) -> None:
        raise OSError(errno.ESTALE, "Stale file handle")

    with monkeypatch.context() as patch:
        patch.setattr("meshrl.core.paths.os.stat", stale)
        assert not is_gone(tmp_path / "none")
