"""The sections that place a program on a cluster: [slurm], and the nodes in [deployment]."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from meshrl.core.config.base import BaseConfig

_NAME = r"^[A-Za-z0-9_.:+-]+$"
_LINE = r"^[^\r\n]+$"
_TIME = r"^(\d+|\d+:\d\d|\d+:\d\d:\d\d|\d+-\d+(:\d\d){0,2}|UNLIMITED)$"

DeploymentType = Literal["single_node", "multi_node"]


class SlurmConfig(BaseConfig):
    """Submit the program as a SLURM job."""

    job_name: str = Field(default="meshrl", pattern=_NAME)
    """Name of the job."""

    partition: str | None = Field(default=None, pattern=_LINE)
    """Partition of the job. None takes the cluster's default."""

    account: str | None = Field(default=None, pattern=_LINE)
    """Account to charge. None takes yours."""

    time: str | None = Field(default=None, pattern=_TIME)
    """Time limit: minutes, HH:MM:SS or D-HH:MM:SS. None takes the partition's."""

    nodelist: str | None = Field(default=None, pattern=_LINE)
    """Nodes that the job must have, such as node[01-04]."""

    exclude: str | None = Field(default=None, pattern=_LINE)
    """Nodes that the job must not have."""

    template_path: Path | None = None
    """A batch script of your own as a Jinja2 template. None takes the program's."""

    pre_run_command: str | None = Field(default=None, min_length=1)
    """Shell command that runs once on each node before the program."""

    exclusive: bool = True
    """Take whole nodes. Otherwise name cores and memory in `options`."""

    options: list[str] = Field(default_factory=list)
    """Further options of sbatch, as on its command line: --qos=high, --cpus-per-task=16."""

    python: Path | None = None
    """Interpreter on the nodes, with meshrl installed. None means the path of this one."""

    max_requeues: int = Field(default=5, ge=0)
    """How often a job requeues itself, for a lost node or by requeue_at_limit."""

    requeue_at_limit: bool = False
    """Requeue the job before its time limit, once everything is saved; its next start resumes."""


class OneNodeConfig(BaseConfig):
    """The node of a job."""

    type: Literal["single_node"] = "single_node"
    """The only value."""

    gpus_per_node: int = Field(default=8, ge=0)
    """GPUs of the node; 0 for one without."""


class InferenceDeploymentConfig(BaseConfig):
    """The nodes of a job that serves one model."""

    type: DeploymentType = "single_node"
    """One node, or num_infer_nodes of them."""

    num_infer_nodes: int = Field(default=1, ge=1)
    """Nodes with an engine each, or with parts of one if data_parallel_size takes more GPUs than a node has."""

    gpus_per_node: int = Field(default=8, ge=0)
    """GPUs of each node; 0 for nodes without."""
