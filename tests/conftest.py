"""Settings of every test: kernels on one thread, and which tests stay together when several processes run them."""

import os

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests of one file, and all of one engine, share what they have started. Whole runs are the longest: first."""
    if hasattr(config, "workerinput"):  # one of several
        items.sort(key=lambda item: item.get_closest_marker("mesh") is None)
        for item in items:
            item.add_marker(pytest.mark.xdist_group(_group(item)))


def _group(item: pytest.Item) -> str:
    if item.get_closest_marker("mesh") is not None:
        return "mesh"  # one run beside other tests is enough for a machine
    parameters = getattr(getattr(item, "callspec", None), "params", {})
    return str(parameters.get("engine_kind", item.path))
