"""One message for what is wrong: what was expected, what came, what to change."""

from collections.abc import Callable
from typing import Any

import pytest

END = "Run 'prog --help' for every key.\n"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["@a.toml"], "prog: '@a.toml' needs a space between @ and the file: write '@ a.toml'"),
        (["--model", "@a.toml"], "--model '@a.toml' needs a space between @ and the file: write '@ a.toml'"),
        (["--model@", "a.toml"], "'--model@' needs a space before @: write '--model @ file.toml'"),
        (["@"], "expected a TOML file after '@', but the command line ends; write '@ path/to/file.toml'"),
        (["@", "--bench"], "expected a TOML file after '@', but got '--bench'"),
        (["--max-steps", "@", "a.toml"], "only a section takes a file, max_steps is int or None"),
        (
            ["a.toml"],
            "unexpected argument 'a.toml': values follow a flag (--key a.toml) and files follow an @ (@ a.toml)",
        ),
        (["--max-step", "5"], "unknown option --max-step; did you mean --max-steps?"),
        (["--model.nam", "5"], "unknown option --model.nam; did you mean --model.name?"),
        (["--resume-step", "5"], "unknown option --resume-step; did you mean --ckpt.resume-step?"),
        (["--ckpt.zzz", "5"], "unknown option --ckpt.zzz; keys of ckpt are interval, resume-step"),
        (["--modle.name", "5"], "unknown option --modle.name; did you mean --model.name?"),
        (["--prog.model.name", "5"], "unknown option --prog.model.name; did you mean --model.name?"),
        (["--resume-step.x", "5"], "unknown option --resume-step.x; did you mean --ckpt.resume-step?"),
        (["--no-wandbb"], "did you mean --wandb?"),
        (["--no-group-size"], "--no-group-size: group_size cannot be switched off, it is int; give it a value instead"),
        (["--no-bench", "yes"], "--no-bench takes no value, got 'yes'; leave the value out"),
        (["--max-steps"], "--max-steps needs a value (int or None): write '--max-steps VALUE'"),
        (["--model"], "--model is a section that is always on; set one of its keys, such as --model.name"),
        (["--max-steps.x", "1"], "max_steps is int or None and has no keys below it"),
        (["--env.id", "x"], "env is a list, so a place comes next: --env.0.id"),
        (["--env.1.id", "x"], "env.1 is set but env.0 is not; places of a list start at 0 and leave no gap"),
        (["--gpu-ids", "[1"], "--gpu-ids: expected JSON, got '[1', which does not parse"),
        (["--max-steps", "ten"], "max_steps: expected int or None, got 'ten' (from --max-steps)"),
        (["--bench", "maybe"], "bench: expected true | false, got 'maybe' (from --bench)"),
        (["--gpu-ids", "0,x"], "gpu_ids.1: expected int, got 'x' (from --gpu-ids)"),
        (["--level", "x"], "level: expected int | \"auto\", got 'x' (from --level)"),
        (["--model.dtype", "f16"], 'model.dtype: expected "auto" | "float32" | "bfloat16", got \'f16\''),
        (["--group-size", "0"], "group_size: expected int, got '0' (from --group-size); it should be greater than or"),
        (["--loss.type", "x"], 'loss.type: expected "default" | "aipo", got \'x\' (from --loss.type)'),
        (["--env.0.ratio", "1"], "env.0.id: needs a value (text); set it in a file or with --env.0.id"),
        (["--ckpt", "5"], "ckpt: expected section or None, got '5' (from --ckpt)"),
    ],
)
def test_wrong_argument_is_explained(refused: Callable[..., str], argv: list[str], message: str) -> None:
    text = refused(*argv)
    assert message in text
    assert text.endswith(END)
    assert text.startswith("prog: ")


def test_all_problems_of_values_come_in_one_message(refused: Any, toml: Any) -> None:
    path = toml("max_steps = 'ten'\nmax_stepz = 1\n[model]\nnames = 'x'\n[[env]]\nidd = 'x'\n")
    lines = refused("@", path, "--group-size", "x").splitlines()
    assert lines == [
        "prog: the configuration has 5 errors",
        f"  max_stepz: no such key (from {path}:2); did you mean max_steps?",
        f"  model.names: no such key (from {path}:4); did you mean model.name?",
        f"  env.0.idd: no such key (from {path}:6); did you mean env.0.id?",
        "  group_size: expected int, got 'x' (from --group-size)",
        f"  max_steps: expected int or None, got 'ten' (from {path}:1)",
        "Run 'prog --help' for every key.",
    ]


