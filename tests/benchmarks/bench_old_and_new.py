"""One run over an old environment (verifiers 0.1, `load_environment`) and a new one: what each gave to training.

    uv venv .venv-v0 && uv pip install -p .venv-v0 clients/python clients/verifiers_v0
    python tests/benchmarks/bench_old_and_new.py --v0 .venv-v0/bin/python --steps 4

`rl` starts its own rollout program for the new one (`local`), and lists the host of the old ones beside it. Both sample
from one embedded engine, of a model of random weights.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

TESTS = Path(__file__).parent.parent
sys.path[:0] = [str(TESTS / "support")]
OLD = ("copy", "turns", "compared")
DEADLINE_S = 900.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--v0", type=Path, required=True, help="python of the environment of clients/verifiers_v0")
    parser.add_argument("--steps", type=int, default=4, help="steps of the run (default: 4)")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        played(Path(folder), given.v0, given.steps)


def played(folder: Path, v0: Path, steps: int) -> None:
    from local_ports import free_port
    from mesh_run import RUN_TOML
    from meshrl.environments.reverse_text.model import create_model

    hub, host = free_port(), free_port()
    create_model(folder / "model", seed=0)
    (folder / "run.toml").write_text(RUN_TOML)
    entries = "".join(
        f'[[env]]\nid = "bench_old_words"\nname = "{name}"\nargs = {{ kind = "{name}" }}\n' for name in OLD
    )
    (folder / "old.toml").write_text(
        f'model = "{folder / "model"}"\nweights = "127.0.0.1:{hub}"\nport = {host}\nseq_len = 128\n{entries}'
    )
    command = [
        sys.executable, "-m", "meshrl.launch.main", "@", str(folder / "run.toml"),
        "--model.name", str(folder / "model"), "--output-dir", str(folder / "out"), "--max-steps", str(steps),
        "--weights.server.port", str(hub), "--orchestrator.services.rollout", f"local,127.0.0.1:{host}",
    ]  # fmt: skip
    for number, name in enumerate(OLD, 1):
        key = f"orchestrator.train.env.{number}"
        command += [f"--{key}.id", "bench_old_words", f"--{key}.name", name, f"--no-{key}.local"]
    environ = {**os.environ, "PYTHONPATH": str(TESTS / "benchmarks" / "tasksets" / "old"), "COLUMNS": "160"}
    with (folder / "old.log").open("wb") as log:
        old = subprocess.Popen(
            [str(v0), "-m", "meshrl_verifiers_v0.main", str(folder / "old.toml")], env=environ, stdout=log, stderr=log
        )
        try:
            ran = subprocess.run(
                command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=DEADLINE_S, check=False
            )
        finally:
            old.terminate()
            old.wait(90)
    if ran.returncode:
        sys.exit(f"{ran.stdout.decode()[-4000:]}\n{(folder / 'old.log').read_text()[-2000:]}")
    report(folder / "out")


def report(output_dir: Path) -> None:
    """A line for each environment, and what the ledger says."""
    import json

    from meshrl.orchestrator.ledger.audit import audit

    records = [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if "mixture/reverse_text/rollouts" in record]
    print(f"steps trained: {[record['step'] for record in steps]}")
    print("| environment | verifiers | share of the rollouts, each step | mean reward, each step |")
    print("|---|---|---|---|")
    for name in ("reverse_text", *OLD):
        shares = ", ".join(f"{record.get(f'mixture/{name}/rollouts', 0.0):.2f}" for record in steps)
        rewards = ", ".join(
            f"{record[f'reward/{name}/mean']:.2f}" if f"reward/{name}/mean" in record else "-" for record in steps
        )
        print(f"| {name} | {'0.1.14' if name in OLD else '0.4'} | {shares} | {rewards} |")
    print(audit(output_dir).table())


if __name__ == "__main__":
    main()
