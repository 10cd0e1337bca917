"""Plays every kind of environment against the embedded engine: are rewards in range, does any rollout fail, how fast?

`python tests/benchmarks/bench_environments.py [--groups N] [--group-size N] [--v0 PYTHON]` makes the example's model,
starts `inference`, `rollout` and, with the interpreter of a virtual environment that has clients/verifiers_v0, the
host of an environment of the older verifiers API beside it; then it plays groups and prints a table.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import uuid
from contextlib import AsyncExitStack
from pathlib import Path

from meshrl.client import RolloutClient
from meshrl.wire.errors import MeshError
from meshrl.wire.trainable import rollout_problems
from meshrl.wire.types import Rollout, RolloutFailure, RolloutRequest, Sampling

HERE = Path(__file__).parent
START_DEADLINE_S = 300.0
GYM = (
    "leg_counting", "chain_sum", "basic_arithmetic", "spell_backward", "letter_counting", "number_sorting", "gcd",
    "lcm", "prime_factorization", "base_conversion", "caesar_cipher", "count_bits", "fraction_simplification",
    "simple_equations", "number_sequence", "word_sorting", "time_intervals", "family_relationships", "syllogism",
    "mini_sudoku",
)  # fmt: skip
NEW = {
    **{f"reasoning_gym:{name}": "" for name in GYM},
    "user-sim+bench_quiz": "{ user = { max_turns = 3 } }",
    "best-of-n+bench_quiz": "{ n = 3 }",
    "bench_duel": "",
    "bench_quiz": "",
}
OLD = {"copy": "single-turn", "turns": "multi-turn", "compared": "rewards of a group"}


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--groups", type=int, default=4, help="groups of each environment (default: 4)")
    parser.add_argument("--group-size", type=int, default=4, help="rollouts of a group (default: 4)")
    parser.add_argument("--v0", type=Path, help="python of the virtual environment of clients/verifiers_v0")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, Programs(Path(folder)) as programs:
        await play(programs, given)


class Programs:
    """The processes of the benchmark; all end with it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = folder / "model"
        self.engine = f"http://127.0.0.1:{free_port()}"
        self._started: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Programs:
        maker = [sys.executable, "-m", "meshrl.environments.reverse_text.model", str(self.model)]
        subprocess.run(maker, check=True, timeout=START_DEADLINE_S)
        config = json.loads((self.model / "config.json").read_text())  # reasoning-gym's questions are long, in bytes
        (self.model / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 4096}))
        port = self.engine.rpartition(":")[2]
        flags = ["--model.name", str(self.model), "--server.port", port, "--output-dir", str(self.folder / "out")]
        self._start([sys.executable, "-m", "meshrl.inference.main", *flags])
        return self

    def __exit__(self, *exc: object) -> None:
        for process in self._started:
            process.terminate()
        for process in self._started:
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()

    def rollout(self) -> str:
        """Starts the rollout program with all new environments; its address."""
        port, config = free_port(), self.folder / "rollout.toml"
        entries = "".join(
            f'[[env]]\nid = "{name}"\n' + (f"args = {args}\n" if args else "") for name, args in NEW.items()
        )
        config.write_text(
            f'seq_len = 4096\noutput_dir = "{self.folder}/out"\n[model]\nname = "{self.model}"\n'
            f'[server]\nport = {port}\n[client]\nbase_url = ["{self.engine}"]\n[sampling]\nmax_tokens = 16\n{entries}'
        )
        self._start([sys.executable, "-m", "meshrl.rollout.main", "@", str(config)])
        return f"127.0.0.1:{port}"

    def old(self, python: Path) -> str:
        """Starts the host of old environments; its address."""
        port, config = free_port(), self.folder / "old.toml"
        entries = "".join(
            f'[[env]]\nid = "bench_old_words"\nname = "{kind}"\nargs = {{ kind = "{kind}" }}\n'
            "sampling = { max_tokens = 16 }\n" for kind in OLD
        )  # fmt: skip
        config.write_text(
            f'model = "{self.model}"\nengines = ["{self.engine}"]\nport = {port}\nseq_len = 4096\n{entries}'
        )
        self._start([str(python), "-m", "meshrl_verifiers_v0.main", str(config)])
        return f"127.0.0.1:{port}"

    def _start(self, command: list[str]) -> None:
        path = f"{HERE / 'tasksets'}:{HERE / 'tasksets' / 'old'}"
        with (self.folder / f"{len(self._started)}.log").open("wb") as log:
            environ = {**os.environ, "PYTHONPATH": path}
            self._started.append(subprocess.Popen(command, env=environ, stdout=log, stderr=log))

    async def until_up(self) -> None:
        """Waits for the engine; the services wait for it themselves."""
        async with asyncio.timeout(START_DEADLINE_S):
            while True:
                try:
                    await asyncio.to_thread(urllib.request.urlopen, f"{self.engine}/health", timeout=5)
                    return
                except (OSError, urllib.error.URLError):
                    await asyncio.sleep(0.5)


