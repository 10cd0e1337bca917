"""Secrets of a configuration, a file or an environment variable."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from loguru import logger
from pydantic import SecretStr

from meshrl.core.config.base import ConfigError

OTHERS_MAY_READ = 0o077
ADMIN_KEY = "MESHRL_ADMIN_KEY"
"""Variable with the key for an engine's admin routes, if others need none."""


def read_secret(
    key: str, given: SecretStr | None, *, file: Path | None, variable: str, environ: Mapping[str, str]
) -> str | None:
    """The key's own value, else that of `<key>_file`, else of the variable.

    Raises ConfigError, without the secret, for one that no HTTP header can carry and for an unreadable file.
    """
    if given is not None:
        return checked(given.get_secret_value(), key)
    if file is not None:
        try:
            text = file.read_text(encoding="ascii").strip()
            mode = file.stat().st_mode
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is not ASCII text"
            raise ConfigError(
                f"{key}_file: {str(file)!r} cannot be read: {why}; expected a file with the key"
            ) from error
        if mode & OTHERS_MAY_READ:
            logger.warning("{}_file {} may be read by others on this machine; chmod 600 it", key, file)
        return checked(text, f"{key}_file {str(file)!r}")
    return checked(environ[variable], variable) if environ.get(variable) else None


def checked(secret: str, source: str) -> str:
    """Raises ConfigError when it is empty, or has other characters than ASCII's visible ones."""
    if not secret or any(not "!" <= character <= "~" for character in secret):
        raise ConfigError(
            f"{source}: a key has at least one character, all of them letters, digits or signs of ASCII without spaces;"
            " what came is not shown; give another one"
        )
    return secret
