"""The last lines of a program's log, which say why it ended."""

from __future__ import annotations

from pathlib import Path

from meshrl.launch.logtail import LAST_LINES, last_lines

LEAKS = """nanobind: leaked 4 instances!
 - leaked instance 0x7f4664a542a8 of type "triton._C.libtriton.ir.attribute"
nanobind: leaked 514 functions!
 - leaked function "create_icmpULT"
 - ... skipped remainder
nanobind: this is likely caused by a reference counting issue in the binding code.
See https://nanobind.readthedocs.io/en/latest/refleaks.html
"""


def test_the_last_lines_are_those_before_a_library_reports_its_leaks(tmp_path: Path) -> None:
    path = tmp_path / "inference.log"
    lines = [f"line {number}" for number in range(LAST_LINES)]
    cause = "ERROR inference the engine is lost: vLLM's engine process is gone"
    path.write_text("\n".join([*lines, cause]) + "\n" + LEAKS * LAST_LINES)
    assert last_lines(path) == [*lines[1:], cause]
    assert last_lines(tmp_path / "none.log") == []
