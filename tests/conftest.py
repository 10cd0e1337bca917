"""Settings of every test: kernels on one thread, so that tests side by side do not starve each other.

What a run with several workers hands to each of them is in `side_by_side`.
"""

import ast
import functools
import gc
import os
import sys
from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest
from loguru import logger

import side_by_side

# A machine that is busy is no failure.
hypothesis.settings.register_profile("patient", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("patient")
os.environ.setdefault("OMP_NUM_THREADS", "1")
gc.disable()  # until all tests are known: what only comes in makes no garbage

_parse = ast.parse


@functools.wraps(_parse)
def _parse_uncollected(*args: Any, **kwargs: Any) -> Any:
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return _parse(*args, **kwargs)
    finally:
        if was_enabled:
            gc.enable()


if sys.version_info < (3, 11, 8):
    # pytest parses source to report a failure. There that ends the whole session with a SystemError whenever a
    # garbage collection in the midst of it logs a traceback, which is parsed, too: CPython issue 106905.
    ast.parse = _parse_uncollected


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    return side_by_side.scheduler(config, log)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):  # a worker among others
        items.sort(key=lambda item: side_by_side.rank_of(item.nodeid))


def pytest_collection_finish() -> None:
    """Takes what the tests have imported, gigabytes of it, out of the collector's sight."""
    gc.collect()
    gc.freeze()
    gc.enable()


def _lines(level: str, line: str = "{message}") -> Iterator[list[str]]:
    lines: list[str] = []
    sink = logger.add(lambda message: lines.append(message.removesuffix("\n")), level=level, format=line)
    yield lines
    logger.remove(sink)


@pytest.fixture
def said() -> Iterator[list[str]]:
    """The texts of what the test logs, from INFO on."""
    yield from _lines("INFO")


@pytest.fixture
def warned() -> Iterator[list[str]]:
    """The texts of what the test logs, from WARNING on."""
    yield from _lines("WARNING")


@pytest.fixture
def errors_said() -> Iterator[list[str]]:
    """Every error that the test logs, with its traceback where it has one."""
    yield from _lines("ERROR", "{message}\n{exception}")
