"""One engine of each kind for the whole session, and a client of it for each test."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from engine_mesh import LEASE_S, START_S, EngineClient, EngineKind, EngineMesh
from meshrl.versions.transports import filesystem

REPOSITORY = Path(__file__).parents[3]
DEVICE = os.environ.get("MESHRL_TEST_DEVICE", "cpu")
"""Set it to cuda to hold engines on a GPU against the same plain model, which stays on the CPU."""
CONNECTIONS = 6  # made before a test needs them: a busy machine takes its time for one
CONFIGS: dict[str, dict[str, Any]] = {
    "embedded": {"kv_cache_bytes": 2**28, "torch_threads": 1},
    "vllm": {"enforce_eager": True, "torch_threads": 1, "kv_cache_bytes": 2**27},
}
RENDERER = {"name": "default", "tool_parser": "qwen3"}


def kind_of(
    name: str,
    dtype: torch.dtype = torch.float32,
    *,
    family: str = "qwen3",
    module: str = "meshrl.inference.main",
    broadcast: Mapping[str, Any] | None = None,
    **config: Any,
) -> EngineKind:
    if name == "vllm" and DEVICE == "cuda":  # its attention kernels take no float32
        dtype, config = torch.bfloat16, {"gpu_memory_utilization": 0.2, **config}
    exact = dtype == torch.float32
    return EngineKind(
        name=name,
        python=Path(sys.executable) if name == "embedded" else vllm_python(),
        dtype=dtype,
        device=DEVICE,
        family=family,
        module=module,
        config={**CONFIGS[name], "renderer": RENDERER, **config},
        broadcast=broadcast or {},
        clear_margin=1e-3 if exact else 0.1,
        # transformers itself is this far from float32 in bfloat16, at a temperature of 0.7
        logprob_atol=1e-4 if exact else 0.15,
        logprob_mean=1e-5 if exact else 0.035,
    )


def vllm_python() -> Path:
    """The interpreter that has vLLM. Without one the tests are skipped, in CI they fail."""
    python = Path(os.environ.get("MESHRL_VLLM_PYTHON") or REPOSITORY / ".tools/vllm/bin/python")
    if not python.exists():
        reason = f"there is no vLLM at {python}; run make vllm, or set MESHRL_VLLM_PYTHON"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    return python


@pytest.fixture(scope="session")
def vllm() -> Path:
    return vllm_python()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The first test of an engine waits for its start, which takes vLLM minutes on a busy machine."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(START_S + 100.0))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A failure comes with the last lines of the programs that the test used."""
    report = yield
    if report.failed and isinstance(item, pytest.Function):
        for mesh in {one for one in item.funcargs.values() if isinstance(one, EngineMesh)}:
            for program in (mesh.hub, mesh.engine):
                report.sections.append((f"end of {program.log}", program.tail()))
    return report


@pytest.fixture(scope="session", params=["embedded", "vllm"])
def engine_kind(request: pytest.FixtureRequest) -> EngineKind:
    return kind_of(request.param)


@pytest.fixture(scope="session")
def session_mesh(engine_kind: EngineKind, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineMesh]:
    mesh = EngineMesh(engine_kind, tmp_path_factory.mktemp(engine_kind.name))
    yield mesh
    mesh.close()


@pytest.fixture(scope="module")
def start_mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., EngineMesh]]:
    """Starts further engines for the tests of one file; arguments are those of `kind_of` and of `EngineMesh`."""
    started: list[EngineMesh] = []

    def start(
        name: str, dtype: torch.dtype = torch.float32, lease_s: float = LEASE_S, waits: bool = True, **how: Any
    ) -> EngineMesh:
        kind, folder = kind_of(name, dtype, **how), tmp_path_factory.mktemp(name)
        started.append(EngineMesh(kind, folder, lease_s=lease_s, waits=waits))
        return started[-1]

    yield start
    for mesh in started:
        mesh.close()


@pytest.fixture(autouse=True)
def several_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Versions that are files come in several of them, as large ones do."""
    monkeypatch.setattr(filesystem, "FILE_BYTES", 4096)


@pytest.fixture
async def mesh(session_mesh: EngineMesh) -> EngineMesh:
    """Serves a plain model; started anew when a test before has ended the engine."""
    torch.set_num_threads(1)
    if session_mesh.engine.process.poll() is not None:
        session_mesh.restart_engine()
    if session_mesh.seed is None:
        await session_mesh.publish(0)
    return session_mesh


@pytest.fixture
async def client(mesh: EngineMesh) -> AsyncIterator[EngineClient]:
    async with mesh.session() as session:
        client = EngineClient(session)
        await asyncio.gather(*(client.version() for _ in range(CONNECTIONS)))
        yield client
