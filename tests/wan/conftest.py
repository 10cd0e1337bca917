"""Skips what needs network namespaces where there can be none."""

from __future__ import annotations

import pytest

from wan_rig import why_not


@pytest.fixture(scope="session", autouse=True)
def namespaces() -> None:
    """Sites of `wan_rig` can be made."""
    if reason := why_not():
        pytest.skip(reason)