async def play(programs: Programs, given: argparse.Namespace) -> None:
    places = [(programs.rollout(), list(NEW))]
    if given.v0 is not None:
        places.append((programs.old(given.v0), list(OLD)))
    await programs.until_up()
    print("| environment | rollouts | failed | cannot be trained | reward, least to most | tokens | rollouts/s |")
    print("|---|---|---|---|---|---|---|")
    async with AsyncExitStack() as stack:
        clients = [(await stack.enter_async_context(RolloutClient(address)), names) for address, names in places]
        for client, _ in clients:
            await listed(client)
        for client, names in clients:
            for name in names:
                print(await row(client, name, given.groups, given.group_size), flush=True)
        if given.v0 is not None:  # both services at once, as one run would have them
            (new, _), (old, _) = clients
            pair = (
                row(new, "bench_quiz", given.groups, given.group_size),
                row(old, "copy", given.groups, given.group_size),
            )
            for text in await asyncio.gather(*pair):
                print(text.replace("| ", "| at once: ", 1))


async def listed(client: RolloutClient) -> None:
    async with asyncio.timeout(START_DEADLINE_S):
        while True:
            try:
                await client.list_environments()
                return
            except MeshError:  # it is still loading its environments
                await asyncio.sleep(0.5)


async def row(client: RolloutClient, name: str, groups: int, size: int) -> str:
    """Plays groups of an environment at once; a line of the table."""
    began = time.monotonic()
    played = await asyncio.gather(*(group(client, name, index, size) for index in range(groups)))
    took = time.monotonic() - began
    rollouts = [event for events in played for event in events if isinstance(event, Rollout)]
    failures = [event for events in played for event in events if isinstance(event, RolloutFailure)]
    for failure in failures[:2]:
        print(f"{name}: {failure.reason}: {failure.message}", file=sys.stderr)
    rewards = [rollout.reward for rollout in rollouts if math.isfinite(rollout.reward)]
    bad = sum(bool(rollout_problems(rollout, vocab_size=None)) or not rollout.samples for rollout in rollouts)
    tokens = sum(int(sample.loss_mask.sum()) for rollout in rollouts for sample in rollout.samples)
    span = f"{min(rewards):.2f} to {max(rewards):.2f}" if rewards else "none"
    return f"| {name} | {len(rollouts)} | {len(failures)} | {bad} | {span} | {tokens} | {len(rollouts) / took:.1f} |"


async def group(client: RolloutClient, name: str, index: int, size: int) -> list[object]:
    request = RolloutRequest(
        request_id=str(uuid.uuid4()), group_id=str(uuid.uuid4()), environment=name, task_index=index % 2,
        group_size=size, deadline_s=300.0, sampling=Sampling(temperature=1.0, max_tokens=16),
    )  # fmt: skip
    return [event async for event in client.run_rollouts(request)]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


if __name__ == "__main__":
    asyncio.run(main())
