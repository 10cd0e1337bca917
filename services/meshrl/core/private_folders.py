"""Folders and files outside output_dir that only the user of a run may read: versions in memory, sockets.

/dev/shm and /tmp belong to everybody. A folder there has a name that others cannot guess, mode 0700 and the owner of
this process; one that somebody else made, or a link, is refused. All calls block and raise OSError.
"""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
import stat
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing import current_process
from pathlib import Path
from typing import Any

from meshrl.core.orphans import FolderGuardian
from meshrl.core.paths import Layout

SHM = Path("/dev/shm")
"""A file system in memory."""

SOCKET_PATH_BYTES = 107
"""The longest path of a Unix socket."""

SOCKET_NAME_BYTES = 48
"""Room for the name of a socket, with a folder of a library's own around it (multiprocessing: 32, vLLM: 37)."""

_TMP = Path("/tmp")
_OTHERS = 0o077
_OTHERS_WRITE = 0o022


def private_folder(path: Path) -> Path:
    """Makes a folder with mode 0700, where it is not there; its parents as usual. Returns `path`.

    Raises PermissionError where `path` is a link or no folder, belongs to another user, or others may write to it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENOTDIR):
            raise
        raise _refusal(path, "is a link or no folder") from error
    try:
        found = os.fstat(descriptor)
        if found.st_uid != os.geteuid():
            raise _refusal(path, f"belongs to user {found.st_uid}, and this process runs as user {os.geteuid()}")
        if found.st_mode & _OTHERS_WRITE:
            raise _refusal(path, f"has mode {stat.S_IMODE(found.st_mode):04o}, so that others may write to it")
        if found.st_mode & _OTHERS:
            os.fchmod(descriptor, 0o700)
    finally:
        os.close(descriptor)
    return path


def private_name(output_dir: Path, purpose: str) -> str:
    """A folder name that all programs of a run compute alike, and that no other user can guess.

    It depends on a secret in output_dir/credentials, which the first call makes.
    """
    secret = _secret(private_folder(Layout(output_dir).credentials) / "folders.secret")
    return f"meshrl-{hashlib.blake2s(f'{output_dir.resolve()} {purpose}'.encode(), key=secret).hexdigest()[:32]}"


def socket_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """A new folder with mode 0700 for Unix sockets with names of up to SOCKET_NAME_BYTES; the caller deletes it.

    It is in the temporary folder, or, where the path of that is too long, in XDG_RUNTIME_DIR, /tmp or /dev/shm.
    """
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
    """The sockets of `multiprocessing` and of vLLM are in a `socket_folder` of this process, however long TMPDIR is.

    For the whole life of a program: a fork server keeps its socket. The folder goes with the process, also where that
    is killed. Ends the process with a sentence where there is no place for one.
    """
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
    """Whether no other user but root can rename what this user puts into a folder."""
    if folder.st_uid not in (0, os.geteuid()):
        return False
    return not folder.st_mode & _OTHERS_WRITE or bool(folder.st_mode & stat.S_ISVTX)


def _secret(file: Path) -> bytes:
    """The content of a file of 32 bytes, which is made once, whoever comes first."""
    if not file.exists():
        made = file.with_name(f".{file.name}.{secrets.token_hex(8)}")
        with open(made, "xb", opener=lambda name, flags: os.open(name, flags, 0o600)) as unfinished:
            unfinished.write(secrets.token_bytes(32))
            unfinished.flush()
            os.fsync(unfinished.fileno())
        with suppress(FileExistsError):  # another program was first
            os.link(made, file)
        made.unlink()
    return file.read_bytes()


def _refusal(path: Path, why: str) -> PermissionError:
    return PermissionError(errno.EACCES, f"it {why}", str(path))
