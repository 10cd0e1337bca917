"""The page of `meshrl ui` in a real browser: every view draws, what policies wrote stays text, and it follows a run."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import zstandard
from aiohttp import web
from aiohttp.test_utils import TestServer

from browser import CHROMIUM, Tab, browser_tab
from made_run import add_step, make_run, rollout
from meshrl.cli.run_folder import RunFolder
from meshrl.cli.ui.server import Page

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="a real browser: needs Chromium on PATH"),
    pytest.mark.timeout(400),
]
TEXT = "document.querySelector('#view').innerText"


@pytest.fixture
def run_path(tmp_path: Path) -> Path:
    return make_run(tmp_path / "run", steps=10)


@pytest.fixture
async def page(run_path: Path) -> AsyncIterator[tuple[Tab, str]]:
    app: web.Application = Page([RunFolder(run_path)]).application(hosts=None, token=None)
    server = TestServer(app)
    await server.start_server()
    async with browser_tab() as tab:
        yield tab, str(server.make_url("/"))
        assert tab.errors == []
    await server.close()


async def test_every_view_draws_what_the_folder_holds(page: tuple[Tab, str]) -> None:
    tab, address = page
    for view, ready in {
        "now": f"document.querySelectorAll('.u-wrap').length == 2 && {TEXT}.includes('step 10')",
        "rollouts": f"{TEXT}.includes('made: reward 0 (right 0), advantage -0.5')",
        "rollouts?step=4&id=best-4": f"{TEXT}.includes('good 4')",
        "rollouts?id=best-10&look=logprobs": "document.querySelectorAll('.block i.t2').length == 2",
        "rollouts?id=best-10&look=gap": "document.querySelector('.block i.n2').title =="
        " 'gap -0.20000: trainer -0.7, engine -0.5, token 4' && document.querySelectorAll('.block i.t0').length == 2"
        " && document.querySelector('.block i.p1') && document.querySelectorAll('p.tokens i').length == 9",
        "rollouts?id=best-10&look=versions": "document.querySelector('.block i.v0').title == 'version 9, token 3'",
        "timeline": "document.querySelectorAll('rect.span').length == 2",
        "weights": "document.querySelectorAll('.u-wrap').length == 1",
        "ledger": f"{TEXT}.includes('no ledger')",
        "compare?metric=time%2Fstep": "document.querySelector('select option[selected]').value == 'time/step'",
    }.items():
        await tab.open(f"{address}#/0/{view}")
        await tab.until(ready)


async def test_what_a_policy_wrote_is_never_markup(page: tuple[Tab, str]) -> None:
    tab, address = page
    await tab.open(f"{address}#/0/rollouts?id=worst-10")
    await tab.until(f"{TEXT}.includes('<img src=x onerror=alert(1)>')")
    assert await tab.ask("document.querySelectorAll('#view img').length") == 0


async def test_the_page_follows_a_run_that_goes_on(page: tuple[Tab, str], run_path: Path) -> None:
    tab, address = page
    await tab.open(f"{address}#/0/now")
    await tab.until(f"{TEXT}.includes('step 10')")
    await asyncio.to_thread(add_step, run_path, 11)
    await tab.until(f"{TEXT}.includes('step 11')")


async def test_a_rollout_of_32k_tokens_is_drawn_whole(page: tuple[Tab, str], run_path: Path) -> None:
    tab, address = page
    with zstandard.open(run_path / "rollouts/step_11.jsonl.zst", "wt", encoding="utf-8") as file:
        file.write(json.dumps(rollout(11, "random", 0.5, "long", tokens=32768)) + "\n")
    await tab.open(f"{address}#/0/rollouts?step=11&look=logprobs")
    await tab.until("document.querySelectorAll('.block').length == 128")
    await tab.until("document.querySelectorAll('.block i').length >= 256")
    assert await tab.ask("document.querySelectorAll('.block i').length") < 32768, "the rest is drawn when it is seen"
    await tab.ask("[...document.querySelectorAll('.block')].at(-1).scrollIntoView()")
    await tab.until("[...document.querySelectorAll('.block')].at(-1).querySelectorAll('i').length == 256")
