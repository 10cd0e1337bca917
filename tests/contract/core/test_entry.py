"""Ctrl-C in the first second of every program."""

import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

SCRIPTS = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]["scripts"]

# Runs a console script, with an import that takes as long as some do on a cold disk.
SLOW_IMPORT = """
import importlib, sys, time

class SlowImport:
    def find_spec(self, name, path=None, target=None):
        if name == "loguru":
            print("importing", flush=True)
            while True:  # a signal between print and one long sleep would wait for the sleep's end
                time.sleep(0.01)

sys.meta_path.insert(0, SlowImport())
module, function = sys.argv.pop(1).split(":")
getattr(importlib.import_module(module), function)()
"""

# A program that is through with its work and takes its time to end.
SLOW_END = """
import asyncio, sys, time
from meshrl.core import entry
from meshrl.core import program

async def work(stop):
    return 0

class Program:
    @staticmethod
    def main():
        program.run(work)
        print("ended", flush=True)
        while True:  # as above
            time.sleep(0.01)

sys.modules["program"] = Program
entry._call("program")
"""


def interrupted(code, *arguments):
    """Exit code and stderr of a python that gets SIGINT after its first line of output."""
    process = subprocess.Popen(
        [sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
        return process.returncode, said
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("script", sorted(SCRIPTS))
def test_ctrl_c_during_the_imports_ends_a_program_without_a_traceback(script):
    assert interrupted(SLOW_IMPORT, SCRIPTS[script]) == (130, "")


def test_ctrl_c_after_the_work_is_done_ends_a_program_without_a_traceback():
    assert interrupted(SLOW_END) == (130, "")
