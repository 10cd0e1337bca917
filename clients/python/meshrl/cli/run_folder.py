"""Reads what a run has written to its output folder."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import socket
import sqlite3
import time
import tomllib
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import zstandard

from meshrl.cli.trace_file import RunSpan, read_lines, spans_of, trace_files
from meshrl.diagnosis.causes import Observed
from meshrl.diagnosis.history import MetricsHistory
from meshrl.diagnosis.outcome import RunOutcome, outcome_of
from meshrl.machine.addresses import local_address
from meshrl.wire.growing_file import json_records, lines_from_the_end
from meshrl.wire.program_state import SILENT_AFTER_S, ProgramState, read_states
from meshrl.wire.saved_steps import step_files, steps_in
from meshrl.wire.values import JsonObject

if TYPE_CHECKING:
    from meshrl.client.credentials import Credentials

FULL_BYTES = 2**20
"""With less room no program writes logs, states and metrics."""
UNSET = "None"
"""Of a key without a value in a resolved configuration: TOML has no null."""


@dataclass(frozen=True, kw_only=True)
class RunEnd:
    """The program that died first, the time in the log, the reason, and the end of its log."""

    program: str
    at: str
    why: str
    log: str


@dataclass(frozen=True)
class RunFolder:
    path: Path

    def config(self, program: str) -> JsonObject:
        """The program's resolved configuration, empty without one that can be read."""
        path = self.path / "configs" / f"{program}.toml"
        try:
            found = path.stat()
            return _toml(path, found.st_mtime_ns, found.st_size)
        except (OSError, ValueError):  # not this run's: a program that another machine runs
            return {}

    def addresses(self, service: str) -> tuple[str, ...]:
        """host:port of each `rollout`, `trainer` or `weights` server, or where workers dial in (`exchange`). Programs
        started by hand write no configuration: then those of this machine."""
        if service == "exchange":
            exchange = self.config("orchestrator").get("exchange")
            return (
                (local_address(exchange["host"], exchange["port"]),)
                if isinstance(exchange, dict) and exchange["port"]
                else ()
            )
        named = self.config("orchestrator").get("services", {}).get(service)
        if named is not None and named != UNSET:
            return tuple(named) if isinstance(named, list) else (str(named),)
        server = self.config(service).get("server")
        if isinstance(server, dict):
            return (local_address(server["host"], server["port"]),)
        state = self.states().get(service)
        if state is None or state.host != socket.gethostname():
            return ()
        served = (address.rpartition(":") for address in state.serves)
        return tuple(local_address(host.strip("[]"), port) for host, _, port in served)

    def credentials(self) -> Credentials | None:
        """The operator's. None if MESHRL_TLS_ variables are set, or the folder has none."""
        from meshrl.client.credentials import PREFIX, CredentialFiles, credentials_of  # gRPC takes 0.1 s to import

        folder = self.path / "credentials"
        if self.path.name.startswith("run_") and not os.path.exists(folder):  # a run of a mesh, whose folder is above
            folder = self.path.resolve().parent / "credentials"
        if any(variable.startswith(PREFIX) and value for variable, value in os.environ.items()):
            return None
        if os.access(folder / "ca.key", os.R_OK):  # Path.exists raises in another user's folder
            return _operator(folder)
        token = folder / "operator.token"
        return credentials_of(CredentialFiles(token=token)) if os.access(token, os.R_OK) else None

    @property
    def runs(self) -> list[str]:
        """The folders of a mesh's runs, by name."""
        return sorted(path.name for path in self.path.glob("run_*"))

    def lacks(self, what: str, how: str = " with -o") -> str:
        """An error's text: this folder has no `what`, so name a run's (`how`)."""
        text = f"{self.path} has no {what}: name a run's output folder{how}"
        return f"{text}; those of this mesh are {', '.join(self.runs)}" if self.runs else text

    @property
    def weights(self) -> Path:
        return self.path / "weights"

    def saved_steps(self, *, to_resume: bool = False) -> list[int]:
        """With a snapshot of the weights, or those that a run can resume from, in order."""
        return steps_in(self.path / "checkpoints", "trainer") if to_resume else steps_in(self.path / "weights")

    def last_step(self) -> JsonObject | None:
        """The newest of metrics.jsonl. Evaluations have records of their own, and the last line may be torn."""
        newest_first = json_records(lines_from_the_end(self.path / "metrics.jsonl", self._first_record()))
        return next((record for record in newest_first if "time/step" in record), None)

    def metrics_age_s(self, now_s: float) -> float | None:
        try:
            return max(0.0, now_s - (self.path / "metrics.jsonl").stat().st_mtime)
        except OSError:
            return None

    def is_held(self) -> bool:
        """Whether an `rl` on this machine holds the folder's lock."""
        try:
            with (self.path / "rl.lock").open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:  # no such file: it has ended
            return False
        return False

    def is_running(self) -> bool:
        """Whether an `rl` or other programs of the run are alive."""
        return self.is_held() or any(time.time() - state.at_s < SILENT_AFTER_S for state in self.states().values())

    def states(self) -> dict[str, ProgramState]:
        return read_states(self.path)

    def disk_trouble(self) -> str:
        try:
            free = shutil.disk_usage(self.path).free
        except OSError:  # no such folder
            return ""
        return f"the disk of {self.path} is full: {free / 2**20:.1f} MiB are free" if free < FULL_BYTES else ""

    def history(self) -> MetricsHistory:
        """As written by now; `read_on` reads later ones."""
        history = self.unread_history()
        history.read_on()
        return history

    def unread_history(self) -> MetricsHistory:
        return MetricsHistory(self.path / "metrics.jsonl", self._first_record())

    def _first_record(self) -> int:
        """The offset in metrics.jsonl of the newest run's records, after those of earlier runs in the folder."""
        with suppress(sqlite3.DatabaseError):  # all are shown then
            if (ledger := self.ledger()) is not None:
                with closing(ledger):
                    query = "SELECT metrics_offset FROM runs WHERE run = (SELECT MAX(run) FROM runs) AND first_step = 1"
                    newest = ledger.execute(query).fetchone()
                return 0 if newest is None else int(newest["metrics_offset"])
        return 0

    def outcome(self, history: MetricsHistory | None = None, price: float | None = None) -> RunOutcome | None:
        """None without a step. `price` is per device-hour, by default the configuration's."""
        history = history or self.history()
        engine = self.config("inference")
        size = engine.get("tensor_parallel_size")
        stated = self.config("orchestrator").get("log", {}).get("device_hour_price")
        return outcome_of(
            history.series.columns,
            devices_per_engine=size if isinstance(size, int) else 1,
            shared=engine.get("share_gpu") is True,
            price=price if price is not None else stated if isinstance(stated, float | int) else None,
        )

    def end(self) -> RunEnd | None:
        told: list[str] = []  # what follows the error, the last line first
        cause = ""  # the last error of the program that died
        for raw in lines_from_the_end(self.path / "logs" / "rl.log"):  # none of programs that were started by hand
            line = raw.decode(errors="replace")
            at, level, message = log_line(line)
            if message.startswith("started "):  # of the run that is meant
                return None
            if level == "ERROR" and at:
                why, _, place = message.partition(". Ending all other")
                program = why.partition(" died: ")[0] if place else "rl"
                why += f": {cause}" if place and cause else ""
                log = "\n".join([message, *reversed(told)])
                return RunEnd(program=program, at=at, why=why, log=log)
            if level == "ERROR" and not cause:
                cause = message
            told.append(line)
        return None

    def why_it_ended(self) -> str:
        """The error that ended `rl`, in one line; "" after a good end, or while it runs."""
        end = self.end()
        return "" if end is None else end.why

    def settings(self) -> dict[str, str]:
        found: dict[str, str] = {}

        def add(name: str, value: object) -> None:
            if isinstance(value, dict):
                for key, one in value.items():
                    add(f"{name}.{key}", one)
            else:
                found[name] = str(value)

        for path in sorted((self.path / "configs").glob("*.toml")):
            add(path.stem, self.config(path.stem))
        return found

    def observed(self, history: MetricsHistory | None = None) -> Observed:
        """The input of `diagnose`. `history`: metrics that were read before."""
        history = history or self.history()
        history.read_on()
        return Observed(
            columns=history.series.columns,
            synchronous=self.config("orchestrator").get("max_async_level") == 0,
            loop_lags_s={name: state.loop_lag_s for name, state in self.states().items()} if self.is_running() else {},
            dropped=self._dropped() if history.last is None and not self.ledger_trouble() else {},
        )

    def ledger_trouble(self) -> str:
        """Why the ledger cannot be read."""
        try:
            self._dropped()
        except sqlite3.DatabaseError as error:
            return str(error)
        return ""

    def _dropped(self) -> dict[str, int]:
        ledger = self.ledger()
        if ledger is None:
            return {}
        with closing(ledger):
            query = "SELECT reason, COUNT(*) AS count FROM rollouts WHERE state = 'dropped' GROUP BY reason"
            return {row["reason"]: row["count"] for row in ledger.execute(query)}

    def ledger(self) -> sqlite3.Connection | None:
        """Read-only, None without a ledger; the caller closes it."""
        path = self.path / "ledger.sqlite"
        try:
            connection = open_to_read(path)
        except sqlite3.OperationalError:
            if path.exists():  # and cannot be opened
                raise
            return None
        connection.row_factory = sqlite3.Row
        return connection

    def sampled_steps(self) -> list[int]:
        """Steps with kept rollouts."""
        return sorted(step_files(self.path / "rollouts", ".jsonl.zst"))

    def samples(self, step: int) -> list[JsonObject]:
        """The kept rollouts of a step."""
        try:
            with zstandard.open(self.path / "rollouts" / f"step_{step}.jsonl.zst", "rt", encoding="utf-8") as file:
                return [json.loads(line) for line in file]
        except FileNotFoundError:
            return []

    def attempts(self) -> list[int]:
        numbers = [path.name.removeprefix("attempt_") for path in (self.path / "logs").glob("attempt_*")]
        return sorted(int(number) for number in numbers if number.isdecimal())

    def logs(self, attempt: int | None = None) -> dict[str, Path]:
        """The log files of one start, by default the newest, by name: `trainer`, `envs/train/words/env_server`."""
        attempts = self.attempts()
        root = self.path / "logs"
        if attempts:
            root /= f"attempt_{attempts[-1] if attempt is None else attempt}"
        return {str(path.relative_to(root).with_suffix("")): path for path in sorted(root.rglob("*.log"))}

    def spans(self, program: str = "") -> Iterator[RunSpan]:
        """Of programs whose names begin with `program`, by default all. Torn lines and vanished files are left out."""
        for path in trace_files(self.path / "traces"):
            if not path.name.startswith(program):
                continue
            try:
                lines, _ = read_lines(path)
            except FileNotFoundError:  # its program has just moved it aside, to make room for newer spans
                continue
            yield from spans_of(path, lines)


