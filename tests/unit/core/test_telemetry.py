"""Spans end up as OTLP JSON lines."""

import json
import os
import socket
import subprocess
import sys
import threading
from base64 import b64decode
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import zstandard
from google.protobuf import json_format
from opentelemetry import trace
from opentelemetry.sdk.environment_variables import OTEL_EXPORTER_OTLP_TIMEOUT
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from meshrl.cli.trace_file import read_lines
from meshrl.core.telemetry import tracing as telemetry
from meshrl.core.telemetry.otlp_file import JsonLinesSpanExporter, export_line
from meshrl.core.telemetry.tracing import (
    CLOSE_S,
    ENDPOINT_VARIABLES,
    ROLLOUT_SPAN,
    TRAIN_SPAN,
    Tracing,
    build_provider,
    traceparent_of,
)
from meshrl.wire.trace import current_traceparent, links_from
from small_disk import fill, mounted

REMOTE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def traced(tmp_path: Path) -> Iterator[tuple[Tracing, Callable[[], Any]]]:
    """A tracer that writes to a file, and a function that closes it and reads the spans back."""
    path = tmp_path / "traces" / "trainer.jsonl.zst"
    provider = build_provider("trainer", [JsonLinesSpanExporter(path)])
    tracing = Tracing(provider.get_tracer("meshrl"), provider)

    def read():
        tracing.close()
        requests = [json.loads(line) for line in read_lines(path)[0]]
        groups = [scope for request in requests for scope in request["resourceSpans"][0]["scopeSpans"]]
        return requests, {span["name"]: span for group in groups for span in group["spans"]}

    yield tracing, read
    tracing.close()


def test_a_span_is_written_with_its_parent_links_and_attributes(traced):
    tracing, read = traced
    with tracing.start_as_current_span(TRAIN_SPAN, links=links_from([REMOTE])) as train:
        train.set_attributes({"step": 3, "loss": 0.5, "ok": True, "names": ["a", "b"]})
        train.add_event("queued", {"position": 1})
        child = tracing.start_span("rl.train.optimizer")
        child.set_status(trace.StatusCode.ERROR, "diverged")
        child.end()
    requests, spans = read()
    train_json, child_json = spans[TRAIN_SPAN], spans["rl.train.optimizer"]
    assert child_json["parentSpanId"] == train_json["spanId"]
    assert child_json["status"] == {"code": 2, "message": "diverged"}
    assert "parentSpanId" not in train_json
    assert train_json["attributes"] == [
        {"key": "step", "value": {"intValue": "3"}},
        {"key": "loss", "value": {"doubleValue": 0.5}},
        {"key": "ok", "value": {"boolValue": True}},
        {"key": "names", "value": {"arrayValue": {"values": [{"stringValue": "a"}, {"stringValue": "b"}]}}},
    ]
    assert [(link["traceId"], link["spanId"]) for link in train_json["links"]] == [(REMOTE[3:35], REMOTE[36:52])]
    assert train_json["events"][0]["name"] == "queued"
    assert int(train_json["endTimeUnixNano"]) >= int(child_json["endTimeUnixNano"])
    resource = {item["key"]: item["value"] for item in requests[0]["resourceSpans"][0]["resource"]["attributes"]}
    assert resource["service.name"] == {"stringValue": "trainer"}
    assert resource["host.name"] == {"stringValue": socket.gethostname()}


def test_the_text_of_a_span_is_its_identity(traced):
    tracing, read = traced
    span = tracing.start_span(ROLLOUT_SPAN)
    text = traceparent_of(span)
    span.end()
    _, spans = read()
    written = spans[ROLLOUT_SPAN]
    assert text == f"00-{written['traceId']}-{written['spanId']}-{span.get_span_context().trace_flags:02x}"


