"""The `rl` program: starts and watches the five programs of one configuration."""

from __future__ import annotations

import os
import shutil
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from loguru import logger

from meshrl.cli.run_folder import RunFolder
from meshrl.core.config import BaseConfig, ConfigError, dump_toml, load_config
from meshrl.core.config.schema import SECTION
from meshrl.core.interpreter import check_interpreter
from meshrl.core.paths import Layout
from meshrl.core.private_folders import keep_to, versions_folder
from meshrl.core.program import run
from meshrl.core.run_folder import delete_all_but, empty_folder, holds_a_run, writing_to
from meshrl.core.telemetry.log_folder import begin_attempt, log_place
from meshrl.core.telemetry.logs import setup_logging
from meshrl.core.telemetry.start import Start
from meshrl.core.torch_environment import VISIBLE_GPUS
from meshrl.diagnosis.outcome import slower_half
from meshrl.inference.config import InferenceConfig
from meshrl.launch.compose import Part, compose
from meshrl.launch.config import RLConfig
from meshrl.launch.credentials import credentials_for, with_engine_key
from meshrl.launch.gpus import visible
from meshrl.launch.join import has_sections, joined
from meshrl.launch.lock import FolderInUseError, FolderLock
from meshrl.launch.nodes.certificates import certify_engines
from meshrl.launch.nodes.job import NodeLostError, NodePorts, copy_to_nodes, nodes_of_job, probe_nodes
from meshrl.launch.nodes.spread import Spread, link_logs, on_nodes, spread_over
from meshrl.launch.ports import FreePorts
from meshrl.launch.preflight.checks import CHECKS, CheckBeside, examine, refusal, show
from meshrl.launch.preflight.findings import Finding, Plan, error
from meshrl.launch.preflight.plugins import check_plugins
from meshrl.launch.submission import submit_run
from meshrl.launch.supervise import Grace, Program, Supervisor
from meshrl.orchestrator.config import OrchestratorConfig
from meshrl.prime_rl import PrimeRLKeys
from meshrl.trainer.config import TrainerConfig
from meshrl.weights.config import WeightsConfig
from meshrl.wire.program_state import FOLDER as STATE_FOLDER
from meshrl.wire.saved_steps import step_folder, steps_in

_NAME = "rl"


def write_configs(layout: Layout, configs: Mapping[str, BaseConfig]) -> None:
    """By the names of their programs. Raises ConfigError when the folder cannot be used."""
    with writing_to(layout.output_dir):
        for name, config in configs.items():
            dump_toml(config, layout.config(name))


def programs(
    parts: Sequence[Part], layout: Layout, credentials: Mapping[str, Mapping[str, str]] | None = None
) -> list[Program]:
    """A restarted trainer goes on from this run's newest checkpoint."""
    earlier = checkpoints(layout)

    def from_newest_checkpoint() -> list[str]:
        own = checkpoints(layout).items() - earlier.items()
        return ["--ckpt.resume-step", str(max(own)[0])] if own else []

    return [
        Program(
            name=part.name,
            command=[str(part.python or sys.executable), "-m", part.module, "@", str(layout.config(part.name))],
            log=log_place(layout, f"{part.name}.log"),
            environ={
                **part.environ,
                **(credentials or {}).get(part.name, {}),
                SECTION: part.name,
            },
            end_stage=part.end_stage,
            leader=part.kind == "orchestrator",
            title=part.run_id,
            restarts=part.restarts,
            resumed=from_newest_checkpoint if part.name == "trainer" else tuple,
            after=part.after,
        )
        for part in parts
    ]


def guests(layout: Layout, parts: Sequence[Part]) -> list[str]:
    """The folders of others' runs in this mesh at this moment."""
    own = {part.config.output_dir.name for part in parts if isinstance(part.config, OrchestratorConfig)}
    found = [folder for folder in layout.output_dir.glob("run_*") if folder.name not in own]
    return sorted(folder.name for folder in found if RunFolder(folder).is_running())


def checkpoints(layout: Layout) -> dict[int, tuple[int, int]]:
    """The trainer's, by step: inode and time of its folder, which change when it is written again."""
    found = {}
    for step in steps_in(layout.checkpoints, "trainer"):
        with suppress(FileNotFoundError):  # it is cleaned away at this moment
            written = (step_folder(layout.checkpoints, step) / "trainer").stat()
            found[step] = (written.st_ino, written.st_mtime_ns)
    return found


