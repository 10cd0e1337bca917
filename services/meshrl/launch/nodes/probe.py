"""Run once on each node of a job, with the standard library alone: prints what `rl` must know about it, as a line of
JSON.

python -m meshrl.launch.nodes.probe TOKEN_FILE NUM_PORTS
"""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path


def main() -> None:
    token_file, num_ports = Path(sys.argv[1]), int(sys.argv[2])
    probes = [socket.socket() for _ in range(num_ports)]
    for probe in probes:  # all at once, so that they differ
        probe.bind(("", 0))
    ports = [int(probe.getsockname()[1]) for probe in probes]
    for probe in probes:
        probe.close()
    token = token_file.read_text() if token_file.is_file() else None
    said = {"node": os.environ["SLURMD_NODENAME"], "ports": ports, "token": token}
    sys.stdout.write(json.dumps(said) + "\n")


if __name__ == "__main__":
    main()
