"""Who may read what a run writes: its own user alone, unless `readable_by` allows others.

In output_dir the umask decides. A folder in /dev/shm or /tmp has a name that others cannot guess and mode 0700;
another's folder, or a link, is refused. All calls block and raise OSError.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import stat
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing import current_process
from pathlib import Path
from typing import Any, Literal

from meshrl.client.private import private_folder
from meshrl.core.config.base import ConfigError
from meshrl.core.config.schema import flag
from meshrl.core.orphans import FolderGuardian
from meshrl.core.paths import Layout

SHM = Path("/dev/shm")
SHM_VERSIONS = 3
"""Versions that a run keeps there: served, being fetched, being written."""

SOCKET_PATH_BYTES = 107
SOCKET_NAME_BYTES = 48
"""Room for a socket's name, with a folder of a library's own around it (multiprocessing: 32, vLLM: 37)."""

ReadableBy = Literal["owner", "group", "everyone"]

_UMASKS: Mapping[str, int] = {"owner": 0o077, "group": 0o027, "everyone": 0o022}
_TMP = Path("/tmp")
_OTHERS_WRITE = 0o022


def keep_to(readable_by: ReadableBy, output_dir: Path) -> None:
    """Sets who may read files that this process and its children make. Raises ConfigError where output_dir belongs to
    another user, and only the owner shall read it."""
    os.umask(_UMASKS[readable_by])
    try:
        owner = output_dir.stat().st_uid
    except OSError:  # not made yet; or it cannot be read, which the first file in it shows
        return
    if readable_by == "owner" and owner not in (0, os.geteuid()):
        raise ConfigError(
            f"output_dir {str(output_dir)!r} belongs to user {owner}, who could read and replace what this user"
            f" ({os.geteuid()}) writes there; choose another one, or allow it with {flag('readable_by')} everyone"
        )


def versions_folder(output_dir: Path) -> Path:
    """Its name is the same for all programs of a run, and no other user can guess it: it is made with a secret in the
    run's credentials, which the first call makes."""
    file = private_folder(Layout(output_dir).credentials) / "folders.secret"
    if not file.exists():
        made = file.with_name(f".{file.name}.{secrets.token_hex(8)}")
        with open(made, "xb", opener=lambda name, flags: os.open(name, flags, 0o600)) as unfinished:
            unfinished.write(secrets.token_bytes(32))
            unfinished.flush()
            os.fsync(unfinished.fileno())
        with suppress(FileExistsError):  # another program was first
            os.link(made, file)
        made.unlink()
    secret = file.read_bytes()
    return SHM / f"meshrl-{hashlib.blake2s(f'{output_dir.resolve()} versions'.encode(), key=secret).hexdigest()[:32]}"


def socket_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """A new folder with mode 0700 for Unix sockets with names of up to SOCKET_NAME_BYTES, where a short path leaves
    room for them; the caller deletes it."""
    choices = dict.fromkeys([Path(tempfile.gettempdir()), Path(environ.get("XDG_RUNTIME_DIR") or "/tmp"), _TMP, SHM])
    for choice in choices:
        if len(os.fsencode(choice / "meshrl-12345678")) + 1 + SOCKET_NAME_BYTES > SOCKET_PATH_BYTES:
            continue
        if os.access(choice, os.W_OK | os.X_OK) and _keeps_names(os.stat(choice)):
            return Path(tempfile.mkdtemp(prefix="meshrl-", dir=choice))
    raise OSError(
        f"no folder for Unix sockets: {', '.join(map(str, choices))} cannot be written, belong to another user or have"
        f" more than {SOCKET_PATH_BYTES - SOCKET_NAME_BYTES - 16} bytes; set TMPDIR to a short path of your own"
    )


@contextmanager
def short_socket_paths() -> Iterator[None]:
    """Puts the sockets of `multiprocessing` and of vLLM into a `socket_folder` of this process, for its whole life: a
    fork server keeps its socket. Ends the process with a sentence where no place is found."""
    try:
        folder = socket_folder()
    except OSError as error:
        raise SystemExit(str(error)) from error
    guardian = FolderGuardian(folder)
    own: Any = current_process()
    own._config["tempdir"] = str(folder)  # where multiprocessing would keep one of its own, for its children as well
    os.environ.setdefault("VLLM_RPC_BASE_PATH", str(folder))
    try:
        yield
    finally:
        guardian.close()


def _keeps_names(folder: os.stat_result) -> bool:
    if folder.st_uid not in (0, os.geteuid()):
        return False
    return not folder.st_mode & _OTHERS_WRITE or bool(folder.st_mode & stat.S_ISVTX)