def launch(config: RLConfig, start: Start) -> int:
    """Returns the exit code. Raises ConfigError, after which nothing runs and nothing was written, and
    NodeLostError."""
    layout = Layout(config.output_dir)
    resumes = config.trainer.ckpt is not None and config.trainer.ckpt.resume_step is not None
    used = holds_a_run(config.output_dir) and not (config.clean_output_dir or resumes)
    try:
        with FreePorts() as free_ports, FolderLock(layout) as lock:
            ports: FreePorts | NodePorts = free_ports
            spread = None
            is_new = [*config.output_dir.iterdir()] == [layout.lock]
            if config.deployment.type == "multi_node":
                nodes, ports = probe_nodes(nodes_of_job(os.environ, config.deployment.nodes), layout)
                config, spread = spread_over(config, nodes)
            keyed = with_engine_key(config, os.environ)
            os.environ.update(config.tls.files().variables())  # the checks and the programs show the same
            with start.phase("checks"):
                parts, findings, later = checked(keyed, ports, spread=spread, is_new=is_new)
            if config.clean_output_dir and not config.dry_run:
                empty_folder(config.output_dir, keep=[Path(config.trainer.model.name)])
            kept = config.model_copy(update={"clean_output_dir": False, "dry_run": False})  # neither is of a run
            write_configs(layout, {**{part.name: part.config for part in parts}, _NAME: kept})
            for part in parts:
                if part.run_id and isinstance(part.config, OrchestratorConfig):  # its folder is looked at as a run's is
                    write_configs(Layout(part.config.output_dir), {"orchestrator": part.config})
            if not config.dry_run:
                credentials = dict(credentials_for(keyed, parts, os.environ))
                if spread is not None and credentials:
                    credentials |= _engine_certificates(parts, spread, layout)
                begin_attempt(layout)
                runs = [part.config.output_dir for part in parts if isinstance(part.config, OrchestratorConfig)]
                for folder in (config.output_dir, *runs):  # an earlier start's programs are not missed
                    shutil.rmtree(folder / STATE_FOLDER, ignore_errors=True)
                started = programs(parts, layout, credentials)
                if spread is not None:
                    copy_to_nodes(nodes[1:], [layout.config(part.name) for part in parts])
                    link_logs(layout)
                    started = on_nodes(started, spread, layout, ports)
                code = _supervise(config, parts, started, lock, findings, start, used=used, later=later)
                if later is not None and later.problems is not None:
                    delete_all_but(config.output_dir, [layout.lock])
                    raise ConfigError(later.problems)
                return code
            outcome = f"resolved files are in {layout.configs}"
    except FolderInUseError as error:
        if not config.dry_run:
            raise
        with FreePorts() as free_ports:
            _, findings, _ = checked(config, free_ports, folder_in_use=True)
        outcome = f"nothing was written, since {error.what}"
    sys.stdout.writelines(f"note: {text}\n" for text in config.notes)
    sys.stdout.writelines(f"{finding.severity}: {finding.text}\n" for finding in findings)
    sys.stdout.write(f"dry run: the configuration is valid; {outcome}\n")
    return 0


def _engine_certificates(parts: Sequence[Part], spread: Spread, layout: Layout) -> dict[str, Mapping[str, str]]:
    engines = [part for part in parts if part.kind == "inference"]
    hub = next(part.config.server.address for part in parts if isinstance(part.config, WeightsConfig))
    variables = certify_engines(spread, layout, hub)
    return {part.name: given for part, given in zip(engines, variables, strict=True)}


def checked(
    config: RLConfig,
    free_ports: FreePorts | NodePorts,
    *,
    spread: Spread | None = None,
    folder_in_use: bool = False,
    is_new: bool = False,
) -> tuple[tuple[Part, ...], list[Finding], CheckBeside | None]:
    """The parts that can start, the findings, and the check of environments if it is left for later, as in a new
    folder. Raises ConfigError with all problems."""
    gpus = visible(os.environ)
    parts: tuple[Part, ...] = ()
    findings = []
    try:
        composed = compose(
            config,
            free_ports,
            session=uuid.uuid4().hex,
            gpus=gpus,
            placement=None if spread is None else spread.placement,
        )
        for part in composed:
            if part.python is not None:
                check_interpreter(part.name, part.python, part.module)
        parts = composed
    except ConfigError as problem:  # one problem of all that there may be
        if not config.preflight:
            raise
        findings.append(error(str(problem)))
    if not config.preflight:
        return parts, [], None
    plan = Plan(
        config=config,
        parts=parts,
        gpus=gpus,
        chosen_ports=free_ports.given,
        elsewhere=() if spread is None else [node.address for node in (*spread.trainers[1:], *spread.engines)],
        folder_in_use=folder_in_use,
    )
    # Runs and nodes may have folders elsewhere.
    later = is_new and not config.dry_run and not config.runs and spread is None
    findings += examine(plan, [check for check in CHECKS if not (later and check is check_plugins)])
    if later and refusal(findings) is not None:
        findings += check_plugins(plan)
    problems = refusal(findings)
    if problems is not None:
        raise ConfigError(problems)
    return parts, findings, CheckBeside(plan, findings) if later else None


