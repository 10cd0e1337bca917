"""Shows a run on the Prime Intellect platform: registers it, sends metrics, samples, distributions and its end."""

from __future__ import annotations

import http.client
import io
import json
import math
import os
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from loguru import logger

from meshrl.core.config.shared import PrimeMonitorConfig
from meshrl.core.telemetry.monitor import SampleRow, Sink, SinkError
from meshrl.wire.values import JsonObject

CALL_S = 30.0
PATIENCE = 10.0
"""Times a failed call's duration, until the next call."""
_STORED = Path(".prime") / "config.json"


class PrimeSink(Sink):
    """One run of the platform. The variable RUN_ID names one that the platform has registered itself."""

    def __init__(self, config: PrimeMonitorConfig, run: JsonObject) -> None:
        """`run` is what the platform registers. Without a key, or if it refuses the run, nothing is sent."""
        self._url = config.base_url.rstrip("/")
        self._key = os.environ.get(config.api_key_var) or _stored_key()
        self._run_id = os.environ.get("RUN_ID", "")
        self._registered = False
        self._ask_again_at = 0.0
        self._step, self._max_steps = 0, int(run.get("max_steps", 0))
        if not self._key:
            logger.warning(
                "no metrics go to the Prime platform: set {} or run `prime login`, or leave out"
                " orchestrator.prime_monitor",
                config.api_key_var,
            )
            return
        if self._run_id:
            return
        named = {"name": config.run_name, "team_id": config.team_id}
        try:
            answer = self._call(
                "POST", "external-runs", {**run, **{key: value for key, value in named.items() if value}}
            )
            self._run_id = str(answer["run"]["id"])
            self._registered = True
            logger.info("the run is {} on the Prime platform", self._run_id)
        except (SinkError, KeyError, TypeError) as error:
            logger.warning("no metrics go to the Prime platform: it did not register the run: {}", error)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._step = max(step, self._step)
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        self._send("metrics", {"metrics": {**finite, "step": step}})

    def write_distributions(self, step: int, values: Mapping[str, Sequence[float]]) -> None:
        finite = {name: [float(one) for one in numbers if math.isfinite(one)] for name, numbers in values.items()}
        self._send("distributions", {"step": step, "distributions": finite})

    def write_samples(self, step: int, rows: Sequence[SampleRow]) -> None:
        """A table in Parquet. Raises SinkError, also without pyarrow."""
        if not self._run_id or not rows:
            return
        table = _parquet(self._run_id, step, rows)
        place = self._send("samples/presign", {"step": step}).get("data", {})
        try:
            _request("PUT", str(place["presignedUrl"]), table, {"Content-Type": "application/parquet"})
            self._send("samples/confirm", {"step": step, "s3_key": place["s3Key"]})
        except KeyError as error:
            raise SinkError(f"the Prime platform named no place for the samples of step {step}") from error

    def close(self) -> None:
        """A run that ends early has failed."""
        if self._registered:
            status = "completed" if self._step >= self._max_steps else "failed"
            self._call("PUT", f"external-runs/{self._run_id}/status", {"status": status})

    def _send(self, what: str, values: Mapping[str, object]) -> JsonObject:
        if not self._run_id:
            return {}
        began = time.monotonic()
        if began < self._ask_again_at:
            raise SinkError("the Prime platform did not answer and is left alone for a while")
        try:
            return self._call("POST", what, {"run_id": self._run_id, **values})
        except SinkError:
            now = time.monotonic()
            self._ask_again_at = now + PATIENCE * (now - began)
            raise

    def _call(self, method: str, what: str, values: Mapping[str, object]) -> JsonObject:
        headers = {
            "Authorization": f"Bearer {self._key}", "x-api-key": self._key or "", "Content-Type": "application/json"
        }  # fmt: skip
        answer = _request(method, f"{self._url}/{what}", json.dumps(values).encode(), headers)
        try:
            found = json.loads(answer or b"{}")
        except ValueError as error:
            raise SinkError(f"the Prime platform answered {what} with what is no JSON") from error
        return found if isinstance(found, dict) else {}


def _request(method: str, url: str, body: bytes, headers: Mapping[str, str]) -> bytes:
    if not url.startswith(("http://", "https://")):
        raise SinkError(f"{url!r} is no address of the Prime platform; set orchestrator.prime_monitor.base_url")
    request = urllib.request.Request(url, body, dict(headers), method=method)  # looked at above
    try:
        try:
            with urllib.request.urlopen(request, timeout=CALL_S) as answer:
                return bytes(answer.read())
        except urllib.error.HTTPError as error:
            with error:
                said = error.read(500).decode(errors="replace")
            raise SinkError(f"the Prime platform refused {method} {url}: HTTP {error.code}: {said}") from error
    # No such host, refused, too late, broken off, or not HTTP.
    except (OSError, http.client.HTTPException) as error:
        raise SinkError(f"the Prime platform does not answer {method} {url}: {error}") from error


def _stored_key() -> str | None:
    try:
        return json.loads((Path.home() / _STORED).read_text()).get("api_key") or None
    except (OSError, ValueError, AttributeError, RuntimeError):  # never logged in
        return None


def _parquet(run_id: str, step: int, rows: Sequence[SampleRow]) -> bytes:
    try:
        import pyarrow  # comes with meshrl[trainer]
        from pyarrow import parquet
    except ModuleNotFoundError as error:
        raise SinkError("no samples go to the Prime platform: pip install pyarrow") from error
    now = datetime.now(UTC)
    table = [
        {
            "run_id": run_id, "step": step, "tag": "", "problem_id": number, "sample_id": number, "prompt": row.prompt,
            "completion": row.completion, "env_name": row.environment, "task": row.task_key, "reward": row.reward,
            "advantage": row.advantage, "created_at": now,
        }
        for number, row in enumerate(rows)
    ]  # fmt: skip
    file = io.BytesIO()
    parquet.write_table(pyarrow.Table.from_pylist(table), file)
    return file.getvalue()
