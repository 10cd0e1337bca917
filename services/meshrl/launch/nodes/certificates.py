"""Certificates for the engines of a job, by the run's authority on the first node.

A node's key stays there; only a certificate request and a certificate go over srun. The hub renews certificates.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from meshrl.client.authority import Authority
from meshrl.client.credentials import PREFIX
from meshrl.client.trust import Role
from meshrl.core.config import ConfigError
from meshrl.core.paths import Layout
from meshrl.launch.nodes.job import NodeLostError, on_each
from meshrl.launch.nodes.member import member_folder
from meshrl.launch.nodes.spread import Spread

_MODULE = "meshrl.launch.nodes.member"


def certify_engines(spread: Spread, layout: Layout, hub: str) -> list[Mapping[str, str]]:
    """Returns the variables of each of `spread.engines`. hub: host:port. Raises ConfigError and NodeLostError."""
    folder = layout.credentials.absolute()
    nodes = {node.name: node for node in spread.engines}
    answer = on_each(list(nodes), _MODULE, str(folder), "request")
    requests = {line["node"]: line["request"] for line in map(json.loads, answer.splitlines())}
    missing = sorted(nodes.keys() - requests.keys())
    if missing:
        raise NodeLostError(f"nodes {', '.join(missing)} of the job did not ask for a certificate")
    try:
        authority = Authority(folder)
        signed = {}
        for name, node in nodes.items():
            hosts = [node.address, name, "localhost", "127.0.0.1"]
            certificate = authority.certify(requests[name].encode(), Role.AGENT, name, "this job", hosts=hosts)
            signed[name] = certificate.decode()
    except ValueError as error:  # an AuthorityError, or a name that is none
        raise ConfigError(f"output_dir: the authority in {str(folder)!r} cannot be used: {error}") from error
    on_each(list(nodes), _MODULE, str(folder), "keep", stdin=json.dumps({"certificates": signed, "renewal": hub}))
    return [{f"{PREFIX}FOLDER": str(member_folder(folder, node.name))} for node in spread.engines]