def _supervise(
    config: RLConfig,
    parts: Sequence[Part],
    started: Sequence[Program],
    lock: FolderLock,
    findings: Sequence[Finding],
    start: Start,
    *,
    used: bool,
    later: CheckBeside | None,
) -> int:
    layout = Layout(config.output_dir)
    setup_logging(_NAME, config.log.level, log_place(layout, f"{_NAME}.log"), json_logging=config.log.json_logging)
    start.log("programs start", time.time())
    if used:
        logger.warning(
            "{} holds an earlier run and is used again; --clean-output-dir empties it, --ckpt.resume-step continues it",
            config.output_dir,
        )
    for text in config.notes:
        logger.info("{}", text)
    show(findings)
    for name, addresses in config.orchestrator.services.given().items():
        logger.info("{} runs already at {}: it is used, and left running at the end", name, " and ".join(addresses))
    if config.makes_credentials(os.environ) and config.hub_is_open and not (layout.credentials / "ca.key").exists():
        logger.warning(
            "the weight hub asks nobody who calls, since services that run already call it; with certificates it does"
            " (docs/deployment.md)"
        )
    for line in placed(parts):
        logger.info("{}", line)
    if not any(program.leader for program in started):
        logger.info("a mesh without a run: `rl @ run.toml --mesh {}` adds one, Ctrl-C ends it", config.output_dir)
    grace = Grace(shutdown_s=config.shutdown_grace_s, failure_s=config.failure_grace_s)
    supervisor = Supervisor(
        started,
        grace=grace,
        show=_show,
        lock_fd=lock.fd,
        temporary=temporary_folders(parts),
        landmarks=(layout.lock, layout.configs),
        guests=lambda: guests(layout, parts),
        check=later,
    )
    code = run(supervisor.run)
    if later is not None and later.problems is not None:
        return code
    logger.info(
        "the run {}; metrics, logs and traces are in {}", "is over" if code == 0 else "failed", layout.output_dir
    )
    for part in parts:
        if isinstance(part.config, OrchestratorConfig):
            folder, name = RunFolder(part.config.output_dir), f"{part.run_id}: " if part.run_id else ""
            outcome = folder.outcome()
            for line in ("" if outcome is None else outcome.line(), slower_half(folder.observed())):
                if line:
                    logger.info("{}{}", name, line)
    return code


def temporary_folders(parts: Sequence[Part]) -> list[Path]:
    """Outside of output_dir, where killed programs leave files."""
    return [versions_folder(part.config.output_dir) for part in parts if isinstance(part.config, TrainerConfig)]


def placed(parts: Sequence[Part]) -> list[str]:
    lines = []
    for part in parts:
        if part.environ.get(VISIBLE_GPUS):
            share = isinstance(part.config, InferenceConfig) and part.config.share_gpu
            lines.append(
                f"{part.name} works on GPU {part.environ[VISIBLE_GPUS]}{', which the trainer shares' if share else ''}"
            )
    return lines


def _show(text: str) -> None:
    with suppress(OSError):  # the terminal was closed, and the log has it
        sys.stdout.write(text)
        sys.stdout.flush()


def main() -> None:
    """With --mesh FOLDER it is the orchestrator of one more run in a mesh that runs."""
    code, start = 0, Start()
    try:
        if "--mesh" in sys.argv[1:] and not has_sections(sys.argv[1:]):
            from meshrl.orchestrator.main import main as orchestrator_main  # imports all that a run's loop needs

            orchestrator_main()
            return
        with start.phase("configuration"):
            config = load_config(RLConfig, prog=_NAME, spellings=PrimeRLKeys(RLConfig))
        if config.mesh is not None:
            from meshrl.orchestrator.main import start as start_orchestrator  # the same

            start_orchestrator(joined(config))
            return
        keep_to(config.readable_by, config.output_dir)
        if config.slurm is None:
            code = launch(config, start)
        else:
            _show(submit_run(config, config.slurm))
    except ConfigError as error:
        sys.stderr.write(f"{_NAME}: {error}\n")
        code = 2
    except NodeLostError as error:
        sys.stderr.write(f"{_NAME}: {error}\n")
        code = 1
    sys.exit(code)


if __name__ == "__main__":
    main()
