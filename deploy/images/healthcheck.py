"""Exit code 0 while the program at MESHRL_HEALTH is well: host:port is asked for gRPC health, a URL for a 200.

healthcheck.py [SERVICE] asks for one gRPC service of the program. With MESHRL_TLS_CA, _CERT and _KEY, or
MESHRL_TLS_FOLDER, it shows the program's own certificate and takes no other one for an answer.
"""

from __future__ import annotations

import os
import ssl
import sys
import urllib.request
from pathlib import Path

DEADLINE_S = 4.0


def credential(name: str) -> Path | None:
    """The file with `ca`, `cert` or `key`; None where there is none."""
    folder = os.environ.get("MESHRL_TLS_FOLDER")
    named = os.environ.get(f"MESHRL_TLS_{name.upper()}") or (f"{folder}/{name}.pem" if folder else None)
    return Path(named) if named and Path(named).exists() else None


def get(url: str) -> bool:
    """Whether a URL of this container answers with 200."""
    ca, context = credential("ca"), None
    if ca is not None:
        context = ssl.create_default_context(cafile=str(ca))
        context.check_hostname = False  # it is called on loopback, which certificates need not name
    with urllib.request.urlopen(url, timeout=DEADLINE_S, context=context) as answer:
        return bool(answer.status == 200)


def ask(target: str, service: str) -> bool:
    """Whether a gRPC server says that it, or one of its services, serves."""
    import grpc  # the gRPC half alone needs it
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    ca, cert, key = (credential(name) for name in ("ca", "cert", "key"))
    options = [("grpc.enable_http_proxy", 0)]
    if ca is None or cert is None or key is None:
        channel = grpc.insecure_channel(target, options=options)
    else:
        from cryptography import x509

        names = x509.load_pem_x509_certificate(cert.read_bytes()).extensions
        own = names.get_extension_for_class(x509.SubjectAlternativeName).value.get_values_for_type(x509.DNSName)[0]
        made = grpc.ssl_channel_credentials(ca.read_bytes(), key.read_bytes(), cert.read_bytes())
        channel = grpc.secure_channel(target, made, options=[*options, ("grpc.ssl_target_name_override", own)])
    with channel:
        request = health_pb2.HealthCheckRequest(service=service)
        answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=DEADLINE_S)
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def main() -> int:
    """Asks once; anything but a good answer in time is an exit code of 1."""
    target = os.environ.get("MESHRL_HEALTH", "")
    if not target:
        return 0  # nothing was asked for
    try:
        well = get(target) if target.startswith("http") else ask(target, "".join(sys.argv[1:2]))
    except Exception as error:  # noqa: BLE001  # whatever it is, the program is not well
        details = getattr(error, "details", None)  # gRPC's own errors have many lines
        sys.stderr.write(f"{target}: {details() if callable(details) else error}\n")
        return 1
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
