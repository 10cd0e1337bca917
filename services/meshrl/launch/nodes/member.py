"""Run once on each node with engines: makes the node's key and keeps the certificate for it.
python -m meshrl.launch.nodes.member FOLDER request prints {"node", "request"}, a certificate request; with `keep` it
reads {"certificates": {NODE: PEM}, "renewal": HOST:PORT} from stdin.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from meshrl.client.authority import request_for, save_certificate
from meshrl.client.credentials import TRUST_FILE
from meshrl.client.enrollment import RENEWAL_FILE
from meshrl.client.private import write_private
from meshrl.client.trust import TrustFile


def member_folder(credentials: Path, node: str) -> Path:
    return credentials / f"node-{node}"


def main() -> None:
    node = os.environ["SLURMD_NODENAME"]
    own = member_folder(Path(sys.argv[1]), node)
    os.umask(0o077)
    if sys.argv[2] == "request":
        sys.stdout.write(json.dumps({"node": node, "request": request_for(own, node).decode()}) + "\n")
        return
    told = json.load(sys.stdin)
    save_certificate(own, told["certificates"][node].encode())
    write_private(own / RENEWAL_FILE, told["renewal"].encode() + b"\n")
    TrustFile(own / TRUST_FILE).create()


if __name__ == "__main__":
    main()