def test_the_latest_spans_are_kept_within_a_bound_over_restarts_too_and_what_goes_is_said(tmp_path, said):
    path, most = tmp_path / "rollout.jsonl.zst", 20_000
    for process in range(3):
        provider = build_provider("rollout", [JsonLinesSpanExporter(path, most)])
        tracer = provider.get_tracer("meshrl")
        for number in range(40):
            tracer.start_span(f"span {process * 40 + number}").end()
            provider.force_flush()  # a line a span
            assert sum(file.stat().st_size for file in tmp_path.iterdir()) <= most
        provider.shutdown()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["rollout.1.jsonl.zst", "rollout.jsonl.zst"]
    lines = read_lines(tmp_path / "rollout.1.jsonl.zst")[0] + read_lines(path)[0]
    names = [json.loads(line)["resourceSpans"][0]["scopeSpans"][0]["spans"][0]["name"] for line in lines]
    assert names == [f"span {number}" for number in range(120 - len(names), 120)]
    assert 10 < len(names) < 120
    assert "rollout.1.jsonl.zst and rollout.jsonl.zst keep the latest" in said[0]
    assert "log.traces_max_mib" in said[0]


def test_a_line_longer_than_the_bound_is_written_whole(tmp_path):
    path = tmp_path / "trainer.jsonl.zst"
    provider = build_provider("trainer", [JsonLinesSpanExporter(path, 100)])
    for name in ("first", "second", "third"):
        provider.get_tracer("meshrl").start_span(name).end()
        provider.force_flush()
    provider.shutdown()
    assert b'"third"' in read_lines(path)[0][0]
    assert b'"second"' in read_lines(tmp_path / "trainer.1.jsonl.zst")[0][0]


def test_a_disk_that_fails_loses_spans_and_not_the_program(tmp_path, warned):
    (tmp_path / "file").write_text("")
    exporter = JsonLinesSpanExporter(tmp_path / "file" / "x.jsonl.zst")
    assert exporter.export([]) is SpanExportResult.FAILURE
    assert "could not be written" in warned[0]
    exporter.shutdown()


def test_a_full_disk_is_said_once_and_spans_are_written_again_when_there_is_room(tmp_path, warned):
    with mounted(tmp_path / "disk", mebibytes=1) as disk:
        exporter = JsonLinesSpanExporter(disk / "x.jsonl.zst")
        filler = fill(disk)
        assert [exporter.export([]) for _ in range(3)] == [SpanExportResult.FAILURE] * 3
        filler.unlink()
        assert exporter.export([]) is SpanExportResult.SUCCESS
        exporter.shutdown()
    (said,) = warned
    assert "could not be written" in said
    assert "(No space left on device); free some space there" in said


def test_tracing_without_a_place_to_write_stays_off(monkeypatch):
    for name in telemetry.ENDPOINT_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    tracing = telemetry.setup_tracing("trainer", None)
    span = tracing.start_span(TRAIN_SPAN)
    assert not span.is_recording()
    assert traceparent_of(span) == ""
    assert current_traceparent() == ""
    tracing.close()


@contextmanager
def collector(kind: str) -> Iterator[str]:
    """The address of one that is down, of one that accepts connections and never answers, or of one that works."""
    if kind == "works":
        taken: list[bytes] = []

        class Take(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                taken.append(self.rfile.read(int(self.headers["Content-Length"])))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        with ThreadingHTTPServer(("127.0.0.1", 0), Take) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            yield f"http://127.0.0.1:{server.server_port}"
            server.shutdown()
        assert taken
        return
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        if kind == "never answers":
            listener.listen()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


PROGRAM = """
import sys, time
from pathlib import Path
from loguru import logger
from meshrl.core.telemetry.logs import setup_logging
from meshrl.core.telemetry import tracing as module
from meshrl.core.telemetry.tracing import TRAIN_SPAN, setup_tracing
module.CLOSE_S = float(sys.argv[3])
setup_logging("trainer", "info")
tracing = setup_tracing("trainer", Path(sys.argv[1]))
began, made = time.monotonic(), 0
until_given_up = sys.argv[2] == "until given up"
while not tracing._collector.missed if until_given_up else time.monotonic() < began + float(sys.argv[2]):
    tracing.start_span(TRAIN_SPAN).end()
    made += 1
    time.sleep(0.1)
tracing.start_span(TRAIN_SPAN).end()
began = time.monotonic()
tracing.close()
logger.info("closed {} {}", made + 1, time.monotonic() - began)
"""


@pytest.mark.parametrize(
    ("kind", "runs", "lines"),
    [
        ("is down", "until given up", ["Connection refused", "or more spans; traces/"]),
        ("is down", "0", ["missed the last spans; traces/"]),
        ("never answers", "4", ["missed the last spans; traces/"]),
        ("works", "0", []),
    ],
)
def test_a_collector_holds_the_end_of_a_program_up_for_a_moment_alone(
    tmp_path: Path, kind: str, runs: str, lines: list[str]
) -> None:
    """In a process of its own: one that is given up goes on trying until its process ends."""
    timeout_s = "5" if lines[1:] else "50"  # the exporter gives a reason only where it has time for a second attempt
    close_s = str(CLOSE_S if lines else 60.0)  # one that works may take its time on a busy machine
    with collector(kind) as address:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, tmp_path, runs, close_s], capture_output=True, text=True, timeout=120.0,
            env={**os.environ, ENDPOINT_VARIABLES[0]: address, OTEL_EXPORTER_OTLP_TIMEOUT: timeout_s}, check=True,
        )  # fmt: skip
    *warned, closed = done.stdout.splitlines()
    assert len(warned) == len(lines), done.stdout
    assert all(part in line for part, line in zip(lines, warned, strict=True)), done.stdout
    made, closed_s = closed.split()[-2:]
    assert float(closed_s) < CLOSE_S + 30.0, "it waited for as long as the exporter tries"
    written = b"".join(read_lines(tmp_path / "trainer.jsonl.zst")[0])
    assert written.count(TRAIN_SPAN.encode()) == int(made)


