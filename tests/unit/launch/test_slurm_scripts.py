"""What `--dry-run` writes for SLURM: batch scripts equal golden files, and bad values are refused by name.

MESHRL_WRITE_GOLDEN=1 writes the golden files anew.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import sys
import tomllib
from collections.abc import Callable
from difflib import unified_diff
from itertools import product
from pathlib import Path

import pytest

from meshrl.core.config import BaseConfig, ConfigError, load_config
from meshrl.core.config.dump import to_toml
from meshrl.eval.config import EvaluationConfig
from meshrl.eval.main import submit_eval
from meshrl.inference.submission import InferenceProgramConfig, submit_inference
from meshrl.launch.config import RLConfig
from meshrl.launch.submission import submit_run
from meshrl.sft.config import SFTConfig
from meshrl.sft.main import submit_sft

ROOT = Path(__file__).parents[3]
GOLDEN = ROOT / "tests" / "golden" / "slurm"
TWO = ["--slurm.job-name", "two", "--deployment.type", "multi_node"]
ALL = [
    "--slurm.job-name", "all", "--slurm.partition", "gpu", "--slurm.account", "lab", "--slurm.time", "2-00:00:00",
    "--slurm.nodelist", "node[01-04]", "--slurm.exclude", "node07", "--slurm.pre-run-command", "module load it's",
    "--slurm.options", "[\"--qos=high\", \"--mem=64G\"]", "--no-slurm.exclusive",
]  # fmt: skip
CASES = {
    "reverse_text_rl": ("rl", ["@", "configs/reverse_text/rl.toml", *ALL, "--deployment.gpus-per-node", "2"]),
    "reverse_text_rl_nodes": (
        "rl",
        [
            "@",
            "configs/reverse_text/rl.toml",
            *TWO,
            "--deployment.num-train-nodes",
            "2",
            "--slurm.requeue-at-limit",
            "--ckpt.interval",
            "5",
        ],
    ),
    "memory_game_rl": ("rl", ["@", "configs/memory_game/rl.toml", "--slurm", "--deployment.gpus-per-node", "0"]),
    "reverse_text_sft": ("sft", ["@", "configs/reverse_text/sft.toml", "--slurm"]),
    "memory_game_sft_nodes": ("sft", ["@", "configs/memory_game/sft.toml", *TWO, "--deployment.num-train-nodes", "2"]),
    "eval": ("eval", ["--env.0.id", "reverse_text", "--inference", "--slurm", "--deployment.gpus-per-node", "1"]),
    "inference_one_node": ("inference", ["--slurm", "--server.insecure", "--deployment.gpus-per-node", "1"]),
    "inference_nodes": (
        "inference",
        [*TWO, "--deployment.num-infer-nodes", "3", "--server.host", "0.0.0.0", "--tls.folder", "/etc/meshrl"],
    ),
    "inference_one_engine": (
        "inference",
        [
            *TWO,
            "--deployment.num-infer-nodes",
            "2",
            "--tensor-parallel-size",
            "4",
            "--data-parallel-size",
            "4",
            "--server.insecure",
        ],
    ),
}


def submitted_rl(argv: list[str]) -> str:
    config = load_config(RLConfig, argv, prog="rl", environ={})
    assert config.slurm is not None
    return submit_run(config, config.slurm)


def submitted(cls: type[BaseConfig], submit: Callable[..., str | None], argv: list[str]) -> str:
    said = submit(load_config(cls, argv, prog="it", environ={}), True)
    assert said is not None
    return said


PROGRAMS: dict[str, Callable[[list[str]], str]] = {
    "rl": lambda argv: submitted_rl([*argv, "--dry-run"]),
    "sft": lambda argv: submitted(SFTConfig, submit_sft, argv),
    "eval": lambda argv: submitted(EvaluationConfig, submit_eval, argv),
    "inference": lambda argv: submitted(InferenceProgramConfig, submit_inference, argv),
}


CONFIGS: dict[str, type[BaseConfig]] = {
    "rl": RLConfig, "sft": SFTConfig, "eval": EvaluationConfig, "inference": InferenceProgramConfig,
}  # fmt: skip


def assert_same(program: str, embedded: str, out: Path) -> None:
    """What a script holds is in the job what was resolved here; keys that nobody set are left to follow from others."""
    again = out.with_suffix(".toml")
    again.write_text(embedded)
    config = load_config(CONFIGS[program], ["@", str(again)], prog=program, environ={})
    assert to_toml(config) == (out / "configs" / f"{program}.toml").read_text()
    assert to_toml(config, given_only=True) == embedded


@pytest.mark.parametrize("case", sorted(CASES))
def test_a_dry_run_writes_the_golden_script(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    program, argv = CASES[case]
    said = PROGRAMS[program]([*argv, "--output-dir", str(tmp_path / "out")])
    path = tmp_path / "out" / "slurm" / "submit.sh"
    assert f"sbatch {path} would submit it" in said
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    script = path.read_text()
    embedded = re.findall(r"<<'END_OF_CONFIGURATION'\n(.*\n)END_OF_CONFIGURATION\n", script, re.DOTALL)[0]
    assert_same(program, embedded, tmp_path / "out")
    assert tomllib.loads(embedded)["slurm"] == "None"  # in the job it runs
    found = script.replace(embedded, "...\n").replace(str(tmp_path), "/run").replace(sys.executable, "/venv/bin/python")
    assert "pkill" not in found
    golden = GOLDEN / f"{case}.sh"
    if os.environ.get("MESHRL_WRITE_GOLDEN"):
        golden.write_text(found)
    assert found == golden.read_text()
    subprocess.run(["bash", "-n", str(path)], check=True, timeout=60)
    if shutil.which("shellcheck") is not None:
        subprocess.run(["shellcheck", "--severity=warning", str(path)], check=True, timeout=60)


def test_a_dry_run_of_many_nodes_shows_who_runs_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    PROGRAMS["rl"]([*CASES["reverse_text_rl_nodes"][1], "--output-dir", str(tmp_path), "--deployment.gpus-per-node",
                    "2", "--deployment.nodes-per-fsdp-group", "1"])  # fmt: skip
    read = {path.stem: tomllib.loads(path.read_text()) for path in (tmp_path / "configs").glob("*.toml")}
    hosts = {name: config["server"]["host"] for name, config in read.items() if isinstance(config.get("server"), dict)}
    assert hosts == {
        "trainer": "node-0", "weights": "node-0", "rollout": "node-0", "inference": "node-2", "inference_2": "node-2",
    }  # fmt: skip
    assert read["trainer"]["model"]["dp_replicate"] == 2
    assert read["inference_2"]["weight_broadcast"]["address"].startswith("node-0:")
    assert not any(config["server"]["insecure"] for name, config in read.items() if name in hosts)  # by certificates


EXAMPLES = sorted(path.relative_to(ROOT) for path in (ROOT / "configs").glob("*/**/*.toml") if path.stem != "teacher")
TARGETS = {
    "one node": ["--slurm"],
    "nodes": ["--slurm", "--deployment.type", "multi_node", "--deployment.num-train-nodes", "2"],
}


def script_of_example(file: Path, target: str, out: Path) -> tuple[str, str]:
    """The program that an example is for, and the script that it gives on a target, without its configuration."""
    program = "eval" if file.parent.name == "eval" else file.stem
    below = [] if program in PROGRAMS else [file.parent / "rl.toml"]
    program = "rl" if below else program
    files = [part for path in (*below, file) for part in ("@", str(path))]
    PROGRAMS[program]([*files, *TARGETS[target], "--output-dir", str(out)])
    script = (out / "slurm" / "submit.sh").read_text()
    head, _, rest = script.partition("<<'END_OF_CONFIGURATION'\n")
    configuration, _, tail = rest.partition("END_OF_CONFIGURATION\n")
    if target == "one node":  # the others have the same keys
        assert_same(program, configuration, out)
    return program, (head + tail).replace(str(out), "/run/out").replace(sys.executable, "/venv/bin/python")


def test_every_example_gives_its_golden_script_on_each_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The golden file has the first script of a program and target whole, and of the others what differs from it."""
    monkeypatch.chdir(ROOT)
    first: dict[str, str] = {}
    lines = []
    for number, (target, file) in enumerate(product(TARGETS, EXAMPLES)):
        if target == "nodes" and "eval" in (file.stem, file.parent.name):
            continue  # a job of one node
        program, script = script_of_example(file, target, tmp_path / str(number))
        base = first.setdefault(f"{program} on {target}", script)
        differs = list(unified_diff(base.splitlines(), script.splitlines(), lineterm="", n=0))[2:]
        whole = script.splitlines() if base is script else differs
        lines += [f"== {file}, {target}", *whole]
    golden = GOLDEN / "examples.txt"
    found = "\n".join(lines) + "\n"
    if os.environ.get("MESHRL_WRITE_GOLDEN"):
        golden.write_text(found)
    assert found == golden.read_text()


