"""The `inference` program with vLLM whose workers sleep while they wait for each other.

vLLM has them spin for a second after every call, which costs two cores all the rest.
"""

from __future__ import annotations

from meshrl.inference.main import main

AWAKE_S = 0.002


def sleep_soon() -> None:
    """In this process, which vLLM's own are forked from."""
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

    SpinCondition.__init__.__defaults__ = (AWAKE_S,)


if __name__ == "__main__":
    sleep_soon()
    main()
