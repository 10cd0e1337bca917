"""What is wrong with a run is said before anything is started, all of it at once."""

from __future__ import annotations

import json
import resource
import shutil
import socket
import struct
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from meshrl.launch import main as launched
from meshrl.launch.compose import with_values
from meshrl.launch.main import main
from meshrl.launch.preflight import engines, machine, models, plugins, services, storage
from meshrl.launch.preflight.checks import examine
from meshrl.launch.preflight.findings import Finding, Plan, note
from meshrl.launch.supervise import Program
from preflight_plan import found, plan

NUM_PARAMS = 1000


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The files of a model with 1000 parameters of two bytes."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "qwen3"}')
    (folder / "tokenizer.json").write_text("{}")
    header = json.dumps({"w": {"dtype": "BF16", "shape": [10, 100], "data_offsets": [0, 2000]}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(2000))
    return folder


def rl(monkeypatch: pytest.MonkeyPatch, *argv: str) -> int | str | None:
    monkeypatch.setattr(sys, "argv", ["rl", "--orchestrator.train.env.0.id", "reverse_text", "--inference", *argv])
    with pytest.raises(SystemExit) as leaving:
        main()
    return leaving.value.code


@pytest.mark.parametrize("flags", [(), ("--dry-run",)])
def test_everything_that_is_wrong_is_said_at_once_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(services, "HEALTH_DEADLINE_S", 0.5)  # nobody will answer
    out = tmp_path / "out"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        wrong = (
            ["--model.name", "/no/such/model", "--ckpt.resume-step", "4", "--deployment.num-infer-gpus", "1"],
            ["--orchestrator.services.rollout", "127.0.0.1:1", "--weights.server.port", str(port), "--wandb"],
        )
        code = rl(monkeypatch, "--output-dir", str(out), *wrong[0], *wrong[1], *flags)
    said = capsys.readouterr().err
    assert code == 2, said
    assert said.startswith("rl: nothing was started; 4 problem(s) must be solved first\n")
    for words in (
        "deployment.num_infer_gpus is 1 but no GPU is visible here",
        "trainer.model.name '/no/such/model' is no folder; give a folder",
        f"ckpt.resume_step is 4, but {out}/checkpoints holds no checkpoint; leave it out to start afresh",
        "orchestrator.services.rollout '127.0.0.1:1': nobody answered",
        "warning: wandb is on, but there is no key for api.wandb.ai",
    ):
        assert words in said
    assert not out.exists()


def test_a_run_that_can_start_is_said_to_be_valid_with_what_else_there_is_to_know(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(plugins, "_questions", lambda plan: {})  # whose answer takes five seconds of a core
    out = tmp_path / "out"
    assert rl(monkeypatch, "--output-dir", str(out), "--model.name", str(model), "--wandb", "--dry-run") == 0
    assert capsys.readouterr().out == (
        "warning: wandb is on, but there is no key for api.wandb.ai: its metrics will be missing; run 'wandb login',"
        " set WANDB_API_KEY, or set wandb.offline\n"
        f"dry run: the configuration is valid; resolved files are in {out / 'configs'}\n"
    )


def test_a_bad_environment_ends_rl_with_its_sentence_alone_though_programs_have_started(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, pids = tmp_path / "out", tmp_path / "pids"
    pids.touch()
    code = f"import os, time; open({str(pids)!r}, 'a').write(f'{{os.getpid()}}\\n'); time.sleep(600)"
    real = launched.programs

    def sleepers(*given: Any) -> list[Program]:
        return [replace(program, command=[sys.executable, "-c", code]) for program in real(*given)]

    monkeypatch.setattr(launched, "programs", sleepers)
    wrong = ("--orchestrator.train.env.0.args.nonsense", "1")
    assert rl(monkeypatch, "--output-dir", str(out), "--model.name", str(model), *wrong) == 2
    shown = capsys.readouterr()
    (sentence,) = shown.err.splitlines()
    assert sentence.startswith("rl: environment 'reverse_text': its args do not fit 'reverse_text': args.nonsense: ")
    assert sentence.endswith("(orchestrator.train.env.0.args.nonsense from --orchestrator.train.env.0.args.nonsense)")
    assert "started inference" in shown.out
    assert "started orchestrator" not in shown.out
    started = [int(pid) for pid in pids.read_text().split()]
    assert not [pid for pid in started if Path(f"/proc/{pid}").exists()]
    assert not out.exists()


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        ("config.json", "has no config.json, so it is no Hugging Face model"),
        ("model.safetensors", "lacks its weights (model.safetensors); restore them"),
        ("tokenizer.json", "holds no tokenizer; save one there"),
    ],
)
def test_a_model_without_one_of_its_files_is_an_error(model: Path, spoil: str, words: str) -> None:
    assert found(models.check_models, plan(model=model)) == []
    (model / spoil).unlink()
    [finding] = found(models.check_models, plan(model=model))
    assert finding.startswith("error: ")
    assert words in finding


def test_every_shard_of_a_model_must_be_there(model: Path) -> None:
    (model / "model.safetensors").rename(model / "one.safetensors")
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    [finding] = found(models.check_models, plan(model=model))
    assert "lacks its weights (two.safetensors)" in finding


@pytest.mark.parametrize("text", ["{", "[]", "{}"])
def test_a_configuration_that_is_none_is_an_error(model: Path, text: str) -> None:
    (model / "config.json").write_text(text)
    [finding] = found(models.check_models, plan(model=model))
    assert finding.startswith(f"error: trainer.model.name {str(model)!r}: its config.json ")


def test_a_name_that_is_not_cached_is_a_note_or_offline_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = plan(model="nobody/no-such-model")
    [finding] = found(models.check_models, missing)
    assert finding.startswith("note: trainer.model.name 'nobody/no-such-model' is not in the cache")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    [finding] = found(models.check_models, missing)
    assert finding.startswith("error: trainer.model.name 'nobody/no-such-model' is neither a folder nor in the cache")


def test_a_cached_name_is_looked_at_where_transformers_looks(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    cached = tmp_path / "hub" / "models--some--model"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("abc")
    shutil.copytree(model, cached / "snapshots" / "abc")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.file_download.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert found(models.check_models, plan(model="some/model")) == []
    (cached / "snapshots" / "abc" / "model.safetensors").unlink()
    [finding] = found(models.check_models, plan(model="some/model"))
    assert "lacks its weights" in finding


def test_programs_that_are_not_started_need_no_model() -> None:
    running = ("--orchestrator.services.trainer", "h:1", "--orchestrator.services.weights", "h:2")
    engine = ("--no-inference", "--orchestrator.services.rollout", "h:3")
    assert found(models.check_models, plan(*running, *engine, model="/no/such")) == []


@pytest.mark.parametrize(("step", "fits"), [("-1", True), ("4", True), ("5", False)])
def test_the_checkpoint_to_resume_from_must_be_there(tmp_path: Path, step: str, fits: bool) -> None:
    for folder in ("step_2/trainer", "step_4/trainer", "step_5", "step_5.superseded/trainer"):
        (tmp_path / "checkpoints" / folder).mkdir(parents=True)
    examined = plan("--output-dir", str(tmp_path), "--ckpt.resume-step", step)
    words = f"but {tmp_path}/checkpoints holds steps [2, 4]; set it to one of them"
    findings = found(storage.check_resume_step, examined)
    assert findings == [] if fits else words in findings[0]


@pytest.mark.parametrize(("step", "most", "nothing"), [("-1", "4", True), ("2", "2", True), ("2", "4", False)])
def test_a_run_that_resumes_at_its_end_is_a_warning(tmp_path: Path, step: str, most: str, nothing: bool) -> None:
    for folder in ("step_2/trainer", "step_4/trainer"):
        (tmp_path / "checkpoints" / folder).mkdir(parents=True)
    flags = ("--output-dir", str(tmp_path), "--ckpt.resume-step", step, "--max-steps", most)
    findings = found(storage.check_resume_step, plan(*flags))
    words = f"warning: the run resumes at step {most} and max_steps is {most}, so nothing is trained"
    assert [finding.startswith(words) for finding in findings] == [True] * nothing


def test_a_checkpoint_cannot_be_cleaned_away_and_resumed(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "step_4" / "trainer").mkdir(parents=True)
    flags = ("--output-dir", str(tmp_path), "--ckpt.resume-step", "4", "--clean-output-dir")
    [finding] = found(storage.check_resume_step, plan(*flags))
    assert "clean_output_dir deletes the checkpoints" in finding


@pytest.mark.parametrize(
    ("free", "flags", "expected"),
    [
        (15_999, ("--ckpt",), "error: "),
        (16_000, ("--ckpt",), ""),
        (16_000, (), ""),
        (79_999, ("--ckpt.interval", "2", "--max-steps", "10"), "warning: "),
        (80_000, ("--ckpt.interval", "2", "--max-steps", "10"), ""),
        (47_999, ("--ckpt.interval", "2", "--max-steps", "10", "--ckpt.keep-last", "2"), "warning: "),
        (48_000, ("--ckpt.interval", "2", "--max-steps", "10", "--ckpt.keep-last", "2"), ""),
        (4_000, ("--ckpt.interval", "2", "--max-steps", "2", "--ckpt.weights-only"), ""),
    ],
)
def test_checkpoints_must_fit_on_the_disk(
    model: Path, monkeypatch: pytest.MonkeyPatch, free: int, flags: tuple[str, ...], expected: str
) -> None:
    """1000 parameters: 4 bytes each in the weights of a CPU, 4 as float32 master, 8 in AdamW's state."""
    monkeypatch.setattr(storage, "room_of", lambda folder: (folder, free))
    findings = found(storage.check_disk, plan(*flags, model=model))
    assert [finding.startswith(expected) for finding in findings] == ([True] if expected else [])


def test_versions_need_room_in_memory_or_on_the_disk(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    examined = plan(model=model)
    assert found(storage.check_versions, examined) == []
    monkeypatch.setattr(storage, "SHM", tmp_path / "no-such")
    [finding] = found(storage.check_versions, examined)
    assert finding.startswith("note: ")
    monkeypatch.setattr(storage, "room_of", lambda folder: (folder, 11_999))
    [finding] = found(storage.check_versions, examined)
    assert finding.startswith("error: weight_broadcast.type is 'auto', but 3 versions of the weights take 0.00 GiB")
    assert found(storage.check_versions, plan("--weights.transport", "stream", model=model)) == []


def test_size_of_weights_is_read_from_their_headers(model: Path) -> None:
    assert models.stored_size(model) == models.ModelSize(num_params=NUM_PARAMS, num_bytes=2000)
    assert storage.version_bytes(plan(gpus=("0", "1")), models.ModelSize(num_params=10, num_bytes=20)) == 20
    (model / "model.safetensors").write_bytes(b"\xff" * 100)
    assert models.stored_size(model) is None


def test_an_id_that_names_other_data_elsewhere_is_a_note() -> None:
    own = "--orchestrator.train.env.1.id", "reverse-text", "--orchestrator.eval.env.0.id", "reverse-text"
    assert found(plugins.check_plugins, plan(*own)) == [
        "note: environment id 'reverse-text' is meshrl's own short sentences (meshrl.environments.reverse_text), not"
        " the data of prime-rl's taskset of that id"
    ]
    assert found(plugins.check_plugins, plan()) == []


def test_gpus_are_listed_where_there_are_some() -> None:
    listed = ["--inference-gpu-ids", "0", "--trainer-gpu-ids", "0", "1"]
    assert found(machine.check_gpus, plan(*listed)) == [
        f"error: {key} but no GPU is visible here; leave it out to run on the CPU, or look at nvidia-smi and"
        " CUDA_VISIBLE_DEVICES"
        for key in ("inference_gpu_ids lists 0", "trainer_gpu_ids lists 0, 1")
    ]
    assert found(machine.check_gpus, plan(*listed, gpus=("0", "1"))) == []
    assert found(machine.check_gpus, plan()) == []


def test_vllm_must_be_in_the_interpreter_that_runs_it(tmp_path: Path) -> None:
    with_vllm = tmp_path / "python"
    with_vllm.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} -S "$@"\n')
    with_vllm.chmod(0o755)
    asked = ["--inference.engine", "vllm", "--inference.python", str(with_vllm)]
    assert found(engines.check_vllm, plan(*asked)) == [
        f"error: inference.engine is 'vllm', but '{with_vllm}' has no vLLM; install it there (uv sync --extra vllm),"
        " give the interpreter of an environment that has it in inference.python, or leave inference.engine out"
    ]
    (tmp_path / "vllm.py").touch()
    assert found(engines.check_vllm, plan(*asked)) == []
    (tmp_path / "vllm.py").unlink()
    assert found(engines.check_vllm, replace(plan(*asked), elsewhere=["127.0.0.1"])) == []
    assert found(engines.check_vllm, plan(*asked[2:])) == []


RUNNING = ("--orchestrator.services.rollout", "127.0.0.1:1", "--orchestrator.services.weights", "127.0.0.1:2")


@pytest.mark.parametrize(
    ("host", "more", "expected"),
    [
        ("localhost", (), []),
        ("[::1]", (), []),
        ("engine.invalid", (), ["error: the host of inference.url 'https://engine.invalid:8000' has no address here"]),
        ("engine.invalid", (*RUNNING, "--inference.server.port", "8000"), ["warning: the host of inference.url"]),
    ],
)
def test_the_host_of_an_engines_url_must_have_an_address(host: str, more: tuple[str, ...], expected: list[str]) -> None:
    said = found(engines.check_url, plan("--inference.url", f"https://{host}:8000", *more))
    assert [text[: len(start)] for text, start in zip(said, expected, strict=True)] == expected


def test_ports_must_be_free_and_given_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for key in ("trainer.server.port", "weights.enrollment_port", "orchestrator.exchange.port"):
            [busy] = found(machine.check_ports, plan(f"--{key}", port))
            assert busy == (
                f"error: {key} {port} cannot be used at 127.0.0.1 (another process listens there); stop what"
                " listens there, or leave it out"
            )
    assert found(machine.check_ports, plan("--trainer.server.port", port)) == []
    twice = found(machine.check_ports, plan("--trainer.server.port", port, "--rollout.server.port", port))
    assert twice == [
        f"error: rollout.server.port {port} is given to trainer as well; give each program a port of its own"
    ]


def test_engines_on_nodes_of_their_own_may_have_one_port() -> None:
    nodes = ("192.0.2.1", "192.0.2.2", "192.0.2.2")
    given = plan("--num-engines", "3", "--inference.server.port", "8000", "--inference.server.insecure")
    engines = iter(nodes)
    parts = [
        replace(part, config=with_values(part.config, {"server.host": next(engines), "server.port": 8000}))
        if part.name.startswith("inference")
        else part
        for part in given.parts
    ]
    assert found(machine.check_ports, replace(given, parts=parts, elsewhere=nodes)) == [
        "error: inference_3.server.port 8000 is given to inference_2 as well; give each program a port of its own"
    ]


@pytest.mark.parametrize(("hard", "expected"), [(64, ["error"]), (1024, ["warning"]), (4096, []), (-1, [])])
def test_open_files_must_be_allowed(monkeypatch: pytest.MonkeyPatch, hard: int, expected: list[str]) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda what: (64, hard))
    assert [finding.severity for finding in machine.check_open_files(plan())] == expected


def test_a_key_for_wandb_is_looked_for_where_wandb_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    online, offline = plan("--wandb"), plan("--wandb.offline")
    assert [finding.severity for finding in machine.check_wandb(online)] == ["warning"]
    assert found(machine.check_wandb, offline) == found(machine.check_wandb, plan()) == []
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password secret")
    assert found(machine.check_wandb, online) == []
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org")
    [finding] = found(machine.check_wandb, online)
    assert "no key for wandb.example.org" in finding
    assert "secret" not in finding
    monkeypatch.setenv("WANDB_API_KEY", "x")
    assert found(machine.check_wandb, online) == []
    monkeypatch.delenv("WANDB_API_KEY")
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert found(machine.check_wandb, online) == []


def test_checks_are_made_side_by_side_and_listed_in_their_order() -> None:
    met = threading.Barrier(2, timeout=30.0)  # of two checks that wait for each other

    def slow(examined: Plan) -> Iterator[Finding]:
        met.wait()
        yield note("the first, which ends last")

    def quick(examined: Plan) -> list[Finding]:
        met.wait()
        return [note("the second")]

    assert [finding.text for finding in examine(plan(), [slow, quick])] == ["the first, which ends last", "the second"]
