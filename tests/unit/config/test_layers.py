"""Files, variables and their order."""

from typing import Any

import pytest


def test_order_is_command_line_then_later_file_then_earlier_file_then_variable_then_default(
    load: Any, toml: Any
) -> None:
    environ = {"PRIME_MODEL__NAME": "variable"}
    first, second = toml("[model]\nname = 'first'\n", "1.toml"), toml("[model]\nname = 'second'\n", "2.toml")
    assert load().model.name == "Qwen/Qwen3-0.6B"
    assert load(environ=environ).model.name == "variable"
    assert load("@", first, environ=environ).model.name == "first"
    assert load("@", first, "@", second, environ=environ).model.name == "second"
    assert load("--model.name", "flag", "@", first, "@", second, environ=environ).model.name == "flag"


def test_a_tilde_is_the_users_folder_in_every_layer(load: Any, toml: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    file = toml("output_dir = '~/runs'\ntags = ['~/a', '~b', 'c~/']\n[[env]]\nid = 'x'\nargs = {path = '~/kept'}\n")
    config = load("@", file, "--model.name=~/models/m", environ={"PRIME_WANDB__NAME": "~/run"})
    assert (str(config.output_dir), config.tags) == ("/home/me/runs", ["/home/me/a", "~b", "c~/"])
    assert (config.model.name, config.wandb.name) == ("/home/me/models/m", "/home/me/run")
    assert config.env[0].args == {"path": "~/kept"}, "an environment's own arguments are its own"
    assert load("--tags", "~/a,b").tags == ["/home/me/a", "b"]


def test_an_empty_path_is_refused_and_so_are_numbers_without_end(load: Any, refused: Any) -> None:
    assert "output_dir: is empty (from --output-dir); name a path" in refused("--output-dir", "")
    assert "loss.delta: expected float, got 'inf'" in refused("--loss.delta", "inf")
    assert load("--model.name", "m", "--tags", "").tags == []


def test_files_merge_key_by_key(load: Any, toml: Any) -> None:
    first = toml("max_steps = 5\ntags = ['a', 'b']\n[model]\nname = 'm'\ndtype = 'float32'\n", "1.toml")
    second = toml("tags = ['c']\n[model]\nname = 'n'\n", "2.toml")
    config = load("@", first, "@", second)
    assert (config.max_steps, config.tags) == (5, ["c"])
    assert (config.model.name, config.model.dtype) == ("n", "float32")


def test_section_file_fills_one_section(load: Any, toml: Any) -> None:
    config = load("--model", "@", toml("name = 'm'\n"), "--wandb", "@", toml("project = 'p'\n", "w.toml"))
    assert (config.model.name, config.wandb.project) == ("m", "p")


def test_section_file_takes_its_place_in_the_order_of_files(load: Any, toml: Any) -> None:
    whole, part = toml("[model]\nname = 'whole'\n", "1.toml"), toml("name = 'part'\n", "2.toml")
    assert load("@", whole, "--model", "@", part).model.name == "part"
    assert load("--model", "@", part, "@", whole).model.name == "whole"


def test_none_in_a_file_unsets_what_an_earlier_file_set(load: Any, toml: Any) -> None:
    first, second = toml("max_norm = 2.0\n[ckpt]\n", "1.toml"), toml("max_norm = 'None'\nckpt = 'None'\n", "2.toml")
    assert load("@", first).ckpt is not None
    config = load("@", first, "@", second)
    assert (config.max_norm, config.ckpt) == (None, None)


def test_a_section_that_a_later_layer_switches_off_begins_anew_above_it(load: Any, toml: Any) -> None:
    first, second = toml("[ckpt]\ninterval = 7\n", "1.toml"), toml("ckpt = false\n", "2.toml")
    assert load("@", first, "@", second, "--ckpt.resume-step", "3").ckpt.model_dump() == {
        "interval": None, "resume_step": 3,
    }  # fmt: skip


def test_a_list_of_a_file_replaces_entries_that_variables_give_by_place(load: Any, toml: Any) -> None:
    environ = {"PRIME_ENV__0__ARGS__K": "1", "PRIME_ENV__1__ID": "two"}
    config = load("@", toml("[[env]]\nid = 'x'\n"), "--env.0.ratio", "2.0", environ=environ)
    assert [(env.id, env.args, env.ratio) for env in config.env] == [("x", {}, 2.0)]


def test_keys_in_files_may_have_dashes_and_older_spellings(load: Any, toml: Any) -> None:
    config = load("@", toml("max-steps = 5\nrollouts_per_example = 2\n"))
    assert (config.max_steps, config.group_size) == (5, 2)


def test_older_spelling_in_a_file_gives_way_to_the_present_one_on_the_command_line(load: Any, toml: Any) -> None:
    assert load("@", toml("rollouts_per_example = 2\n"), "--group-size", "16").group_size == 16


@pytest.mark.parametrize(
    ("variable", "text", "expected"),
    [
        ("PRIME_MAX_STEPS", "7", {"max_steps": 7}),
        ("PRIME_CKPT__INTERVAL", "7", {"ckpt": {"interval": 7, "resume_step": None}}),
        ("PRIME_CKPT", "true", {"ckpt": {"interval": None, "resume_step": None}}),
        ("PRIME_GPU_IDS", "1,2", {"gpu_ids": [1, 2]}),
        ("PRIME_ENV__0__ID", "x", {"env": None}),
        ("PRIME_OPTIONS__SOME_KEY", "1", {"options": {"some_key": 1}}),
        ("PRIME_BENCH", "1", {"bench": True}),
        ("PRIME_MAX_NORM", "None", {"max_norm": None}),
    ],
)
def test_variables_reach_nested_keys(load: Any, variable: str, text: str, expected: dict[str, Any]) -> None:
    found = load(environ={variable: text}).model_dump()
    if variable == "PRIME_ENV__0__ID":
        assert found["env"][0]["id"] == "x"
    else:
        assert {key: found[key] for key in expected} == expected


def test_variables_of_other_tools_are_left_alone(load: Any, capsys: pytest.CaptureFixture[str]) -> None:
    environ = {"PRIME_API_KEY": "secret", "PRIME_TEAM_ID": "t", "PRIME_": "", "PRIME___": "x", "MODEL__NAME": "y"}
    config = load(environ=environ)
    assert config == load()
    assert config.api_key is None
    assert capsys.readouterr().err == ""


def test_variable_below_a_known_section_that_names_no_key_is_a_warning(
    load: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert load(environ={"PRIME_MODEL__NAM": "x"}) == load()
    assert capsys.readouterr().err == (
        "prog: warning: PRIME_MODEL__NAM is not used: model has no key 'nam'; did you mean PRIME_MODEL__NAME?\n"
    )


def test_prime_log_level_is_the_default_of_log_level(load: Any, toml: Any) -> None:
    environ = {"PRIME_LOG_LEVEL": "DEBUG"}
    assert load(environ=environ).log.level == "debug"
    assert load(environ={**environ, "PRIME_LOG__LEVEL": "error"}).log.level == "error"
    assert load("@", toml("[log]\nlevel = 'warning'\n"), environ=environ).log.level == "warning"


def test_prime_log_level_of_another_tool_that_names_no_level_is_a_warning(
    load: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert load(environ={"PRIME_LOG_LEVEL": "chatty"}).log.level == "info"
    assert "PRIME_LOG_LEVEL is not used" in capsys.readouterr().err


def test_a_boolean_in_a_file_switches_an_optional_section(load: Any, toml: Any) -> None:
    assert load("@", toml("ckpt = true\n")).ckpt.interval is None
    assert load("@", toml("[ckpt]\ninterval = 5\n", "1.toml"), "@", toml("ckpt = true\n", "2.toml")).ckpt.interval == 5
    assert load("@", toml("[ckpt]\n", "1.toml"), "@", toml("ckpt = false\n", "2.toml")).ckpt is None
    assert load("@", toml("ckpt = false\n", "1.toml"), "@", toml("ckpt = true\n", "2.toml")).ckpt is not None
    nested = load("@", toml("[wandb]\nlog_extras = false\n")).wandb
    assert nested.log_extras is None


@pytest.mark.parametrize(("text", "on"), [("1", True), ("0", False), ("True", True), ("off", False), ("y", True)])
def test_a_variable_switches_an_optional_section_by_every_word_for_a_boolean(load: Any, text: str, on: bool) -> None:
    assert (load(environ={"PRIME_WANDB__LOG_EXTRAS": text}).wandb.log_extras is not None) is on


def test_a_boolean_within_json_switches_an_optional_section(load: Any) -> None:
    assert load(environ={"PRIME_WANDB": '{"log_extras": false}'}).wandb.log_extras is None
    assert load("--wandb", '{"log_extras": true}').wandb.log_extras.interval == 10


@pytest.mark.parametrize("value", ["true", "false"])
def test_a_section_that_is_always_on_takes_no_boolean(load: Any, toml: Any, capsys: Any, value: str) -> None:
    with pytest.raises(SystemExit):
        load("@", toml(f"server = {value}\n"))
    assert f"server: expected section, got {value.capitalize()}" in capsys.readouterr().err
