"""What preparing a version took, by part."""

from __future__ import annotations

import pytest

from meshrl.inference.agent import version_loader
from meshrl.inference.agent.version_loader import PartTimes


def test_parts_add_up_and_are_counted_where_they_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = iter([10.0, 10.5, 20.0, 20.25, 30.0, 31.0])
    monkeypatch.setattr(version_loader.time, "monotonic", lambda: next(now_s))
    times = PartTimes()
    with times.part("fetched"):
        pass
    with times.part("applied"):
        pass
    with pytest.raises(OSError, match="broke off"), times.part("fetched"):
        raise OSError("broke off")
    assert times.seconds == {"fetched": 1.5, "applied": 0.25}
    assert str(times) == "fetched 1.500, applied 0.250"
    before = times.seconds
    times.begin()
    assert (times.seconds, before) == ({}, {"fetched": 1.5, "applied": 0.25})
