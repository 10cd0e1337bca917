"""Gives the programs of a run on one host what they know each other by, so that no other user may drive or change it.

A token for each role lies in output_dir/credentials, for the run's own user alone, and is made anew by each `rl`; the
servers hold their hashes (trust.sqlite). Engines get an API key in the same way. Credentials that the configuration or
the environment names are left to their owner.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence

from pydantic import SecretStr

from meshrl.client.credentials import PREFIX, TRUST_FILE, CredentialFiles
from meshrl.client.trust import Role, TrustFile, write_private
from meshrl.core.config import ConfigError
from meshrl.core.config.shared import TlsConfig
from meshrl.core.paths import Layout
from meshrl.launch.compose import Part
from meshrl.launch.config import RLConfig

ROLE_OF: Mapping[str, Role] = {
    "weights": Role.RELAY,
    "trainer": Role.PUBLISHER,
    "inference": Role.AGENT,
    "rollout": Role.ROLLOUT,
    "teacher": Role.ROLLOUT,
    "orchestrator": Role.ORCHESTRATOR,
}
ENGINE_KEY = "engine.key"


def with_engine_key(config: RLConfig, environ: Mapping[str, str]) -> RLConfig:
    """The configuration with an API key for its engines, where neither it nor the environment has one."""
    inference, client = config.inference, config.rollout.client
    if inference is None or not makes_own(config, environ):
        return config
    variables = {inference.api_key_var, client.api_key_var}
    given = inference.api_key or inference.api_key_file or client.api_key_file
    if given or any(environ.get(variable) for variable in variables):
        return config
    keyed = inference.model_copy(update={"api_key": SecretStr(secrets.token_urlsafe(32))})
    return config.model_copy(update={"inference": keyed})


def makes_own(config: RLConfig, environ: Mapping[str, str]) -> bool:
    """Whether the run is to have credentials of its own: it is on one host, and nobody has named others."""
    named = any(variable.startswith(PREFIX) and value for variable, value in environ.items())
    named = named or config.tls != TlsConfig()
    return config.deployment.type != "multi_node" and not named


def credentials_for(
    config: RLConfig, parts: Sequence[Part], environ: Mapping[str, str]
) -> Mapping[str, Mapping[str, str]]:
    """Writes the run's tokens; returns the variables of each part by its name. Raises ConfigError."""
    folder = Layout(config.output_dir).credentials
    if not makes_own(config, environ) or (folder / "ca.key").exists():  # by it programs get certificates
        return {}
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        folder.chmod(0o700)
        trust = TrustFile(folder / TRUST_FILE)
        trust.create()
        for role in Role:
            write_private(folder / f"{role}.token", trust.add_token(role, id_=role.value).encode() + b"\n")
        key = config.inference.api_key if config.inference is not None else None
        if key is not None:
            write_private(folder / ENGINE_KEY, key.get_secret_value().encode() + b"\n")
    except OSError as error:
        raise ConfigError(
            f"output_dir: {str(folder)!r} cannot be written: {error.strerror}; choose another output_dir"
        ) from error
    return {
        part.name: CredentialFiles(
            token=(folder / f"{ROLE_OF[part.name.partition('_')[0]]}.token").resolve(), trust=trust.path.resolve()
        ).variables()
        for part in parts
    }
