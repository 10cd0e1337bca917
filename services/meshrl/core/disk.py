"""What to do about a disk that takes no more: one sentence, for whatever program writes under output_dir."""

from __future__ import annotations

import errno

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def is_full(error: OSError) -> bool:
    """Whether there was no room for what was to be written."""
    return error.errno in _FULL


def disk_trouble(error: BaseException) -> str | None:
    """The sentence for an error of a full disk or of a file that may not be written; None for any other error."""
    if not isinstance(error, OSError):
        return None
    if is_full(error):
        where = f" to {error.filename}" if error.filename else ""
        return (
            f"cannot write{where}: {error.strerror}; free some space and start again, from the last checkpoint"
            " with --ckpt.resume-step -1"
        )
    if error.errno == errno.EROFS and error.filename:
        return (
            f"cannot write to {error.filename}: {error.strerror}; output_dir must be a folder that this user may write,"
            " choose another one with --output-dir"
        )
    if error.errno in (errno.EACCES, errno.EPERM) and error.filename:  # without a file it may be a port
        return (
            f"cannot open {error.filename}: {error.strerror}; give this user the right to it, or, where it is in"
            " output_dir, choose another one with --output-dir"
        )
    return None