def open_to_read(path: Path) -> sqlite3.Connection:
    """Read-only, unless a killed orchestrator has left a rollback journal (on a network file system), which must be
    rolled back before reading. Raises sqlite3.OperationalError for a missing or unreadable file."""
    journal = path.with_name(f"{path.name}-journal")
    half_written = journal.exists() and journal.stat().st_size > 0 and os.access(path, os.W_OK)
    mode = "rw" if half_written else "ro"
    return sqlite3.connect(f"{path.resolve().as_uri()}?mode={mode}", uri=True, timeout=5.0)


@lru_cache(maxsize=64)
def _toml(path: Path, _mtime_ns: int, _size: int) -> JsonObject:
    """Cached by time and size: the page asks every few seconds."""
    with path.open("rb") as file:
        return tomllib.load(file)


def log_line(line: str) -> tuple[str, str, str]:
    """Time, level and message of a program's log, text or JSON; empty where there are none. The last lines of another
    log, which are indented, have no time."""
    if line.startswith("{"):
        try:
            record = json.loads(line)["record"]
            return record["time"]["repr"][:23].replace(" ", "T"), record["level"]["name"], record["message"]
        except (ValueError, KeyError, TypeError):
            return "", "", ""
    parts = line.split(maxsplit=3)  # time, level, program, message
    level, message = (parts[1], parts[3]) if len(parts) == 4 else ("", "")
    return line[:23] if line[10:11] == "T" else "", level, message


def _operator(folder: Path) -> Credentials:
    from meshrl.client.authority import Authority, renew_in_s  # gRPC takes 0.1 s to import
    from meshrl.client.credentials import TRUST_FILE, CredentialError, CredentialFiles, credentials_of
    from meshrl.client.trust import Role

    own = folder / "operator-meshrl"
    try:
        if not (own / "cert.pem").exists() or renew_in_s(own / "cert.pem") <= 0.0:
            Authority(folder).issue(own, Role.OPERATOR, "meshrl")
        files = CredentialFiles.of_folder(own)
        return credentials_of(CredentialFiles(ca=files.ca, cert=files.cert, key=files.key, trust=folder / TRUST_FILE))
    except (ValueError, OSError, sqlite3.Error) as error:
        raise CredentialError(f"the run's authority in {folder} cannot be used: {error}") from error
