"""Where a test runs decides nothing: neither a network nor anybody's accounts are looked at."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def without_network_or_accounts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "WANDB_MODE", "WANDB_API_KEY", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
