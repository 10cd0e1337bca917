"""Requests to every HTTP route of an engine, made up by a seeded generator: JSON of the wrong shape, or no JSON."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from meshrl.inference.http.admin_routes import ADMIN_PATHS, AdapterBody, BroadcasterBody, WeightsBody
from meshrl.inference.http.schemas import ChatBody, CompletionBody
from meshrl.inference.http.token_route import GenerateBody, TokenSampling

GENERATING = ("/inference/v1/generate", "/v1/chat/completions", "/v1/completions")
READ_ONLY = ("/health", "/ping", "/version", "/metrics", "/v1/models", "/is_sleeping")
UNKNOWN = ("/", "/v1/embeddings", "/v1/chat/completions/", "/%00", "/..%2f..%2fetc/passwd", "/" + "x" * 3000)
# These work without a body, so any POST of them would pause the run or change what it serves. They are asked by GET.
WITHOUT_BODY = frozenset({"/pause", "/resume", "/sleep", "/wake_up", "/reload_weights"})
READ_S = 30.0
RAW_READ_S = 0.5  # what is cut short has no answer

VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2**31, 2**64, -(2**63), 10**400, 0.0, -0.5, 1e308, float("nan"), float("inf"), "", "a",
    "\ud800", "\x00", "é" * 50, "x" * 5000, [], [1], [-1], [10**9], [None], [[]], ["a", 1], {}, {"a": 1},
)  # fmt: skip
SOUND: dict[str, dict[str, Any]] = {
    "/inference/v1/generate": {"token_ids": [3, 4, 5], "sampling_params": {"max_tokens": 2}},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 2},
    "/v1/completions": {"prompt": "abc", "max_tokens": 2},
}
BODIES = {
    "/inference/v1/generate": GenerateBody,
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
    "/update_weights": WeightsBody,
    "/load_lora_adapter": AdapterBody,
    "/init_broadcaster": BroadcasterBody,
}
RAW = (
    b"GET / HTTP/9.9\r\n\r\n",
    b"\x16\x03\x01\x00\xa5\x01\x00\x00\xa1\x03\x03",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nContent-Length: nine\r\n\r\n{}",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"X: " + b"y" * 70_000 + b"\r\n\r\n",
    b"\x00" * 100 + b"\r\n\r\n",
    b"GET http://[::1 HTTP/1.1\r\n\r\n",
)


@dataclass(frozen=True)
class Request:
    """One request, as bytes on a connection of its own."""

    name: str
    data: bytes


@dataclass
class HttpOutcomes:
    """Statuses by the name of the request; 0 where the connection was closed without an answer."""

    statuses: Counter[tuple[str, int]] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def record(self, request: Request, answer: bytes) -> None:
        words = answer.split(b" ", 2)
        status = int(words[1]) if answer.startswith(b"HTTP/1.") and words[1].isdigit() else 0
        self.statuses[request.name, status] += 1
        heads = answer.count(b"HTTP/1.1 ")
        if (status >= 500 and status != 503) or heads > 1 or (status == 0 and request.name != "raw"):
            self.wrong.append(f"{status} with {heads} head(s): {answer[:400]!r} after {request.data[:1500]!r}")


class RequestGenerator:
    """Makes up requests; every route of the engine is asked as often as any other."""

    def __init__(self, source: random.Random, api_key: str = "") -> None:
        self._random = source
        self._key = f"Authorization: Bearer {api_key}\r\n" if api_key else ""
        self._paths = (*GENERATING * 3, *sorted(ADMIN_PATHS), *READ_ONLY, *UNKNOWN[:2])

    def request(self, number: int) -> Request:
        """The request with this number; one in ten is no HTTP, or HTTP that is broken."""
        if number % 10 == 9:
            return Request("raw", self._raw())
        path = self._paths[number % len(self._paths)]
        if path == UNKNOWN[0]:
            path = self._random.choice(UNKNOWN)
        method = self._random.choices(("POST", "GET", "DELETE", "OPTIONS"), weights=(12, 1, 1, 1))[0]
        if path in READ_ONLY and self._random.random() < 0.7:
            method = "GET"
        if path in WITHOUT_BODY and method == "POST":
            method = "GET"
        return Request(f"{method} {path[:40]}", self._framed(method, path, self._body(path)))

    def _framed(self, method: str, path: str, body: bytes) -> bytes:
        kind = self._random.choices(
            (
                "application/json",
                "text/plain",
                "application/x-www-form-urlencoded",
                "multipart/form-data; boundary=b",
                "",
            ),
            weights=(8, 1, 1, 1, 1),
        )[0]
        head = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\nContent-Length: {len(body)}\r\n"
        head += self._key
        if kind:
            head += f"Content-Type: {kind}\r\n"
        if self._random.random() < 0.1:
            head += "Accept: application/x-meshrl-completion\r\n"
        return head.encode() + b"\r\n" + body

    def _body(self, path: str) -> bytes:
        shape = self._random.choices(
            ("changed", "noise", "cut", "value", "deep", "empty"), weights=(14, 2, 2, 2, 1, 1)
        )[0]
        if shape == "noise":
            return self._random.randbytes(self._random.choice((1, 30, 4000)))
        if shape == "empty":
            return b""
        if shape == "deep":
            return b"[" * 5000 + b"]" * self._random.choice((0, 5000))
        if shape == "value":
            return self._dumped(self._random.choice(VALUES))
        body = self._dumped(self._changed(path))
        return body[: self._random.randrange(len(body))] if shape == "cut" else body

    def _changed(self, path: str) -> Any:
        """A sound body with one to three keys set to values of any kind, keys of the sampling parameters included."""
        body = json.loads(json.dumps(SOUND.get(path, {})))
        names = sorted(BODIES[path].model_fields) if path in BODIES else ["x"]
        for _ in range(self._random.randint(0, 3)):
            body[self._random.choice(names)] = self._random.choice(VALUES)
        if isinstance(body.get("sampling_params"), dict) and self._random.random() < 0.7:
            for _ in range(self._random.randint(1, 3)):
                name = self._random.choice(sorted(TokenSampling.model_fields))
                body["sampling_params"][name] = self._random.choice(VALUES)
        if self._random.random() < 0.2:
            body["stream"] = True
        return body

    def _dumped(self, value: Any) -> bytes:
        return json.dumps(value).encode("utf-8", "surrogatepass")

    def _raw(self) -> bytes:
        data = self._random.choice((*RAW, self._random.randbytes(200)))
        if self._random.random() < 0.3:
            data = data[: self._random.randrange(1, len(data))]
        return data


async def send(port: int, request: Request, outcomes: HttpOutcomes) -> None:
    """Sends a request on a connection of its own, reads the whole answer, and counts it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    answer = b""
    try:
        writer.write(request.data)
        await writer.drain()
        async with asyncio.timeout(RAW_READ_S if request.name == "raw" else READ_S):
            answer = await reader.read(-1)
    except ConnectionError:  # closed while it was sent: what was answered counts
        pass
    except TimeoutError:
        if request.name != "raw":
            answer = b"HTTP/1.1 599 no answer"
    finally:
        writer.close()
    outcomes.record(request, answer)
