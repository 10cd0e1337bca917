"""`--push` against a server that speaks the Hub's API over HTTP: the repository is made, the files arrive whole."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from meshrl.sampling.retry import RunError
from meshrl.trials.config import PushConfig
from meshrl.trials.hub import push


class Hub:
    """Keeps what is committed, or refuses everything."""

    def __init__(self) -> None:
        self.created: list[dict[str, Any]] = []
        self.files: dict[str, bytes] = {}
        self.tokens: set[str] = set()
        self.refuse = False
        self.url = ""

    async def create(self, request: web.Request) -> web.Response:
        if self.refuse:
            return web.json_response({"error": "no such user"}, status=403)
        body = await request.json()
        self.tokens.add(request.headers["Authorization"])
        self.created.append(body)
        owner = body.get("organization") or "me"
        return web.json_response({"url": f"{self.url}/datasets/{owner}/{body['name']}", "name": body["name"]})

    async def validate(self, request: web.Request) -> web.Response:
        return web.json_response({"errors": [], "warnings": []})

    async def preupload(self, request: web.Request) -> web.Response:
        asked = (await request.json())["files"]
        answers = [{"path": file["path"], "uploadMode": "regular", "shouldIgnore": False} for file in asked]
        return web.json_response({"files": answers})

    async def commit(self, request: web.Request) -> web.Response:
        for line in (await request.text()).splitlines():
            entry = json.loads(line)
            if entry["key"] == "file":
                self.files[entry["value"]["path"]] = base64.b64decode(entry["value"]["content"])
        oid = "0" * 40
        where = f"{self.url}/datasets/{request.match_info['repo']}/commit/{oid}"
        return web.json_response({"success": True, "commitOid": oid, "commitUrl": where})


@pytest.fixture
async def hub(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Hub]:
    served = Hub()
    app = web.Application()
    app.router.add_post("/api/repos/create", served.create)
    app.router.add_post("/api/validate-yaml", served.validate)
    app.router.add_post("/api/datasets/{repo:.+}/preupload/main", served.preupload)
    app.router.add_post("/api/datasets/{repo:.+}/commit/main", served.commit)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    served.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    monkeypatch.setenv("HF_ENDPOINT", served.url)
    monkeypatch.setenv("HF_TOKEN", "hf_token")
    yield served
    await runner.cleanup()


async def test_files_and_card_are_committed_to_a_dataset_of_the_hub(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "results.jsonl").write_text('{"reward": 1.0}\n')
    (tmp_path / "curve.png").write_bytes(bytes(range(256)))
    files = [tmp_path / name for name in ("results.jsonl", "curve.png", "never_made.json")]
    config = PushConfig(repo="lab/scores")
    await asyncio.to_thread(push, config, default_name="other", files=files, card="# scores\n")
    (created,) = hub.created
    assert (created["name"], created["organization"], created["type"]) == ("scores", "lab", "dataset")
    assert created.get("private") or created.get("visibility") == "private"  # as the library's release says it
    assert hub.tokens == {"Bearer hf_token"}
    assert hub.files == {
        "results.jsonl": b'{"reward": 1.0}\n', "curve.png": bytes(range(256)), "README.md": b"# scores\n",
    }  # fmt: skip


async def test_a_hub_that_refuses_is_said_in_one_sentence(hub: Hub, tmp_path: Path) -> None:
    hub.refuse = True
    with pytest.raises(RunError, match=r"nothing was pushed to the hub: .*403.*plays nothing twice"):
        await asyncio.to_thread(push, PushConfig(), default_name="m-eval", files=[], card="")
    assert hub.files == {}
