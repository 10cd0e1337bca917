"""Keeps an engine busy while something else is measured, from a process of its own; and whether an engine answers.

python tests/benchmarks/engine_load.py PORT COUNT       # COUNT requests in flight until it is ended
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import urllib.request
from contextlib import suppress

import aiohttp


def is_healthy(url: str) -> bool:
    with suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5.0):
        return True
    return False


class Load:
    """So many requests in flight at the engine on a port, while it is entered."""

    def __init__(self, port: int, count: int) -> None:
        self._command = [sys.executable, __file__, str(port), str(count)]
        self._count = count
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> None:
        if self._count:
            self._process = subprocess.Popen(self._command, stderr=subprocess.DEVNULL)

    def __exit__(self, *exception: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()


async def keep_busy(port: int, count: int) -> None:
    """Requests without end: each that is answered is followed by another."""
    connector = aiohttp.TCPConnector(limit=0)  # else aiohttp keeps all but 100 back
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120), connector=connector) as http:

        async def forever(index: int) -> None:
            body = {
                "token_ids": [7 + index] * 64,
                "sampling_params": {"max_tokens": 400, "ignore_eos": True, "logprobs": 1},
            }
            while True:
                try:
                    async with http.post(f"http://127.0.0.1:{port}/inference/v1/generate", json=body) as answer:
                        await answer.read()
                        if answer.status != 200:  # no version yet
                            await asyncio.sleep(0.2)
                except aiohttp.ClientError:
                    await asyncio.sleep(0.2)

        await asyncio.gather(*[forever(index) for index in range(count)])


if __name__ == "__main__":
    asyncio.run(keep_busy(int(sys.argv[1]), int(sys.argv[2])))
