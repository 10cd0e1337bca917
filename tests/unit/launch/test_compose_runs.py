"""Several runs in one mesh: an orchestrator each, with its own folder, and what the mesh needs for all of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshrl.core.config import load_config
from meshrl.core.paths import Layout
from meshrl.core.telemetry.start import Start
from meshrl.launch.config import RLConfig
from meshrl.launch.main import launch, programs
from run_config import parts_of, refusal

MESH = """
max_steps = 9
output_dir = "OUT"

[trainer]
seq_len = 4096
model.lora.rank = 16

[inference]

[[runs]]
run_id = "short"
batch_size = 32
train.env = [{ id = "reverse_text" }]
run.lora.rank = 32

[[runs]]
run_id = "long"
max_steps = 5
train.env = [{ id = "letter_sort", name = "letters" }]
eval.env = [{ id = "reverse_text", name = "held_out", args = { split = "held_out" } }]
"""


def mesh(tmp_path: Path, *argv: str, text: str = MESH) -> RLConfig:
    file = tmp_path / "mesh.toml"
    file.write_text(text.replace("OUT", str(tmp_path / "out")))
    return load_config(RLConfig, ["@", str(file), *argv], prog="rl", environ={})


def test_each_run_has_an_orchestrator_and_the_mesh_what_all_need(tmp_path: Path) -> None:
    parts = parts_of(mesh(tmp_path))
    assert [name for name in parts if name.startswith("orchestrator")] == ["orchestrator_short", "orchestrator_long"]
    short, long = parts["orchestrator_short"].config, parts["orchestrator_long"].config
    assert (short.run_id, short.max_steps, short.batch_size, short.seq_len) == ("short", 9, 32, 4096)
    assert (long.run_id, long.max_steps, long.seq_len) == ("long", 5, 4096)
    assert short.output_dir == tmp_path / "out" / "run_short"
    assert short.services == long.services
    assert (short.run.spec().adapter.rank, long.run.spec().adapter) == (32, None)
    assert [env.resolved_name for env in parts["rollout"].config.env] == ["reverse_text", "letters", "held_out"]
    assert parts["trainer"].config.max_concurrent_runs == 2
    assert parts["inference"].config.lora_rank == 32


def test_the_teacher_of_a_run_gets_a_rollout_program_of_its_own(tmp_path: Path) -> None:
    flags = ["--runs.1.training-mode", "sft", "--runs.1.teacher.client.base-url", "http://t:1"]
    parts = parts_of(mesh(tmp_path, *flags, "--runs.1.teacher.model.name", "big"))
    assert [name for name in parts if name.startswith("teacher")] == ["teacher_long"]
    played = parts["teacher_long"].config
    assert (played.model.name, played.output_dir) == ("big", parts["rollout"].config.output_dir / "teacher_long")
    assert [env.resolved_name for env in played.env] == ["letters"]
    assert parts["orchestrator_long"].config.teacher.rollout == [f"127.0.0.1:{played.server.port}"]
    assert parts["orchestrator_short"].config.teacher is None


def test_a_flag_beats_the_runs_of_a_file_and_may_name_one(tmp_path: Path) -> None:
    parts = parts_of(mesh(tmp_path, "--max-steps", "3", "--runs.1.batch-size", "64"))
    assert [parts[f"orchestrator_{name}"].config.max_steps for name in ("short", "long")] == [3, 3]
    assert parts["orchestrator_long"].config.batch_size == 64


def test_the_shared_length_of_a_sequence_reaches_each_run(tmp_path: Path) -> None:
    config = mesh(tmp_path, text="seq_len = 1024\n" + MESH.replace("seq_len = 4096\n", ""))
    assert [run.seq_len for run in config.runs] == [1024, 1024]
    assert mesh(tmp_path, "--seq-len", "512", "--runs.1.seq-len", "256").runs[1].seq_len == 256


def test_a_key_of_a_lower_file_reaches_the_runs_of_a_higher_one(tmp_path: Path) -> None:
    below = tmp_path / "below.toml"
    below.write_text("max_steps = 7\nseed = 3\n")
    (tmp_path / "mesh.toml").write_text(MESH.replace("max_steps = 9", "").replace("OUT", str(tmp_path / "out")))
    config = load_config(RLConfig, ["@", str(below), "@", str(tmp_path / "mesh.toml")], prog="rl", environ={})
    assert [(run.max_steps, run.seed) for run in config.runs] == [(7, 3), (5, 3)]


def test_a_run_beside_the_trainers_own_and_a_mesh_without_any(tmp_path: Path) -> None:
    own = parts_of(mesh(tmp_path, "--orchestrator.train.env.0.id", "memory_game"))
    assert [name for name in own if name.startswith("orchestrator")] == [
        "orchestrator", "orchestrator_short", "orchestrator_long",
    ]  # fmt: skip
    bare = MESH.partition("[[runs]]")[0] + '[[rollout.env]]\nid = "reverse_text"\n'
    empty = parts_of(mesh(tmp_path, "--trainer.max-concurrent-runs", "4", text=bare))
    assert list(empty) == ["weights", "inference", "trainer", "rollout"]
    assert empty["inference"].config.max_loras == 8


def test_the_folder_of_a_run_has_its_configuration_and_its_log_lines_its_name(tmp_path: Path) -> None:
    config = mesh(tmp_path, "--dry-run", "--no-preflight")
    assert launch(config, Start()) == 0
    assert (tmp_path / "out" / "run_short" / "configs" / "orchestrator.toml").exists()
    started = {each.name: each for each in programs(tuple(parts_of(config).values()), Layout(config.output_dir))}
    assert {name for name, program in started.items() if program.leader} == {"orchestrator_short", "orchestrator_long"}
    assert (started["orchestrator_long"].title, started["trainer"].title) == ("long", "")


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (("--runs.0.run-id", "main"), "two runs are called 'main'"),
        (("--runs.0.run-id", "long"), "two runs are called 'long'"),
        (("--trainer.max-concurrent-runs", "1"), "trainer.max_concurrent_runs is 1, but 2 run(s) are to be added"),
        (("--runs.0.seq-len", "8192"), "runs.0.seq_len (8192) is more than trainer.seq_len (4096)"),
        (("--runs.0.session", "x"), "session of run 'short' is that of its mesh; leave it out"),
        (("--runs.1.train.env.0.name", "reverse_text"), "two environments are called 'reverse_text'"),
        (("--no-trainer.model.lora",), "needs trainer.model.lora"),
        (("--orchestrator.batch-size", "64"), "orchestrator.batch_size is set, but the trainer's own run has no"),
    ],
)
def test_what_does_not_fit_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], problem: str
) -> None:
    file = tmp_path / "mesh.toml"
    file.write_text(MESH.replace("OUT", str(tmp_path / "out")))
    assert problem in refusal(capsys, "@", str(file), *flags, bare=True)
