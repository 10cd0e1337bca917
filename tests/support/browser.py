"""A headless Chromium, driven over its debugging port: opens pages, asks them questions, takes pictures of them."""

from __future__ import annotations

import asyncio
import base64
import itertools
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DEADLINE_S = 90.0


class Tab:
    """One page of the browser. `errors` holds what it logged as an error, and exceptions that nobody caught."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._ids = itertools.count(1)
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self.errors: list[str] = []

    async def listen(self) -> None:
        """Takes answers and events until the browser ends."""
        async for message in self._socket:
            said = message.json()
            if waiting := self._answers.pop(said.get("id", 0), None):
                waiting.set_result(said)
            elif said.get("method") == "Runtime.exceptionThrown":
                self.errors.append(str(said["params"]["exceptionDetails"]))
            elif said.get("method") == "Log.entryAdded" and said["params"]["entry"]["level"] == "error":
                self.errors.append(said["params"]["entry"]["text"])

    async def call(self, method: str, **params: Any) -> Any:
        """The result of a command of the debugging protocol."""
        number = next(self._ids)
        self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": params})
        answer = await asyncio.wait_for(self._answers[number], DEADLINE_S)
        assert "error" not in answer, answer["error"]
        return answer["result"]

    async def ask(self, expression: str) -> Any:
        """The value of an expression in the page."""
        found = await self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    async def until(self, expression: str) -> None:
        """Waits until an expression is true in the page; one that raises, as before the page is there, is not."""
        careful = f"(() => {{ try {{ return Boolean({expression}) }} catch {{ return false }} }})()"
        async with asyncio.timeout(DEADLINE_S):
            while not await self.ask(careful):  # noqa: ASYNC110  # a page in another process
                await asyncio.sleep(0.02)

    async def open(self, address: str) -> None:
        """Goes to an address, another view of the page that is open already among them."""
        await self.call("Page.navigate", url=address)

    async def drag(self, selector: str, start: float, end: float) -> None:
        """Presses the mouse at a share of an element's width, moves it to another and lets go."""
        box = f"document.querySelector('{selector}').getBoundingClientRect()"
        left, middle, width = await self.ask(
            f"(({{ left, top, width, height }}) => [left, top + height / 2, width])({box})"
        )
        for kind, share in (("mousePressed", start), ("mouseMoved", (start + end) / 2), ("mouseMoved", end),
                            ("mouseReleased", end)):  # fmt: skip
            x = left + share * width
            await self.call(
                "Input.dispatchMouseEvent", type=kind, x=x, y=middle, button="left", buttons=1, clickCount=1
            )

    async def picture(self, quality: int, **more: object) -> bytes:
        """What is seen, as WebP; `more` as Page.captureScreenshot takes it."""
        shot = await self.call("Page.captureScreenshot", format="webp", quality=quality, **more)
        return base64.b64decode(shot["data"])


@asynccontextmanager
async def browser_tab(width: int = 1400, height: int = 1000) -> AsyncIterator[Tab]:
    """Starts the browser with one empty page, and ends it with everything that it started."""
    assert CHROMIUM is not None, "no Chromium on PATH"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0", "--no-first-run"]
        flags += [f"--user-data-dir={profile}", f"--window-size={width},{height}", "about:blank"]
        program = await asyncio.create_subprocess_exec(
            CHROMIUM, *flags, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        try:
            async with aiohttp.ClientSession() as session:
                address = await _page_of(Path(profile) / "DevToolsActivePort", session)
                async with session.ws_connect(address, max_msg_size=2**27) as socket:
                    tab = Tab(socket)
                    listening = asyncio.create_task(tab.listen())
                    try:
                        for domain in ("Page", "Runtime", "Log"):
                            await tab.call(f"{domain}.enable")
                        yield tab
                    finally:
                        listening.cancel()
                        await asyncio.wait([listening])
        finally:
            os.killpg(program.pid, signal.SIGKILL)
            await asyncio.wait_for(program.wait(), DEADLINE_S)


async def _page_of(port_file: Path, session: aiohttp.ClientSession) -> str:
    async with asyncio.timeout(DEADLINE_S):
        while not (port := await asyncio.to_thread(_first_line, port_file)):  # noqa: ASYNC110  # as above
            await asyncio.sleep(0.05)
        while True:
            async with session.get(f"http://127.0.0.1:{port}/json") as answer:
                pages = [page for page in await answer.json() if page["type"] == "page"]
            if pages:
                address: str = pages[0]["webSocketDebuggerUrl"]
                return address
            await asyncio.sleep(0.05)


def _first_line(path: Path) -> str:
    """Empty while the file is not there, or its first line not yet whole."""
    try:
        return path.read_text().partition("\n")[0] if "\n" in path.read_text() else ""
    except OSError:
        return ""
