"""A process killed while it saves, at each moment that the disk could notice: what was durable is there to resume."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import checkpoint_kit as kit
from meshrl.training.checkpoints.checkpointer import Checkpointer

pytestmark = pytest.mark.timeout(400)  # processes of their own that import torch, on a machine that may be busy


KILLED_PROGRAM = """
    import os, shutil, signal, sys
    from pathlib import Path
    import torch
    import checkpoint_kit as kit
    from meshrl.training.checkpoints.checkpointer import Checkpointer

    torch.set_num_threads(1)
    model, root, live, begun = sys.argv[1], *(Path(sys.argv[2], name) for name in (".", "live", "begun"))
    trained = kit.build(model)
    kit.train(trained, 2)
    checkpointer = Checkpointer(*trained, live, tokenizer=None)
    checkpointer.save()
    shutil.copytree(live, begun)
    kit.train(trained, 4)
    real_fsync, real_rename = os.fsync, Path.rename

    def calls_until_death(number):  # every durable step of a save is a moment to die in, before and after it happens
        left = [number]
        def count():
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
        def fsync(descriptor):
            count(); real_fsync(descriptor); count()
        def rename(self, target):
            count(); moved = real_rename(self, target); count(); return moved
        os.fsync, Path.rename = fsync, rename

    def deaths(in_background):
        number = 0
        while True:
            number += 1
            child = os.fork()
            if child == 0:
                calls_until_death(number)
                checkpointer.save(in_background=in_background)
                checkpointer.wait_for_save()
                os._exit(7)
            status = os.waitpid(child, 0)[1]
            live.rename(root / f"{in_background}-{number}")
            shutil.copytree(begun, live)
            if os.WIFEXITED(status) and os.WEXITSTATUS(status) == 7:
                return number - 1
            assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, status

    print(deaths(False), deaths(True))
"""


def test_a_save_killed_at_any_moment_leaves_a_checkpoint_to_resume(tmp_path: Path) -> None:
    model = kit.save_model(tmp_path / "model")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(kit.__file__).parent)}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(KILLED_PROGRAM), model, str(tmp_path)],
        env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    trained = kit.build(model)
    kit.train(trained, 2)
    wanted = {2: kit.state(trained)}
    kit.train(trained, 4)
    wanted[4] = kit.state(trained)
    for in_background, deaths in zip((False, True), map(int, done.stdout.split()), strict=True):
        assert deaths > 20
        newest = []
        for number in range(1, deaths + 2):
            folder = tmp_path / f"{in_background}-{number}"
            trained = kit.build(model)
            newest.append(Checkpointer(*trained, folder, tokenizer=None).restore(-1))
            kit.assert_same(kit.state(trained), wanted[newest[-1]])
            assert [path.name for path in folder.rglob("*.*") if path.is_dir()] == []  # nothing is left over
        assert newest == sorted(newest), "once it is there it stays"
        assert (newest[0], newest[-1]) == (2, 4)