def test_lines_say_what_opentelemetrys_own_encoder_says():
    trace_service = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
    encoder = pytest.importorskip("opentelemetry.exporter.otlp.proto.common.trace_encoder")
    ended = []

    class Keep(SpanExporter):
        def export(self, spans):
            ended.extend(spans)
            return SpanExportResult.SUCCESS

    provider = build_provider("trainer", [Keep()])
    tracer = provider.get_tracer("meshrl")
    with tracer.start_as_current_span(TRAIN_SPAN, links=links_from([REMOTE])) as span:
        span.set_attributes({"i": -(2**40), "f": 0.1, "nan": float("inf"), "t": True, "mixed": [1, 2], "e": ()})
        span.set_attributes({"digest": b"\xf0\x00\xff", "digests": [bytes(range(240, 256)), b""], "empty": b""})
        span.add_event("queued", {"position": 1})
        tracer.start_span("child", kind=trace.SpanKind.CLIENT).end()
        span.set_status(trace.StatusCode.ERROR, "diverged")
    provider.shutdown()
    ours = json_format.ParseDict(json.loads(export_line(ended)), trace_service.ExportTraceServiceRequest())
    theirs = encoder.encode_spans(ended)
    for span in theirs.resource_spans[0].scope_spans[0].spans:  # whether a parent is remote is left out
        span.flags = 0
        if not span.status.code:
            span.ClearField("status")
        for link in span.links:
            link.flags = 0
        for name in ("trace_id", "span_id", "parent_span_id"):  # hexadecimal in JSON, which ParseDict takes for base64
            setattr(span, name, b64decode(getattr(span, name).hex()))
        for link in span.links:
            link.trace_id, link.span_id = b64decode(link.trace_id.hex()), b64decode(link.span_id.hex())
    assert ours == theirs


def test_half_a_frame_is_left_for_later_and_a_damaged_one_left_out(tmp_path):
    frames = [zstandard.ZstdCompressor().compress(f"line {number} {'x' * 9000}\n".encode()) for number in range(4)]
    path = tmp_path / "trainer.jsonl.zst"
    path.write_bytes(frames[0] + frames[1][:9])
    lines, at = read_lines(path)
    assert ([line[:6] for line in lines], at) == ([b"line 0"], len(frames[0]))
    path.write_bytes(frames[0] + frames[1])
    assert [line[:6] for line in read_lines(path, at)[0]] == [b"line 1"]
    path.write_bytes(frames[0] + frames[1][:9] + frames[2] + frames[3])  # cut off by a crash, and written on
    lines, at = read_lines(path)
    assert [line[:6] for line in lines] == [b"line 0", b"line 2", b"line 3"]
    assert at == path.stat().st_size
