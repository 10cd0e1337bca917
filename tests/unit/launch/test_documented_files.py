"""TOML files in the documents are taken as they are printed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from meshrl.core.config import load_config
from meshrl.launch.config import RLConfig

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```toml\n(.*?)^```", re.MULTILINE | re.DOTALL)
BLOCKS = [(page.name, text) for page in PAGES for text in BLOCK.findall(page.read_text())]


@pytest.mark.parametrize(("page", "text"), BLOCKS)
def test_a_file_in_the_documents_is_taken_as_it_is_printed(page: str, text: str, tmp_path: Path) -> None:
    (tmp_path / "rl.toml").write_text(text)
    trains = [] if "[[orchestrator.train.env]]" in text else ["--orchestrator.train.env.0.id", "reverse_text"]
    load_config(RLConfig, ["@", str(tmp_path / "rl.toml"), "--inference", *trains], prog="rl", environ={})


def test_the_documents_have_files() -> None:
    assert len(BLOCKS) >= 8
