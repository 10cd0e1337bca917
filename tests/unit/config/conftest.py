"""Loads the sample configuration from command lines, files and variables of a test's own."""

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from config_kit import Sample
from meshrl.core.config import load_config

Load = Callable[..., Sample]


@pytest.fixture
def load() -> Load:
    def load_sample(*argv: str, environ: Mapping[str, str] | None = None) -> Sample:
        return load_config(Sample, list(argv), prog="prog", environ=environ or {})

    return load_sample


@pytest.fixture
def refused(load: Load, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Loads what must be refused with exit code 2; returns the message on stderr."""

    def refuse(*argv: str, environ: Mapping[str, str] | None = None) -> str:
        with pytest.raises(SystemExit) as leaving:
            load(*argv, environ=environ)
        captured = capsys.readouterr()
        assert leaving.value.code == 2
        assert captured.out == ""
        assert "Traceback" not in captured.err
        return captured.err

    return refuse


@pytest.fixture
def toml(tmp_path: Path) -> Callable[..., str]:
    """Writes a TOML file; returns its path."""

    def write(text: str, name: str = "a.toml") -> str:
        path = tmp_path / name
        path.write_text(text)
        return str(path)

    return write
