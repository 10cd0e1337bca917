"""A W&B service that takes a run and then says no more; spoken to by a process of its own, as a program does it."""

import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

PROGRAM = """
import sys
from pathlib import Path
from meshrl.core.config.shared import WandbConfig
from meshrl.core.telemetry import monitor, sinks

sinks.WANDB_FINISH_S = 1.0
sink = sinks.WandbSink(WandbConfig(project="p", name="n"), Path(sys.argv[1]), {})
shown = monitor.Monitor([sink])
shown.log(1, {"a": 1.0})
Path(sys.argv[2]).touch()
shown.close()
"""
BUCKET = {
    "id": "b", "displayName": "n", "config": "{}", "sweepName": None, "historyLineCount": 0,
    "project": {"id": "p", "name": "p", "entity": {"id": "e", "name": "me"}},
}  # fmt: skip
VIEWER = {"id": "u", "entity": "me", "username": "me", "email": "a@b", "flags": "{}", "teams": {"edges": []}}


class Service(ThreadingHTTPServer):
    """Answers what a run asks when it begins. Once `ended` is there, it lets everyone wait until it is `done`."""

    daemon_threads = True

    def __init__(self, ended: Path) -> None:
        super().__init__(("127.0.0.1", 0), Calls)
        self.ended = ended
        self.done = threading.Event()


class Calls(BaseHTTPRequestHandler):
    server: Service

    def do_POST(self) -> None:
        asked = self.rfile.read(int(self.headers["Content-Length"]))
        if self.server.ended.exists():
            self.server.done.wait()
            return
        data: dict[str, object] = {"viewer": VIEWER, "serverInfo": {"features": []}}
        if b"mutation UpsertBucket" in asked:
            bucket = {**BUCKET, "name": json.loads(asked)["variables"]["name"]}
            data = {"upsertBucket": {"bucket": bucket, "inserted": True}}
        answer = json.dumps({"data": data}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *args: object) -> None:
        """Nothing on stderr."""


def test_a_run_ends_though_its_service_never_takes_the_last_metrics(tmp_path: Path) -> None:
    ended, folder = tmp_path / "ended", tmp_path / "run"
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    with Service(ended) as service:
        threading.Thread(target=service.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        url = f"http://127.0.0.1:{service.server_port}"
        try:
            done = subprocess.run(
                [sys.executable, "-c", PROGRAM, str(folder), str(ended)],
                env={**kept, "WANDB_BASE_URL": url, "WANDB_API_KEY": "a" * 40},
                capture_output=True, text=True, timeout=90.0, check=True,
            )  # fmt: skip
        finally:
            service.done.set()
            service.shutdown()
    (run,) = folder.glob("wandb/run-*")
    assert f"W&B failed and is off from here on: it does not take what is left; `wandb sync {run}` sends" in done.stderr
