"""scripts/tmux.sh with the real tmux: what its panes show, and what it refuses."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "scripts" / "tmux.sh"
pytestmark = pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed: apt-get install tmux")


@pytest.fixture
def environ(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Of a tmux server of its own."""
    own = {**os.environ, "TMUX_TMPDIR": str(tmp_path), "TERM": "xterm"}
    own.pop("TMUX", None)
    yield own
    subprocess.run(["tmux", "kill-server"], env=own, capture_output=True, timeout=60, check=False)


def run(environ: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        arguments, env=environ, capture_output=True, text=True, timeout=60, check=False, stdin=subprocess.DEVNULL
    )


@pytest.mark.parametrize("as_flags", [True, False])
def test_four_panes_follow_logs_that_come_later(as_flags: bool, environ: dict[str, str], tmp_path: Path) -> None:
    output_dir = tmp_path / "my run"
    given = ["-s", "job", "-o", str(output_dir)] if as_flags else ["job", str(output_dir)]
    done = run(environ, "bash", str(SCRIPT), *given)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"session job follows {output_dir}: tmux attach -t job\n"
    assert run(environ, "bash", str(SCRIPT), *given).returncode == 0  # again: it is there already
    windows = run(environ, "tmux", "list-windows", "-t", "job", "-F", "#{window_name} #{window_panes}").stdout
    assert windows.splitlines() == ["Launcher 1", "Logs 4"]
    titles = run(environ, "tmux", "list-panes", "-t", "job:Logs", "-F", "#{pane_title}").stdout.split()
    assert titles == ["Trainer", "Orchestrator", "Inference", "Environments"]
    logs = output_dir / "logs"
    (logs / "envs" / "train" / "reverse_text").mkdir(parents=True)
    files = ["trainer.log", "orchestrator.log", "inference.log", "envs/train/reverse_text/env_worker_0.log"]
    for file in files:
        (logs / file).write_text(f"a line of {file}\n")
    for pane, file in enumerate(files):
        end = time.monotonic() + 120
        while (
            f"a line of {Path(file).name}" not in (shown := capture(environ, pane)) and f"a line of {file}" not in shown
        ):
            assert time.monotonic() < end, shown
            time.sleep(0.1)


def capture(environ: dict[str, str], pane: int) -> str:
    return run(environ, "tmux", "capture-pane", "-p", "-J", "-t", f"job:Logs.{pane}").stdout


@pytest.mark.parametrize("given", [["-x"], ["a", "b", "c"], ["-s", "a.b"]])
def test_what_it_does_not_know_is_refused(given: list[str], environ: dict[str, str]) -> None:
    done = run(environ, "bash", str(SCRIPT), *given)
    assert done.returncode == 2
    assert "usage: " in done.stderr or "a session's name" in done.stderr


def test_meshrl_watch_draws_a_run_in_place(environ: dict[str, str], tmp_path: Path) -> None:
    """In a real terminal: its second look replaces the first, and Ctrl-C gives the prompt back."""
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "weights.toml").write_text('[server]\nhost = "127.0.0.1"\nport = 1\n')
    watch = f"{sys.executable} -m meshrl.cli.main watch --interval 0.2 -o {tmp_path}"
    assert run(environ, "tmux", "new-session", "-d", "-s", "watch", "-x", "120", "-y", "20", "sh").returncode == 0
    run(environ, "tmux", "send-keys", "-t", "watch", f"{watch}; echo ended with $?", "Enter")
    shown = shown_in(environ, "watch", lambda lines: any(line.startswith("weights") for line in lines))
    assert sum("127.0.0.1:1 " in line for line in shown) == 1
    assert not any("watch --interval" in line for line in shown)  # the screen was cleared
    run(environ, "tmux", "send-keys", "-t", "watch", "C-c")
    shown_in(environ, "watch", lambda lines: any(line.endswith("ended with 0") for line in lines))


def shown_in(environ: dict[str, str], pane: str, wanted: Callable[[list[str]], bool]) -> list[str]:
    """What a pane shows once it is as wanted."""
    end = time.monotonic() + 120
    while not wanted(lines := run(environ, "tmux", "capture-pane", "-p", "-t", pane).stdout.splitlines()):
        assert time.monotonic() < end, lines
        time.sleep(0.1)
    return lines
