"""`--push` against a server that speaks the Hub's API over HTTP: the repository is made, the files arrive whole."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from hub_server import HubServer, serving_hub
from meshrl.sampling.retry import RunError
from meshrl.trials.config import PushConfig
from meshrl.trials.hub import push


@pytest.fixture
async def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[HubServer]:
    async with serving_hub(tmp_path / "hub") as served:
        monkeypatch.setenv("HF_ENDPOINT", served.url)
        monkeypatch.setenv("HF_TOKEN", served.token)
        yield served


async def test_files_and_card_are_committed_to_a_dataset_of_the_hub(hub: HubServer, tmp_path: Path) -> None:
    (tmp_path / "results.jsonl").write_text('{"reward": 1.0}\n')
    (tmp_path / "curve.png").write_bytes(bytes(range(256)))
    files = [tmp_path / name for name in ("results.jsonl", "curve.png", "never_made.json")]
    config = PushConfig(repo="lab/scores")
    await asyncio.to_thread(push, config, default_name="other", files=files, card="# scores\n")
    (created,) = hub.created
    assert (created["name"], created["organization"], created["type"]) == ("scores", "lab", "dataset")
    assert created.get("private") or created.get("visibility") == "private"  # as the library's release says it
    stored = {name: path.read_bytes() for name, path in hub.files("datasets", "lab/scores").items()}
    assert stored == {
        "results.jsonl": b'{"reward": 1.0}\n', "curve.png": bytes(range(256)), "README.md": b"# scores\n",
    }  # fmt: skip


async def test_a_hub_that_is_not_there_or_never_answers_is_given_up(
    monkeypatch: pytest.MonkeyPatch, unused_tcp_port: int
) -> None:
    async def keep_waiting(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()  # until the client goes
        writer.close()

    monkeypatch.setenv("HF_TOKEN", "hf_token")
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{unused_tcp_port}")
    config = PushConfig(repo="lab/scores", timeout_s=0.5)
    with pytest.raises(RunError, match=r"nothing was pushed to the hub: .*refused"):
        await asyncio.to_thread(push, config, default_name="other", files=[], card="")
    async with await asyncio.start_server(keep_waiting, "127.0.0.1", unused_tcp_port), asyncio.timeout(60.0):
        with pytest.raises(RunError, match=r"nothing was pushed to the hub: .*timed out"):
            await asyncio.to_thread(push, config, default_name="other", files=[], card="")


async def test_a_hub_that_refuses_is_said_in_one_sentence(hub: HubServer) -> None:
    hub.refuse = True
    with pytest.raises(RunError, match=r"nothing was pushed to the hub: .*403.*plays nothing twice"):
        await asyncio.to_thread(push, PushConfig(), default_name="m-eval", files=[], card="")
    assert not hub.root.exists()
