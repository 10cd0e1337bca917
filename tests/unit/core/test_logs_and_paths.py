"""One log format, whoever logs; one place for every file."""

import json
import logging
from pathlib import Path

import pytest
from loguru import logger

from meshrl.core.logs import setup_logging
from meshrl.core.paths import Layout


@pytest.fixture(autouse=True)
def restored_logging():
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    logging.captureWarnings(False)
    logger.remove()
    root.handlers[:] = handlers
    root.setLevel(level)


def test_lines_carry_time_level_and_process(tmp_path, capsys):
    setup_logging("trainer", "info", tmp_path / "logs" / "trainer.log")
    logger.info("step {} done", 3)
    logger.debug("not shown")
    line = (tmp_path / "logs" / "trainer.log").read_text()
    assert line.split()[1:] == ["INFO", "trainer", "step", "3", "done"]
    assert "trainer step 3 done" in capsys.readouterr().out.replace("\x1b[36m", "").replace("\x1b[0m", "")


def test_the_standard_library_logs_the_same_way(tmp_path):
    setup_logging("rollout", "debug", tmp_path / "log")
    logging.getLogger("somelib").warning("odd {braces} %d", 7)
    logging.getLogger("httpx").info("a request")
    logging.getLogger("somelib").log(25, "between levels")
    lines = (tmp_path / "log").read_text().splitlines()
    assert [line.split()[1:] for line in lines] == [
        ["WARNING", "rollout", "odd", "{braces}", "7"],
        ["Level", "25", "rollout", "between", "levels"],
    ]


def test_json_lines_can_be_parsed(tmp_path):
    setup_logging("weights", "info", tmp_path / "log", json_logging=True)
    logger.bind(version=4).info("committed")
    record = json.loads((tmp_path / "log").read_text())["record"]
    assert record["message"] == "committed"
    assert record["extra"] == {"process": "weights", "version": 4}


def test_setting_up_again_replaces_what_was_there(tmp_path):
    setup_logging("a", "info", tmp_path / "a.log")
    setup_logging("b", "info", tmp_path / "b.log")
    logger.info("once")
    assert (tmp_path / "a.log").read_text() == ""
    assert "once" in (tmp_path / "b.log").read_text()


def test_everything_lies_under_the_output_dir():
    layout = Layout(Path("out"))
    assert layout.log("trainer") == Path("out/logs/trainer.log")
    assert layout.config("rl") == Path("out/configs/rl.toml")
    assert layout.trace("weights") == Path("out/traces/weights.jsonl")
    assert layout.weights_step(3) == Path("out/weights/step_3")
    assert layout.checkpoint_step(3) == Path("out/checkpoints/step_3")
    for path in (layout.metrics_jsonl, layout.summary_json, layout.broadcasts, layout.hub, layout.ledger):
        assert path.parent == Path("out")
