"""Names a flag in advice to a person: of a program that rl has started, it is a flag of rl."""

from __future__ import annotations

import os
from collections.abc import Mapping

SECTION = "MESHRL_SECTION"
"""The variable by which rl tells a program the section of its keys; unset for one that is started alone."""


def flag(key: str, *, off: bool = False, environ: Mapping[str, str] | None = None) -> str:
    """The flag for one of a program's own keys, such as `server.insecure`; `off` is the one that turns it off."""
    section = (os.environ if environ is None else environ).get(SECTION, "")
    name = ".".join(filter(None, (section, key))).replace("_", "-")
    return f"--{'no-' if off else ''}{name}"
