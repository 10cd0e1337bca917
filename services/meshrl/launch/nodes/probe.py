"""Run once on each node of a job: prints a line of JSON for `rl`. It imports little: a first import
from a cold network disk is slow.

python -m meshrl.launch.nodes.probe TOKEN_FILE NUM_PORTS
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import ExitStack
from pathlib import Path

from meshrl.machine.ports import bound, port_of


def main() -> None:
    token_file, num_ports = Path(sys.argv[1]), int(sys.argv[2])
    with ExitStack() as held:  # all at once, so that they differ
        ports = [port_of(held.enter_context(bound(""))) for _ in range(num_ports)]
    token = token_file.read_text() if token_file.is_file() else None
    said = {"node": os.environ["SLURMD_NODENAME"], "ports": ports, "token": token}
    sys.stdout.write(json.dumps(said) + "\n")


if __name__ == "__main__":
    main()
