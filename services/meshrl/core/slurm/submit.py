"""Writes a job's batch script and submits it."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import jinja2

from meshrl.core.config.base import BaseConfig, ConfigError
from meshrl.core.config.dump import dump_toml, to_toml
from meshrl.core.paths import Layout
from meshrl.core.run_folder import writing_to
from meshrl.core.slurm.config import SlurmConfig

SBATCH_DEADLINE_S = 60.0
SCRIPT = "submit.sh"
END_OF_CONFIG = "END_OF_CONFIGURATION"


@dataclass(frozen=True, kw_only=True)
class BatchJob:
    program: str
    """Also the name of template, configuration file and folder of logs."""

    module: str
    config: BaseConfig
    output_dir: Path
    nodes: int = 1
    gpus_per_node: int = 0
    values: Mapping[str, object] = field(default_factory=dict)
    environ: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Handed on by sbatch. It may hold a secret, which no file does."""


def script_of(job: BatchJob, slurm: SlurmConfig) -> str:
    """Raises ConfigError for a template that is missing or cannot be filled in."""
    layout = Layout(job.output_dir.absolute())
    values: dict[str, object] = {
        **slurm.model_dump(),
        **job.values,
        "program": job.program,
        "module": job.module,
        "python": str(slurm.python or sys.executable),
        "nodes": job.nodes,
        "gpus_per_node": job.gpus_per_node,
        "output_dir": str(layout.output_dir),
        "log_path": str(layout.slurm / "%j.log"),
        "config_path": str(layout.config(job.program)),
        "config": to_toml(job.config, given_only=True),
        "end_of_config": END_OF_CONFIG,
    }
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("meshrl.core.slurm"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # a shell script: what comes from the configuration is quoted for the shell
    )
    environment.filters["quote"] = lambda value: shlex.quote(str(value))
    try:
        if slurm.template_path is None:
            return environment.get_template(f"{job.program}.sbatch.j2").render(values)
        return environment.from_string(slurm.template_path.read_text()).render(values)
    except OSError as error:
        raise ConfigError(
            f"slurm.template_path {str(slurm.template_path)!r} cannot be read ({error.strerror}); correct it, or leave"
            " it out"
        ) from error
    except jinja2.TemplateError as error:
        raise ConfigError(f"slurm.template_path {str(slurm.template_path)!r}: {error}; correct the template") from error


def submit(job: BatchJob, slurm: SlurmConfig, *, dry_run: bool) -> str:
    """Returns the outcome. Raises ConfigError if files cannot be written or sbatch refuses."""
    layout = Layout(job.output_dir.absolute())
    path = layout.slurm / SCRIPT
    script = script_of(job, slurm)
    with writing_to(job.output_dir):
        layout.slurm.mkdir(parents=True, exist_ok=True)
        dump_toml(job.config, layout.config(job.program))
        path.write_text(script)
        path.chmod(0o700)  # it holds the configuration, where free arguments may hold secrets
    if dry_run:
        return f"dry run: the configuration is valid; sbatch {path} would submit it\n"
    number = _sbatch(path, {**os.environ, **job.environ})
    return (
        f"submitted job {number} ({slurm.job_name}); squeue -j {number} shows it, tail -F"
        f" {layout.slurm}/{number}.log follows it, scancel {number} ends it\n"
    )


def _sbatch(script: Path, environ: Mapping[str, str]) -> str:
    try:
        done = subprocess.run(
            ["sbatch", "--parsable", str(script)],
            capture_output=True, text=True, timeout=SBATCH_DEADLINE_S, env=dict(environ), check=False,
        )  # fmt: skip
    except FileNotFoundError:
        raise ConfigError(
            "slurm: there is no sbatch on this machine; submit from one that has SLURM, or leave [slurm] out"
        ) from None
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"slurm: sbatch did not answer within {SBATCH_DEADLINE_S:g} s; look at squeue whether {script} was"
            " submitted, and at scontrol ping"
        ) from None
    if done.returncode:
        said = done.stderr.strip() or f"exit code {done.returncode}"
        raise ConfigError(f"slurm: sbatch refused {script}: {said}")
    found = re.match(r"\d+", done.stdout.strip())
    if found is None:
        raise ConfigError(f"slurm: sbatch answered {done.stdout.strip()!r}, which is no number of a job")
    return found.group()
