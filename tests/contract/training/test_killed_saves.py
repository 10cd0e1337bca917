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


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return kit.save_model(tmp_path_factory.mktemp("model"))


KILLED_PROGRAM = """
    import os, signal, sys
    from pathlib import Path
    import torch
    import checkpoint_kit as kit
    from meshrl.training.checkpoints import files as checkpoint_files
    from meshrl.training.checkpoints.checkpointer import Checkpointer

    torch.set_num_threads(1)
    model, root, in_background = sys.argv[1], Path(sys.argv[2]), sys.argv[3] == "True"
    trained = kit.build(model)
    kit.train(trained, 2)
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

    number, deaths = 0, 0
    while True:
        number += 1
        folder = root / str(number)
        child = os.fork()
        if child == 0:
            checkpointer = Checkpointer(*trained, folder, tokenizer=None)
            checkpointer.save()
            kit.train(trained, 4)
            calls_until_death(number)
            if in_background:
                checkpointer.save_async()
                checkpointer.wait_for_save()
            else:
                checkpointer.save()
            os._exit(7)
        status = os.waitpid(child, 0)[1]
        if os.WIFEXITED(status) and os.WEXITSTATUS(status) == 7:
            break
        assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, status
        deaths += 1
    print(deaths)
"""


@pytest.mark.parametrize("in_background", [False, True])
def test_a_save_killed_at_any_moment_leaves_a_checkpoint_to_resume(
    model: str, tmp_path: Path, in_background: bool
) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(kit.__file__).parent)}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(KILLED_PROGRAM), model, str(tmp_path), str(in_background)],
        env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    deaths = int(done.stdout)
    assert deaths > 20
    trained = kit.build(model)
    kit.train(trained, 2)
    wanted = {2: kit.state(trained)}
    kit.train(trained, 4)
    wanted[4] = kit.state(trained)
    newest = []
    for number in range(1, deaths + 2):
        trained = kit.build(model)
        newest.append(Checkpointer(*trained, tmp_path / str(number), tokenizer=None).restore(-1))
        kit.assert_same(kit.state(trained), wanted[newest[-1]])
        leftovers = [path.name for path in (tmp_path / str(number)).rglob("*.*") if path.is_dir()]
        assert leftovers == []
    assert newest == sorted(newest), "once it is there it stays"
    assert (newest[0], newest[-1]) == (2, 4)
