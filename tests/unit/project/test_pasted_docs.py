"""What the documents have to copy is taken as it is printed: commands, by the programs' own readers, and TOML.

Commands of our programs are read, with every key and file, and not run: that needs models and peers. A command that
cannot be read here stands in a table below with the reason, and so does each command of another program.
"""

from __future__ import annotations

import contextlib
import io
import re
import runpy
import shlex
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

sys.path.append(str(Path(__file__).parents[3] / "clients" / "verifiers_v0"))

from meshrl_verifiers_v0.config import read_config

from meshrl.cli.main import main as meshrl
from pasted_files import PROGRAMS, paste

ROOT = Path(__file__).parents[3]
PAGES = [
    *(ROOT / name for name in ("README.md", "SECURITY.md", "CONTRIBUTING.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    *(ROOT / "clients" / name / "README.md" for name in ("go", "python", "typescript", "verifiers_v0")),
    *sorted((ROOT / "configs").rglob("README.md")),
    *sorted((ROOT / "configs").glob("*/**/*.toml")),
]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`([^`\n]+)`")
OURS = {*PROGRAMS, "meshrl"}

OTHERS = {
    "make": "targets are checked below",
    "bash": "a script of ours, whose file is checked below",
    "scripts/build_images.sh": "needs buildah and a mirror of Debian",
    "python scripts/run_compose.py": "needs the images",
    "torchrun": "starts ranks on other nodes; what it starts is read as `trainer`",
    "uv sync": "changes the environment that runs the tests",
    "uv venv": "makes an environment of another release of verifiers",
    "uv pip": "installs packages",
    ".venv-v0/bin/meshrl-verifiers-v0": "runs in that environment",
    "cat": "shows a file of a run",
    "grep": "reads the log of a job",
    "tail": "follows logs of a job",
    "export": "sets a variable",
    "scancel": "needs SLURM",
    "helm": "needs a cluster",
    "kubectl": "needs a cluster",
    "docker": "needs Docker",
    "buf": "calls the services of a run",
    "npm": "tests/contract/rollout/test_typescript.py builds and runs it",
    "node": "the same",
    "apt-get": "installs packages",
    "tar": "tests/contract/rollout/test_own_service.py runs it, and the next four",
    "python -m venv": "the same",
    "mkdir": "the same",
    ".venv/bin/python service.py": "the same",
    "clients/go/build": "tests/mesh/test_live_run.py builds and runs it",
    "pre-commit": "writes into .git",
    "MESHRL_WRITE_GOLDEN=1": "rewrites golden files",
    "pytest": "the suite itself",
    "MESHRL_TEST_DEVICE=cuda": "needs GPUs",
}
"""First words of commands that are not read here, and why."""

UNREADABLE = {
    "inference ... --weight-broadcast.address HUB:50053 --weight-broadcast.relays 10.0.0.5:50053": "an ellipsis",
    "meshrl weights rollback N": "N stands for a number",
    "meshrl weights pin N": "the same",
    "rl @ OUTPUT_DIR/configs/rl.toml --ckpt.resume-step N": "the same, and a folder of a run",
    "meshrl token revoke": "an argument is to follow",
    "weights --engines URL": "URL stands for one",
    "meshrl conformance --address HOST:PORT --service 'rollout|trainer|weights'": "three commands in one",
    "meshrl conformance --service exchange": "the address is to follow",
    "meshrl conformance --service exchange --address HOST:PORT": "HOST:PORT stands for an address",
    "rl --orchestrator.services.rollout HOST:PORT": "the rest of the command is the reader's",
    "eval --weights-dir": "an option without its value",
    "rl --show-rows 3": "refused by rl, as the page says",
    "weights is gone: process 812 ended 2 s ago without saying so": "a line of a log",
}
"""Commands of our programs that nobody can paste as they are, and why."""


def commands_of(page: Path) -> Iterator[str]:
    """The commands of a page: lines of its blocks of commands, and code within sentences that begins as one does."""
    text = page.read_text()
    if page.suffix == ".toml":  # how the file is used, in its first lines
        yield from (line[1:].strip() for line in text.splitlines() if re.match(r"#\s+(\w+=\S+ )?uv run ", line))
        return
    for language, block in FENCE.findall(text):
        if language == "bash" or (not language and re.match(r"uv |\.venv", block)):
            yield from (line for line in block.replace("\\\n", " ").splitlines() if line and not line.startswith("#"))
    for code in INLINE.findall(FENCE.sub("", text)):
        first, *more = code.removeprefix("uv run ").split()
        if more and (first in OURS or code.startswith(tuple(f"{first} " for first in OTHERS))):
            yield code


def bare(command: str) -> str:
    """A command without comment, `uv run` and variables before it."""
    for part in re.split(r" (?:&&|\|) ", command)[:1]:
        words = shlex.split(part, comments=True)
    while words and re.fullmatch(r"(CUDA_VISIBLE_DEVICES|MESHRL_JOIN_TOKEN|MESHRL_API_KEY)=\S*", words[0]):
        words.pop(0)
    words = words[2:] if words[:2] == ["uv", "run"] else words
    return shlex.join(words[1:] if words[:1] == ["--no-sync"] else words)


FOUND = {
    command: page.relative_to(ROOT)
    for page in reversed(PAGES)
    for command in map(bare, commands_of(page))
    if command not in UNREADABLE
}
READ = {command: page for command, page in FOUND.items() if command.split()[0] in OURS}
MAKERS = {command: page for command, page in FOUND.items() if command.startswith("python -m meshrl.environments.")}


@pytest.mark.parametrize("file", [page for page in PAGES if page.suffix == ".toml"], ids=lambda file: str(file.parent))
def test_a_file_of_an_example_begins_with_its_command_and_writes_below_outputs(file: Path) -> None:
    assert any(f"@ {file.relative_to(ROOT)}" in command for command in commands_of(file))
    assert tomllib.loads(file.read_text()).get("output_dir", "outputs").startswith("outputs")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that commands name: the reader's own, and the repository's."""
    folder = tmp_path_factory.mktemp("reader")
    (folder / "configs").symlink_to(ROOT / "configs")
    for name in ("outputs/mine", "outputs/demo/rl"):
        (folder / name).mkdir(parents=True)
    own = (ROOT / "configs/reverse_text/rl.toml").read_text()
    for name in ("rl.toml", "base.toml"):
        (folder / name).write_text(own)
    (folder / "run.toml").write_text(own + "\n[weights.server]\nport = 50053\n")
    (folder / "eval.toml").write_text('[model]\nname = "MODEL"\n[[env]]\nid = "reverse_text"\n')
    blocks = [block for page in PAGES for _, block in FENCE.findall(page.read_text())]
    (folder / "workers.toml").write_text(next(block for block in blocks if block.startswith("# workers.toml")))
    (folder / "mine.toml").write_text("max_steps = 10\n")
    (folder / "infer.toml").write_text('[model]\nname = "MODEL"\n')
    (folder / "train.toml").write_text('[model]\nname = "MODEL"\n')
    (folder / "trainer.toml").write_text('[model]\nname = "MODEL"\n')
    (folder / "orch.toml").write_text('[[train.env]]\nid = "reverse_text"\n')
    return folder


@pytest.mark.parametrize("command", [command for command in READ if not command.startswith("meshrl")])
def test_programs_read_the_commands_of_the_documents(command: str, folder: Path) -> None:
    pasted = paste(command, folder)
    assert pasted.refusal == (), READ[command]


@pytest.mark.parametrize("command", [command for command in READ if command.startswith("meshrl")])
def test_the_command_meshrl_reads_those_of_the_documents(
    command: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("MESHRL_JOIN_TOKEN", "ID.SECRET")
    with contextlib.suppress(click.exceptions.Exit):  # --help
        context = meshrl.make_context("meshrl", shlex.split(command)[1:])
        while isinstance(group := context.command, click.Group):
            name, sub, rest = group.resolve_command(context, [*context._protected_args, *context.args])
            assert sub is not None
            context = sub.make_context(name, rest, parent=context)


@pytest.mark.parametrize(
    "command", [command for command in READ if re.match("meshrl (run init|token create)", command)]
)
def test_commands_that_need_no_run_do_what_they_are_printed_for(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    where = re.search(r" -o \S+", command)
    for each in dict.fromkeys([f"meshrl run init{where[0] if where else ''}", command]):  # a token is of an authority
        ended = CliRunner().invoke(meshrl, shlex.split(each)[1:])
        assert ended.exit_code == 0, ended.output
    assert list(tmp_path.rglob("ca.key"))


def test_torchrun_starts_the_trainer_with_keys_that_it_has(folder: Path) -> None:
    started = [command for command in FOUND if command.startswith("torchrun")]
    assert started
    for command in started:
        pasted = paste(command.partition("-m meshrl.")[2].replace(".main", "", 1), folder)
        assert pasted.refusal == (), FOUND[command]


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")  # another test has imported it
def test_makers_of_models_and_data_run_as_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    monkeypatch.chdir(tmp_path)
    assert len(MAKERS) > 8
    for command in MAKERS:
        _, _, module, *arguments = shlex.split(command)
        monkeypatch.setattr(sys, "argv", [module, *arguments])
        with contextlib.redirect_stdout(io.StringIO()):
            runpy.run_module(module, run_name="__main__")
        made = next(tmp_path / argument for argument in arguments if argument.startswith("outputs/"))
        assert any(made.iterdir()), command


def test_every_other_command_is_in_the_table_of_those_that_are_not_read_here() -> None:
    rest = [command for command in FOUND if command not in READ and command not in MAKERS]
    assert [command for command in rest if not command.startswith(tuple(OTHERS))] == []
    used = {command for page in PAGES for command in map(bare, commands_of(page))}
    assert [command for command in UNREADABLE if command not in used] == []
    assert [first for first in OTHERS if not any(command.startswith(first) for command in used)] == []


def test_targets_and_scripts_are_there() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    made = {command.split()[1] for command in FOUND if command.startswith("make ")}
    assert made <= targets
    scripts = {word for command in FOUND for word in command.split() if word.startswith("scripts/")}
    assert scripts
    assert all((ROOT / script).is_file() for script in scripts)


TOML = [
    (page, number, block)
    for page in PAGES
    if page.suffix == ".md"
    for number, (language, block) in enumerate(FENCE.findall(page.read_text()))
    if language == "toml"
]


@pytest.mark.parametrize(
    ("page", "number", "block"), TOML, ids=[f"{page.name}-{number}" for page, number, _ in TOML]
)  # fmt: skip
def test_each_block_of_toml_is_taken_as_printed(page: Path, number: int, block: str, folder: Path) -> None:
    file = folder / f"block_{page.stem}_{number}.toml"
    file.write_text(block)
    if block.startswith("# envs.toml"):
        assert read_config(file).env
        return
    base = "--model.name MODEL" if "orchestrator.train.env" in block else "@ rl.toml"
    pasted = paste(f"rl {base} @ {file.name}", folder)
    assert pasted.refusal == ()
