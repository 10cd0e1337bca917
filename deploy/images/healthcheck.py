"""Exit code 0 while the program at MESHRL_HEALTH is well: host:port is asked for gRPC health, a URL for a 200."""

from __future__ import annotations

import os
import sys
import urllib.request

DEADLINE_S = 4.0


def main() -> int:
    """Asks once; anything but a good answer in time is an exit code of 1."""
    target = os.environ.get("MESHRL_HEALTH", "")
    if not target:
        return 0  # nothing was asked for
    try:
        if target.startswith("http"):
            with urllib.request.urlopen(target, timeout=DEADLINE_S) as answer:
                return 0 if answer.status == 200 else 1
        import grpc  # the gRPC half alone needs it
        from grpc_health.v1 import health_pb2, health_pb2_grpc

        with grpc.insecure_channel(target, options=[("grpc.enable_http_proxy", 0)]) as channel:
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=DEADLINE_S)
        return 0 if answer.status == health_pb2.HealthCheckResponse.SERVING else 1
    except Exception as error:  # noqa: BLE001  # whatever it is, the program is not well
        sys.stderr.write(f"{target}: {error}\n")
        return 1


if __name__ == "__main__":
    sys.exit(main())
