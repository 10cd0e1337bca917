"""Submits `inference` as a SLURM job when it has a [slurm] section."""

from __future__ import annotations

import os

from meshrl.client.credentials import CredentialFiles
from meshrl.core.config import ConfigError
from meshrl.core.paths import Layout
from meshrl.core.rpc.serve import check_bind
from meshrl.core.slurm.config import InferenceDeploymentConfig, SlurmConfig
from meshrl.core.slurm.submit import BatchJob, submit
from meshrl.inference.config import InferenceConfig
from meshrl.machine.addresses import ANY_HOST


class InferenceProgramConfig(InferenceConfig):
    """One inference engine behind an OpenAI-compatible HTTP server, here or on the nodes of a job."""

    slurm: SlurmConfig | None = None
    """Submit the program as a SLURM job; None starts it here."""

    deployment: InferenceDeploymentConfig = InferenceDeploymentConfig()
    """The nodes of the job."""


def submit_inference(config: InferenceProgramConfig, dry_run: bool) -> str | None:
    """None without [slurm]. Raises ConfigError."""
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
        values={"copies_per_node": _copies_per_node(config), **_listening(config)},
        environ={} if key is None else {config.api_key_var: key.get_secret_value()},
    )
    return submit(job, config.slurm, dry_run=dry_run)


def _listening(config: InferenceProgramConfig) -> dict[str, object]:
    """Raises ConfigError for an engine that others reach, without a certificate or permission to do without."""
    server, tls = config.server, config.tls.files()
    named = CredentialFiles.from_environ(os.environ)
    own = (Layout(config.output_dir).credentials / "ca.key").exists()
    encrypted = own or any((tls.cert, named.cert, config.tls.folder, os.environ.get("MESHRL_TLS_FOLDER")))
    given = "host" in server.model_fields_set
    if not given and not encrypted and not server.insecure:
        raise ConfigError(
            "the engines of a job listen at their nodes' addresses, which others can reach, and there is no TLS; give a"
            " certificate (tls.folder), allow it with --server.insecure, or serve programs of the same node alone with"
            " --server.host 127.0.0.1"
        )
    check_bind(server, encrypted=encrypted)
    scheme = "https" if encrypted else "http"
    if not server.port:
        raise ConfigError("server.port is 0, so nobody could know where the job's engines serve; name a port, as 8000")
    where = ""
    if not given:
        where = '--server.host "$ADDRESS"'
    elif server.host in ANY_HOST and config.url is None:
        where = f'--url "{scheme}://$ADDRESS:{server.port}"'
    return {"where": where, "scheme": scheme, "port": server.port}


def _copies_per_node(config: InferenceProgramConfig) -> int:
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
