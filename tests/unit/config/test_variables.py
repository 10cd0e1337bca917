"""What a program says of PRIME_ variables that it cannot use."""

from typing import Any

import pytest


def test_all_variables_that_cannot_be_read_come_in_one_message(refused: Any) -> None:
    lines = refused("--max-step", "5", environ={"PRIME_GPU_IDS": "[1", "PRIME_OPTIONS": "{x"}).splitlines()
    assert lines[0] == "prog: the configuration has 3 errors"
    assert [line.split(", got")[0] for line in lines[1:-1]] == [
        "  unknown option --max-step; did you mean --max-steps?",
        "  PRIME_GPU_IDS: expected JSON",
        "  PRIME_OPTIONS: expected JSON",
    ]


@pytest.mark.parametrize(
    ("variable", "said"),
    [
        ("PRIME_MODEL__ZZZ", "model has no key 'zzz'; keys of model are name, dtype, device, trust_remote_code"),
        ("PRIME_ENV__ID", "env has no key 'id': env is a list, so a place comes next: PRIME_ENV__0__ID"),
        ("PRIME_MAX_STEPS__X", "max_steps has no key 'x': max_steps is int or None and has no keys below it"),
    ],
)
def test_a_variable_that_is_not_used_says_what_there_is(
    load: Any, capsys: pytest.CaptureFixture[str], variable: str, said: str
) -> None:
    assert load(environ={variable: "x"}) == load()
    assert capsys.readouterr().err == f"prog: warning: {variable} is not used: {said}\n"
