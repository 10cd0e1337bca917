"""What to do about a disk that takes no more: one sentence, for whatever program writes under output_dir."""

from __future__ import annotations

import errno

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_REFUSED = (errno.EROFS, errno.EACCES, errno.EPERM)


def disk_trouble(error: BaseException) -> str | None:
    """The sentence for an error of a full disk or of a folder that may not be written; None for any other error."""
    if not isinstance(error, OSError) or error.errno not in (*_FULL, *_REFUSED):
        return None
    where = f" to {error.filename}" if error.filename else ""
    if error.errno in _FULL:
        return (
            f"cannot write{where}: {error.strerror}; free some space and start again, from the last checkpoint"
            " with --ckpt.resume-step -1"
        )
    return (
        f"cannot write{where}: {error.strerror}; output_dir must be a folder that this user may write,"
        " choose another one with --output-dir"
    )
