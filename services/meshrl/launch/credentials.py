"""Makes the credentials of a run, so that its programs accept calls from each other only.

On one host these are a token for each role, of which servers hold hashes (trust.sqlite), and an API key for the
engines; over several nodes a certificate authority, for `nodes.certificates`. Where the configuration or the
environment names credentials, none are made.
"""

from __future__ import annotations

import secrets
import sqlite3
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import SecretStr

from meshrl.client.authority import Authority
from meshrl.client.credentials import PREFIX, TRUST_FILE, CredentialFiles
from meshrl.client.private import private_folder, write_private
from meshrl.client.trust import Role, TrustFile
from meshrl.core.config import ConfigError
from meshrl.core.credentials.secret import ADMIN_KEY
from meshrl.core.paths import Layout
from meshrl.launch.compose import Part
from meshrl.launch.config import RLConfig

ROLE_OF: Mapping[str, Role] = {
    "weights": Role.HUB,
    "trainer": Role.PUBLISHER,
    "inference": Role.AGENT,
    "rollout": Role.ROLLOUT,
    "teacher": Role.ROLLOUT,
    "orchestrator": Role.ORCHESTRATOR,
}
ENGINE_KEY = "engine.key"


def with_engine_key(config: RLConfig, environ: Mapping[str, str]) -> RLConfig:
    """With an API key for its engines, unless there is one, or rollout services run already, which cannot know it."""
    inference, client = config.inference, config.rollout.client
    if inference is None or not config.makes_credentials(environ) or "rollout" in config.orchestrator.services.given():
        return config
    variables = {inference.api_key_var, client.api_key_var}
    given = inference.api_key or inference.api_key_file or client.api_key_file
    if given or any(environ.get(variable) for variable in variables):
        return config
    keyed = inference.model_copy(update={"api_key": SecretStr(secrets.token_urlsafe(32))})
    return config.model_copy(update={"inference": keyed})


def credentials_for(
    config: RLConfig, parts: Sequence[Part], environ: Mapping[str, str]
) -> Mapping[str, Mapping[str, str]]:
    """Writes tokens and the engines' key (`config` is from `with_engine_key`). Returns variables by part. Raises
    ConfigError."""
    folder = Layout(config.output_dir).credentials
    if not config.makes_credentials(environ):
        return {}
    try:
        private_folder(folder)
        if config.deployment.type == "multi_node" and not (folder / "ca.key").exists():
            running = [address for addresses in config.orchestrator.services.given().values() for address in addresses]
            if running or config.running_engines:
                raise ConfigError(
                    f"{', '.join([*running, *config.running_engines])} ran before this job and cannot know the"
                    " certificates that it makes for its programs; give them all credentials of one run"
                    " (MESHRL_TLS_FOLDER, docs/deployment.md), or set deployment.insecure where nobody else reaches"
                    " that network"
                )
            Authority.create(folder, f"job-{environ.get('SLURM_JOB_ID', 'none')}")
        admin, engines = {}, config.inference  # of engines whose key was set elsewhere nothing is written
        if engines is not None and engines.api_key_file is None and not environ.get(engines.api_key_var):
            key = secrets.token_urlsafe(32) if engines.api_key is None else engines.api_key.get_secret_value()
            write_private(folder / ENGINE_KEY, key.encode() + b"\n")
            if engines.api_key is None:  # they want one for their admin routes alone
                admin = {ADMIN_KEY: key}
        # Where the run has an authority, programs get certificates by it.
        tokens = {} if (folder / "ca.key").exists() else _write_tokens(folder)
    except (OSError, sqlite3.Error) as error:
        raise ConfigError(
            f"output_dir: {str(folder)!r} cannot be written: {error}; choose another output_dir"
        ) from error
    if config.hub_is_open and tokens:
        tokens[Role.HUB].pop(f"{PREFIX}TRUST")
    return {
        part.name: {**tokens.get(ROLE_OF[part.kind], {}), **(admin if part.kind == "inference" else {})}
        for part in parts
    }


def _write_tokens(folder: Path) -> dict[Role, dict[str, str]]:
    trust = TrustFile(folder / TRUST_FILE)
    trust.create()
    variables = {}
    for role in set(Role) - {Role.TENANT}:  # who trains beside this run is not known here
        file = folder / f"{role}.token"
        write_private(file, trust.add_token(role, id_=role.value).encode() + b"\n")
        variables[role] = CredentialFiles(token=file.resolve(), trust=trust.path.resolve()).variables()
    return variables
