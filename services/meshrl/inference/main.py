"""The `inference` program: an engine that serves, its benchmark, or the vLLM processes of a further node."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path

from meshrl.client.trust import Role
from meshrl.core.config import ConfigError, load_config
from meshrl.core.config.schema import SECTION
from meshrl.core.credentials.identity import as_member
from meshrl.core.heap import loading
from meshrl.core.interpreter import check_interpreter
from meshrl.core.private_folders import short_socket_paths
from meshrl.core.program import log_as, run, run_traced
from meshrl.core.torch_environment import may_have_gpu, wait_briefly
from meshrl.inference.config import InferenceConfig
from meshrl.inference.submission import InferenceProgramConfig, submit_inference
from meshrl.inference.vllm.processes import import_ahead
from meshrl.prime_rl import PrimeRLKeys

CHOSEN, MODULE = "MESHRL_PYTHON", "meshrl.inference.main"


def _elsewhere(config: InferenceProgramConfig, dry_run: bool) -> str | None:
    told = submit_inference(config, dry_run)
    if told is None and config.weight_broadcast is not None and config.unpublished:
        raise ConfigError(config.unpublished)
    if told is None and config.python is not None and not dry_run:
        _start_anew_in(config.python)
    return told


def _start_anew_in(python: Path) -> None:
    """Replaces this process by the same program in another interpreter, unless this is it. Raises ConfigError."""
    chosen = os.path.abspath(python)
    if chosen in (sys.executable, os.environ.get(CHOSEN)):
        return
    check_interpreter("inference", python, MODULE)
    os.execve(chosen, [chosen, "-m", MODULE, *sys.argv[1:]], {**os.environ, CHOSEN: chosen})


def main() -> None:
    config = load_config(
        InferenceProgramConfig,
        prog="inference",
        instead=_elsewhere,
        spellings=PrimeRLKeys(InferenceProgramConfig, "inference"),
    )
    with ExitStack() as stack:
        if config.engine == "vllm":
            stack.enter_context(short_socket_paths())
        else:  # vLLM's processes have the cores of a CPU for themselves
            wait_briefly(os.environ)
        if config.imports_vllm_ahead and may_have_gpu(os.environ) and find_spec("vllm") is not None:
            import_ahead(config.torch_threads)
        _run(config)


def _run(config: InferenceProgramConfig) -> None:
    # Engines of one run write to one folder: traces, states and targets of metrics have the program's name.
    name = f"inference-{config.engine_id}" if config.engine_id else os.environ.get(SECTION, "inference")
    log_as(name, config)
    if config.headless:
        from meshrl.inference.vllm.build import run_headless  # vLLM is an extra, and takes seconds to import

        run_headless(config)
        return
    settings = config.bench
    if settings is not None:
        from meshrl.inference.bench import bench  # imports torch, which takes seconds

        sys.exit(run(lambda stop: bench(config, settings, stop)))
    with loading():
        from meshrl.inference.program import serve  # the same

    sys.exit(run_traced(name, config, as_member(Role.AGENT, serve, hosts=InferenceConfig.hosts)))


if __name__ == "__main__":
    main()
