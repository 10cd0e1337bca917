"""The `rl` program: one configuration becomes five running programs, watched until the run is over."""

from __future__ import annotations

import socket
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

from loguru import logger

from meshrl.core.config import ConfigError, dump_toml, load_config
from meshrl.core.logs import setup_logging
from meshrl.core.paths import Layout
from meshrl.core.serve import run
from meshrl.launch.compose import Part, compose
from meshrl.launch.config import RLConfig
from meshrl.launch.folder import empty_folder, holds_a_run
from meshrl.launch.supervise import Grace, Program, Supervisor

_NAME = "rl"


class FreePorts:
    """Free ports of this machine, each given once."""

    def __init__(self) -> None:
        self._given: set[int] = set()

    def __call__(self, host: str) -> int:
        """A free port of `host`. Raises ConfigError when the host is not one of this machine."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        while True:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                try:
                    probe.bind((host, 0))
                except OSError as error:
                    raise ConfigError(
                        f"server.host {host!r}: no port can be bound there ({error}); use 127.0.0.1"
                    ) from error
                port = int(probe.getsockname()[1])
            if port not in self._given:
                self._given.add(port)
                return port


def prepare(config: RLConfig, free_port: Callable[[str], int]) -> tuple[Part, ...]:
    """Readies the output folder and writes each program's configuration there.

    Raises ConfigError when the folder cannot be used.
    """
    layout = Layout(config.output_dir)
    parts = compose(config, free_port, session=uuid.uuid4().hex)
    if config.clean_output_dir and not config.dry_run:
        empty_folder(config.output_dir, keep=Path(config.trainer.model.name))
    try:
        for part in parts:
            dump_toml(part.config, layout.config(part.name))
        kept = config.model_copy(update={"clean_output_dir": False, "dry_run": False})  # neither is a property of a run
        dump_toml(kept, layout.config(_NAME))
    except OSError as error:
        raise ConfigError(
            f"output_dir {str(config.output_dir)!r} cannot be written: {error.strerror}; choose another"
        ) from error
    return parts


def programs(parts: Sequence[Part], layout: Layout) -> list[Program]:
    """What to start: each part as a process that reads its own configuration file.

    A trainer that is started again goes on from the newest checkpoint that this run has written.
    """
    commands = {part.name: [sys.executable, "-m", part.module, "@", str(layout.config(part.name))] for part in parts}
    began_s = time.time()

    def trainer_again() -> list[str]:
        step = newest_checkpoint(layout.output_dir, since_s=began_s)
        return commands["trainer"] + ([] if step is None else ["--ckpt.resume-step", str(step)])

    return [
        Program(
            name=part.name,
            command=commands[part.name],
            log=layout.log(part.name),
            environ=part.environ,
            end_stage=part.end_stage,
            leader=part.name == "orchestrator",
            restarts=part.restarts,
            again=trainer_again if part.name == "trainer" else None,
        )
        for part in parts
    ]


def newest_checkpoint(output_dir: Path, *, since_s: float) -> int | None:
    """Step of the newest trainer checkpoint that was written after a point in time (seconds of the epoch)."""
    written = (
        int(folder.parent.name.removeprefix("step_"))
        for folder in (output_dir / "checkpoints").glob("step_*/trainer")
        if folder.stat().st_mtime >= since_s
    )
    return max(written, default=None)


def launch(config: RLConfig) -> int:
    """Starts a run and watches over it; returns the exit code. Raises ConfigError before anything is started."""
    layout = Layout(config.output_dir)
    resumes = config.trainer.ckpt is not None and config.trainer.ckpt.resume_step is not None
    used = holds_a_run(config.output_dir) and not (config.clean_output_dir or resumes)
    parts = prepare(config, FreePorts())
    if config.dry_run:
        sys.stdout.write(f"dry run: the configuration is valid; resolved files are in {layout.configs}\n")
        return 0
    setup_logging(_NAME, config.log.level, layout.log(_NAME), json_logging=config.log.json_logging)
    if used:
        logger.warning(
            "{} holds an earlier run and is used again; --clean-output-dir empties it, --ckpt.resume-step continues it",
            config.output_dir,
        )
    if config.trainer.wandb is not None:
        logger.warning("trainer.wandb is not used: the orchestrator logs the trainer's metrics; set wandb instead")
    grace = Grace(shutdown_s=config.shutdown_grace_s, failure_s=config.failure_grace_s)
    supervisor = Supervisor(programs(parts, layout), grace=grace, show=_show)
    code = run(supervisor.run)
    logger.info(
        "the run {}; metrics, logs and traces are in {}", "is over" if code == 0 else "failed", layout.output_dir
    )
    return code


def _show(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def main() -> None:
    """Console script `rl`."""
    config = load_config(RLConfig, prog=_NAME)
    try:
        code = launch(config)
    except ConfigError as error:
        sys.stderr.write(f"{_NAME}: {error}\n")
        code = 2
    sys.exit(code)


if __name__ == "__main__":
    main()
