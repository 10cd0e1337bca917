"""`make contracts`: the contracts are held to those of a named commit, wherever the branch is."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository of its own with the contracts and their check; its first commit is the baseline."""
    folder = tmp_path / "checkout"
    shutil.copytree(ROOT / "proto", folder / "proto")
    for name in ("buf.yaml", "scripts/check_contracts.sh"):
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    (folder / ".tools").symlink_to(ROOT / ".tools")
    (folder / "proto" / "EXCEPTIONS").write_text("")
    git(folder, "init", "--quiet", "--initial-branch", "main")
    commit(folder)
    (folder / "proto" / "BASELINE").write_text(git(folder, "rev-parse", "HEAD"))
    return folder


def git(folder: Path, *words: str) -> str:
    author = ("-c", "user.name=A", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false")
    return subprocess.run(
        ["git", *author, *words], cwd=folder, check=True, capture_output=True, text=True, timeout=60
    ).stdout


def commit(folder: Path) -> None:
    git(folder, "add", "proto", "buf.yaml", "scripts")
    git(folder, "commit", "--quiet", "--message", "contracts")


def check(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [folder / "scripts" / "check_contracts.sh"], capture_output=True, text=True, timeout=120, check=False
    )


def replace(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))


def test_a_field_that_main_renamed_is_refused_and_a_new_one_is_not(checkout: Path) -> None:
    contract = checkout / "proto" / "meshrl" / "v1" / "rollout.proto"
    replace(contract, "double reward = 7;", "double reward = 7;\n  // New.\n  double novelty = 1000;")
    commit(checkout)
    accepted = check(checkout)
    assert accepted.returncode == 0, accepted.stdout + accepted.stderr
    replace(contract, "double reward = 7;", "double score = 7;")
    commit(checkout)
    refused = check(checkout)
    assert refused.returncode != 0
    assert 'from "reward" to "score"' in refused.stdout


def test_a_change_of_generated_code_needs_its_exception_and_an_exception_its_change(checkout: Path) -> None:
    contract, exceptions = checkout / "proto" / "meshrl" / "v1" / "rollout.proto", checkout / "proto" / "EXCEPTIONS"
    replace(contract, "optional double reward = 7;", "double reward = 7;")
    refused = check(checkout)
    assert refused.returncode == 1
    assert "rollout.proto:" in refused.stderr
    assert 'Field "7" with name "reward" on message "Rollout"' in refused.stderr
    row = 'FIELD_SAME_CARDINALITY | "reward" on message "Rollout" | because'
    exceptions.write_text(row)
    accepted = check(checkout)
    assert accepted.returncode == 0, accepted.stdout + accepted.stderr
    replace(contract, "double reward = 7;", "optional double reward = 7;")
    unused = check(checkout)
    assert unused.returncode == 1
    assert "is no change any more: remove the line" in unused.stderr


def test_a_change_of_the_wire_has_no_exceptions(checkout: Path) -> None:
    contract, exceptions = checkout / "proto" / "meshrl" / "v1" / "rollout.proto", checkout / "proto" / "EXCEPTIONS"
    replace(contract, "optional double reward = 7;", "optional uint64 reward = 7;")
    exceptions.write_text('FIELD_SAME_TYPE | "reward" on message "Rollout" | because')
    refused = check(checkout)
    assert refused.returncode != 0
    assert 'changed type from "double" to "uint64"' in refused.stdout


def test_a_clone_without_the_baseline_names_what_to_fetch(checkout: Path, tmp_path: Path) -> None:
    commit(checkout)
    clone = tmp_path / "clone"
    git(tmp_path, "clone", "--quiet", "--depth", "1", checkout.as_uri(), str(clone))
    (clone / ".tools").symlink_to(ROOT / ".tools")
    refused = check(clone)
    assert refused.returncode == 2
    fetch = refused.stderr.rpartition("run '")[2].partition("'")[0]
    git(clone, *fetch.split()[1:])
    assert check(clone).returncode == 0
