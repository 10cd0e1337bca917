"""Submits `inference` as a SLURM job instead of running it here, when it has a [slurm] section."""

from __future__ import annotations

from meshrl.core.config import ConfigError
from meshrl.core.slurm.config import InferenceDeploymentConfig, SlurmConfig
from meshrl.core.slurm.submit import BatchJob, submit
from meshrl.inference.config import InferenceConfig


class InferenceProgramConfig(InferenceConfig):
    """One inference engine behind an OpenAI-compatible HTTP server, here or on the nodes of a job."""

    slurm: SlurmConfig | None = None
    """Submit the program as a SLURM job; None starts it here."""

    deployment: InferenceDeploymentConfig = InferenceDeploymentConfig()
    """The nodes of the job."""


def submit_inference(config: InferenceProgramConfig, dry_run: bool) -> str | None:
    """Writes the job and, unless it is a dry run, submits it; None where there is no [slurm]. Raises ConfigError."""
    if config.slurm is None:
        return None
    given = config.deployment
    key = config.api_key
    job = BatchJob(
        program="inference",
        module="meshrl.inference.main",
        config=config.model_copy(update={"slurm": None}),
        output_dir=config.output_dir,
        nodes=given.num_infer_nodes if given.type == "multi_node" else 1,
        gpus_per_node=given.gpus_per_node,
        values={"copies_per_node": _copies_per_node(config)},
        environ={} if key is None else {config.api_key_var: key.get_secret_value()},
    )
    return submit(job, config.slurm, dry_run=dry_run)


def _copies_per_node(config: InferenceProgramConfig) -> int:
    """Copies of the model on each node where one engine is spread over all of them; 0 for an engine a node."""
    given = config.deployment
    copies = int(config.vllm_argument("data_parallel_size") or 1)
    if given.type != "multi_node" or not given.gpus_per_node or config.gpus_per_engine() <= given.gpus_per_node:
        return 0
    if copies % given.num_infer_nodes:
        raise ConfigError(
            f"data_parallel_size is {copies}, which deployment.num_infer_nodes ({given.num_infer_nodes}) does not"
            " divide; use a multiple of it"
        )
    return copies // given.num_infer_nodes
