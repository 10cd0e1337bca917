"""What the Prime platform is told of a run, over HTTP to a server of the test's own."""

import io
import json
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from pyarrow import parquet

from meshrl.core.config.shared import PrimeMonitorConfig
from meshrl.core.telemetry import prime
from meshrl.core.telemetry.monitor import Monitor, SampleRow
from meshrl.core.telemetry.prime import PrimeSink

SAMPLE = SampleRow(environment="echo", task_key="t", prompt="say abc", completion="abc", reward=1.0, advantage=0.5)


class Platform(ThreadingHTTPServer):
    """Answers as the platform does and keeps what it was sent: method, path, key, body."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Calls)
        self.got: list[tuple[str, str, str, bytes]] = []
        self.refuses = False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def answer(self, path: str) -> dict[str, object]:
        if path == "/api/external-runs":
            return {"run": {"id": "run-1"}}
        if path == "/api/samples/presign":
            return {"data": {"presignedUrl": f"{self.url}/bucket/table", "s3Key": "key-1"}}
        return {}


class Calls(BaseHTTPRequestHandler):
    server: Platform

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.got.append((self.command, self.path, self.headers.get("Authorization", ""), body))
        answer = json.dumps(self.server.answer(self.path)).encode()
        self.send_response(403 if self.server.refuses else 201 if self.path.endswith("external-runs") else 200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    do_PUT = do_POST  # noqa: N815  # the name that http.server calls

    def log_message(self, *args: object) -> None:
        """Nothing on stderr."""


@pytest.fixture
def platform(monkeypatch: pytest.MonkeyPatch) -> Iterator[Platform]:
    monkeypatch.setenv("PRIME_API_KEY", "secret")
    monkeypatch.delenv("RUN_ID", raising=False)
    server = Platform()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_run_is_registered_shown_and_ended(platform: Platform, warned: list[str]) -> None:
    config = PrimeMonitorConfig(run_name="mine", team_id="team", base_url=f"{platform.url}/api/")
    monitor = Monitor([PrimeSink(config, {"base_model": "tiny", "max_steps": 3})])
    monitor.log(3, {"reward/all/mean": 0.5, "loss/mean": float("nan")})
    monitor.log_distributions(3, {"reward": [0.0, 1.0]})
    monitor.log_samples(3, [SAMPLE])
    monitor.close()
    assert warned == []
    assert [call[:2] for call in platform.got] == [
        ("POST", "/api/external-runs"), ("POST", "/api/metrics"), ("POST", "/api/distributions"),
        ("POST", "/api/samples/presign"), ("PUT", "/bucket/table"), ("POST", "/api/samples/confirm"),
        ("PUT", "/api/external-runs/run-1/status"),
    ]  # fmt: skip
    bodies = {path: body for _, path, _, body in platform.got}
    (table,) = parquet.read_table(io.BytesIO(bodies.pop("/bucket/table"))).to_pylist()
    assert (table["run_id"], table["step"], table["completion"], table["advantage"]) == ("run-1", 3, "abc", 0.5)
    sent = {path: json.loads(body) for path, body in bodies.items()}
    assert sent["/api/external-runs"] == {"base_model": "tiny", "max_steps": 3, "name": "mine", "team_id": "team"}
    assert sent["/api/metrics"] == {"run_id": "run-1", "metrics": {"reward/all/mean": 0.5, "step": 3}}
    assert sent["/api/distributions"] == {"run_id": "run-1", "step": 3, "distributions": {"reward": [0.0, 1.0]}}
    assert sent["/api/samples/confirm"] == {"run_id": "run-1", "step": 3, "s3_key": "key-1"}
    assert sent["/api/external-runs/run-1/status"] == {"status": "completed"}
    assert {key for _, path, key, _ in platform.got if path.startswith("/api")} == {"Bearer secret"}


def test_a_platform_that_refuses_or_is_gone_costs_a_warning_and_no_run(platform: Platform, warned: list[str]) -> None:
    config = PrimeMonitorConfig(base_url=platform.url + "/api")
    platform.refuses = True
    refused = Monitor([PrimeSink(config, {})])
    refused.log(1, {"loss/mean": 1.0})
    refused.close()
    assert len(platform.got) == 1
    assert len(warned) == 1
    assert "it did not register the run: the Prime platform refused POST" in warned[0]
    assert "HTTP 403" in warned[0]
    platform.refuses = False
    shown = Monitor([PrimeSink(config, {"max_steps": 3})])
    platform.refuses = True
    shown.log(1, {"loss/mean": 1.0})
    shown.log(2, {"loss/mean": 1.0})
    assert len(warned) == 2, "warned once while it lasts"
    platform.refuses = False
    shown.close()
    assert json.loads(platform.got[-1][3]) == {"status": "failed"}, "it ended before its last step"


@contextmanager
def answering(answer: bytes, *, then_wait: bool, calls: list[bytes]) -> Iterator[str]:
    """A server that gives every call the same bytes and hangs up, or says no more; `calls` gets their first lines."""
    done = threading.Event()

    class Answer(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            calls.append(self.rfile.readline())
            self.wfile.write(answer)
            if then_wait:
                done.wait(60.0)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Answer) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        done.set()
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    "answer", [b"SSH-2.0-OpenSSH\r\n", b"HTTP/1.1 201 Created\r\nContent-Length: 99\r\n\r\n{", b""]
)
def test_a_platform_that_breaks_off_costs_a_warning_and_no_run(
    platform: Platform, warned: list[str], answer: bytes
) -> None:
    with answering(answer, then_wait=False, calls=[]) as url:
        Monitor([PrimeSink(PrimeMonitorConfig(base_url=url), {})]).close()
    (warning,) = warned
    assert "it did not register the run: the Prime platform does not answer POST" in warning


@pytest.mark.parametrize("answer", [b"HTTP/1.1 500 No\r\nContent-Length: 99\r\n\r\n", b""])
def test_a_platform_that_says_no_more_is_left_alone_for_many_times_as_long(
    platform: Platform, warned: list[str], answer: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prime, "CALL_S", 0.2)
    monkeypatch.setattr(prime, "PATIENCE", 1000.0)
    monkeypatch.setenv("RUN_ID", "run-1")
    calls: list[bytes] = []
    with answering(answer, then_wait=True, calls=calls) as url:
        monitor = Monitor([PrimeSink(PrimeMonitorConfig(base_url=url), {})])
        for step in range(8):
            monitor.log(step, {"loss/mean": 1.0})
    assert len(calls) == 1, "each step has waited"
    (warning,) = warned
    assert "the Prime platform does not answer POST" in warning


def test_without_a_key_nothing_is_sent_and_that_is_said(
    platform: Platform, warned: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    monkeypatch.delenv("PRIME_API_KEY")
    monkeypatch.setenv("HOME", str(tmp_path))
    monitor = Monitor([PrimeSink(PrimeMonitorConfig(base_url=platform.url), {})])
    monitor.log(1, {"loss/mean": 1.0})
    monitor.close()
    assert platform.got == []
    assert warned == [
        "no metrics go to the Prime platform: set PRIME_API_KEY or run `prime login`, or leave out"
        " orchestrator.prime_monitor"
    ]