def test_an_unknown_key_is_one_line_and_its_value_is_not_validated_as_that_of_the_nearest(
    refused: Any, toml: Any
) -> None:
    path = toml("[ckpt]\nresume_stepp = -2\n[modl]\nname = 5\n[eval_bse.client]\nkeys = [1]\n[losss.weights]\na = 1\n")
    assert refused("@", path).splitlines()[1:-1] == [
        f"  ckpt.resume_stepp: no such key (from {path}:2); did you mean ckpt.resume_step?",
        f"  modl: no such key (from {path}:4); did you mean model?",
        f"  eval_bse: no such key (from {path}:6); did you mean eval_base?",
        f"  losss: no such key (from {path}:8); did you mean loss?",
    ]


def test_keys_in_a_table_named_after_the_program_belong_outside_it(refused: Any, toml: Any) -> None:
    path = toml("[prog]\nmax_steps = 5\n[prog.model]\nname = 'x'\n")
    assert refused("@", path) == f"prog: prog.max_steps: no such key (from {path}:2); did you mean max_steps?\n{END}"


def test_a_key_that_an_unknown_one_may_have_meant_is_not_reported_as_missing(refused: Any, toml: Any) -> None:
    path = toml("[[env]]\nidd = 'x'\n")
    unknown = f"prog: env.0.idd: no such key (from {path}:2); did you mean env.0.id?\n{END}"
    assert refused("@", path) == unknown
    assert refused("--env.0.idd", "x").startswith("prog: unknown option --env.0.idd; did you mean --env.0.id?\n")


@pytest.mark.parametrize("argv", [["@", "none/x.toml"], ["@a.toml"], ["a.toml"], ["--modl", "@", "a.toml"]])
def test_nothing_is_reported_that_follows_from_a_file_that_was_not_read(refused: Any, argv: list[str]) -> None:
    assert "needs a value" in refused("--env.0.ratio", "1")
    assert "needs a value" not in refused("--env.0.ratio", "1", *argv)
    assert refused("--env.0.ratio", "1", *argv).startswith("prog: " + (
        "config file" if argv[-1] == "none/x.toml" else "unknown option" if len(argv) > 2 else
        "unexpected" if argv == ["a.toml"] else "'@a.toml' needs a space"
    ))  # fmt: skip


def test_a_file_may_begin_with_a_byte_order_mark(load: Any, tmp_path: Any) -> None:
    path = tmp_path / "bom.toml"
    path.write_bytes(b"\xef\xbb\xbfmax_steps = 3\n")
    assert load("@", str(path)).max_steps == 3


def test_all_wrong_arguments_come_in_one_message(refused: Any) -> None:
    text = refused("--foo", "1", "@a.toml", "stray")
    assert text.startswith("prog: the configuration has 3 errors\n")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "config file 'FILE' does not exist (looked in "),
        ("a folder", "cannot be read: Is a directory; expected a TOML file"),
        (b"\xff\xfe\x00", "is not UTF-8 text"),
        (b"[model]\nname = unquoted\n", "config file 'FILE' is not valid TOML: Invalid value (at line 2, column 8)"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(refused: Any, tmp_path: Any, content: Any, message: str) -> None:
    path = tmp_path / "a.toml"
    if content == "a folder":
        path.mkdir()
    elif content is not None:
        path.write_bytes(content)
    assert message.replace("FILE", str(path)) in refused("@", str(path))


def test_section_with_a_plain_value(refused: Any, toml: Any) -> None:
    assert "model: expected section, got 5" in refused("@", toml("model = 5\n"))


def test_wrong_value_in_a_variable_names_the_variable(refused: Any) -> None:
    text = refused(environ={"PRIME_MAX_STEPS": "ten"})
    assert text == f"prog: max_steps: expected int or None, got 'ten' (from PRIME_MAX_STEPS)\n{END}"


def test_two_spellings_that_disagree(refused: Any, toml: Any) -> None:
    path = toml("group_size = 4\nrollouts_per_example = 8\n")
    disagree = "group_size: two spellings of this key disagree, 4 and 8 (rollouts_per_example); keep only group_size"
    assert disagree in refused("@", path)


def test_empty_text_where_some_is_needed(refused: Any) -> None:
    assert refused("--model.name=").startswith("prog: model.name: expected text, got ''")
