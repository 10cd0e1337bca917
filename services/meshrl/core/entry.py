"""The console scripts: each prepares the process before the imports, which take seconds, and calls a program's main.
Ctrl-C then leaves no traceback."""

from __future__ import annotations

import importlib
import os
import signal
from functools import partial
from pathlib import Path
from types import FrameType


def _call(module: str) -> None:
    signal.signal(signal.SIGINT, _leave)
    os.umask(0o077)  # until the configuration says who may read what is written (`meshrl.core.private_folders`)
    _have_home()
    importlib.import_module(module).main()


def _have_home() -> None:
    """For a user id that passwd does not know. Ends the process where no folder can be made."""
    try:
        Path.home()
    except RuntimeError:
        import tempfile  # these take long to import, and most machines have a home

        from meshrl.client.private import private_folder

        home = Path(tempfile.gettempdir()) / f"meshrl-home-{os.getuid()}"
        try:
            try:
                os.environ["HOME"] = str(private_folder(home))
            except PermissionError:  # another user made it: one of this process and those that it starts
                os.environ["HOME"] = tempfile.mkdtemp(prefix=f"{home.name}-")
        except OSError as error:
            raise SystemExit(
                f"HOME is not set, user {os.getuid()} has no entry in passwd, and {home} cannot be used: {error};"
                " set HOME to a folder that this user can write"
            ) from error


def _leave(signum: int, _frame: FrameType | None) -> None:
    os._exit(128 + signum)


rl = partial(_call, "meshrl.launch.main")
rollout = partial(_call, "meshrl.rollout.main")
trainer = partial(_call, "meshrl.trainer.main")
weights = partial(_call, "meshrl.weights.main")
inference = partial(_call, "meshrl.inference.main")
orchestrator = partial(_call, "meshrl.orchestrator.main")
sft = partial(_call, "meshrl.sft.main")
eval = partial(_call, "meshrl.eval.main")  # noqa: A001  # the console script's name
synthesize = partial(_call, "meshrl.synthesize.main")