def test_a_template_of_ones_own_is_filled_in(tmp_path: Path) -> None:
    template = tmp_path / "mine.j2"
    template.write_text("#!/bin/bash\n# {{ job_name }} {{ nodes }}\n{{ python | quote }} -m {{ module }}\n")
    PROGRAMS["sft"](["--slurm.template-path", str(template), "--slurm.python", "/opt/my env/python", "--output-dir",
                     str(tmp_path / "out")])  # fmt: skip
    script = (tmp_path / "out" / "slurm" / "submit.sh").read_text()
    assert script == "#!/bin/bash\n# meshrl 1\n'/opt/my env/python' -m meshrl.sft.main\n"


ENVIRONMENT = ["--orchestrator.train.env.0.id", "reverse_text", "--inference"]


@pytest.mark.parametrize(
    ("program", "argv", "told"),
    [
        ("rl", ["--slurm.requeue-at-limit"], "goes on from a checkpoint, and the trainer saves none; add [ckpt]"),
        ("sft", ["--slurm.requeue-at-limit"], "goes on from a checkpoint, and sft saves none; add [ckpt]"),
        ("rl", ["--slurm.time", "soon"], "slurm.time"),
        ("rl", ["--slurm.job-name", "two words"], "slurm.job_name"),
        ("rl", ["--slurm", "--deployment.num-infer-nodes", "2"], "deployment.type is 'single_node'; set it to"),
        ("rl", [*TWO, "--deployment.num-infer-gpus", "2"], "so leave it out"),
        ("rl", [*TWO, "--num-engines", "2"], "num_engines is for one node"),
        ("rl", [*TWO, "--no-inference"], "but inference is off"),
        ("rl", [*TWO, "--inference.tensor-parallel-size", "3"], "an engine takes 3 GPU(s)"),
        (
            "rl",
            [*TWO, "--deployment.num-train-nodes", "2", "--restarts", "1", "--ckpt.interval", "5"],
            "set trainer_restarts to 0",
        ),
        ("rl", ["--slurm.template-path", "/no/such.j2"], "slurm.template_path '/no/such.j2' cannot be read"),
        ("rl", ["--slurm", "--deployment.nodes-per-fsdp-group", "0"], "deployment.nodes_per_fsdp_group"),
        ("sft", ["--slurm", "--deployment.num-train-nodes", "2"], "deployment.type is 'single_node'; set it to"),
        ("sft", ["--deployment.type", "multi_node"], "which sft does in a SLURM job; add [slurm]"),
        (
            "inference",
            [*TWO, "--deployment.num-infer-nodes", "3", "--data-parallel-size", "16", "--tensor-parallel-size", "2"],
            "data_parallel_size is 16",
        ),
        ("inference", ["--slurm"], "which others can reach, and there is no TLS; give a certificate (tls.folder)"),
        ("inference", ["--slurm", "--server.host", "0.0.0.0"], "server.host is 0.0.0.0, which others can reach"),
        ("inference", ["--slurm", "--server.insecure", "--server.port", "0"], "server.port is 0"),
    ],
)  # fmt: skip
def test_a_value_that_cannot_be_is_refused_by_name(
    program: str, argv: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = [*(ENVIRONMENT if program == "rl" else []), *argv, "--output-dir", str(tmp_path / "out")]
    try:
        PROGRAMS[program](whole)
    except ConfigError as error:
        said = str(error)
    except SystemExit:
        said = capsys.readouterr().err
    else:
        said = ""
    assert told in said
    assert not (tmp_path / "out" / "slurm").exists()
