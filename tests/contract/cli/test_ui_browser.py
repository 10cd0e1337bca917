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
from made_run import add_ledger, add_step, add_version, make_run, rollout
from meshrl.cli.report import report_page
from meshrl.cli.run_folder import RunFolder
from meshrl.cli.ui.server import Page
from polling import until

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="a real browser: needs Chromium on PATH"),
    pytest.mark.timeout(400),
]
AXE = Path(__file__).parents[3] / ".tools/axe/node_modules/axe-core/axe.min.js"
TEXT = "document.querySelector('#view').innerText"


@pytest.fixture
def run_path(tmp_path: Path) -> Path:
    path = make_run(tmp_path / "run", steps=10)
    add_version(path, 7, {"e0": 0.1, "e1": 2.6})
    add_version(path, 8, {"e0": 0.1, "e1": 0.1}, base=7)
    add_version(path, 9, {"e0": 0.1}, base=8)
    add_ledger(
        path,
        [
            ("made", "failed" if key % 4 == 0 else "trained", "env_error" * (key % 4 == 0), 0.5 * key)
            for key in range(40)
        ],
    )
    return path


@pytest.fixture
async def page(run_path: Path) -> AsyncIterator[tuple[Tab, str]]:
    app: web.Application = Page([RunFolder(run_path)] * 2).application(hosts=None, token=None)
    async with TestServer(app) as server, browser_tab() as tab:
        yield tab, str(server.make_url("/"))
        assert tab.errors == []


VIEWS = {
    "overview": f"document.querySelectorAll('.u-wrap').length == 3 && {TEXT}.includes('step 10')",
    "rollouts": f"{TEXT}.includes('made: reward 0 (right 0), advantage -0.5')",
    "rollouts?step=4&id=best-4": f"{TEXT}.includes('good 4')",
    "rollouts?id=best-10&look=logprobs": "document.querySelectorAll('.block i.t2').length == 2",
    "rollouts?id=best-10&look=gap": "document.querySelector('.block i.n2').title =="
    " 'gap -0.20000: trainer -0.7, engine -0.5, token 4' && document.querySelectorAll('.block i.t0').length == 2"
    " && document.querySelector('.block i.p1') && document.querySelectorAll('p.tokens i').length == 9",
    "rollouts?id=best-10&look=versions": "document.querySelector('.block i.v0').title == 'version 9, token 3'",
    "rollouts?id=best-10&look=mask": "document.querySelectorAll('.block i.t1').length == 2",
    "rollouts?id=best-10&group=group-10": "document.querySelectorAll('article').length == 2",
    "rollouts?id=best-10&aside=4%2Fbest-4": f"{TEXT}.includes('good 10') && {TEXT}.includes('good 4')",
    "rollouts?words=good": f"document.querySelectorAll('tbody tr').length == 1 && {TEXT}.includes('best')",
    "timeline": "document.querySelectorAll('rect.span').length == 2 && document.querySelector('.legend i')",
    "rollouts?id=worst-10&aside=4%2Fbest": f"{TEXT}.includes('rollout best-4 of step 4')",
    "weights": "document.querySelectorAll('.u-wrap').length == 1"
    " && document.querySelectorAll('svg.rails circle').length == 2"
    " && document.querySelectorAll('svg.rails rect').length == 1"
    f" && document.querySelectorAll('svg.rails line').length == 4 && {TEXT}.includes('delta of 8')"
    " && document.querySelector('.took.late').innerText == '125 ms, 2.5 s after the first'"
    " && document.querySelectorAll('.took.missed').length == 1",
    "environments": f"{TEXT}.includes('env_error') && document.querySelectorAll('.funnel .track').length == 3",
    "hosts": f"{TEXT}.includes('the run is over')",
    "compare?metric=time%2Fstep,reward%2Fall%2Fmean": "document.querySelectorAll('.u-wrap').length == 2"
    f" && document.querySelectorAll('.scroll tbody tr').length == 4 && {TEXT}.includes('nowhere')",
    "runs": "document.querySelectorAll('tbody tr').length == 2",
}


async def test_every_view_draws_what_the_folder_holds(page: tuple[Tab, str]) -> None:
    tab, address = page
    for view, ready in VIEWS.items():
        await tab.open(f"{address}#/0/{view}")
        await tab.until(ready)


@pytest.mark.skipif(not AXE.exists(), reason="needs axe-core: npm install --prefix .tools/axe axe-core")
@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])  # no color depends on the width
async def test_no_view_has_a_serious_fault_of_accessibility(page: tuple[Tab, str], width: int, scheme: str) -> None:
    tab, address = page
    await tab.call("Page.setBypassCSP", enabled=True)
    await tab.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
    await tab.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    script = await asyncio.to_thread(AXE.read_text)
    for view, ready in VIEWS.items():
        await tab.open(f"{address}?{width}{scheme}#/0/{view}")
        await tab.until(ready)
        await tab.ask(f"{script};0")
        found = await tab.ask(
            "axe.run().then(({ violations }) => violations.filter(({ impact }) => impact == 'serious' || impact =="
            " 'critical').map(({ id, nodes }) => `${id}: ${nodes[0].html}`))"
        )
        assert found == [], view
        assert await tab.ask("document.documentElement.scrollWidth") <= width, f"{view} is wider than the screen"


async def test_a_chart_zooms_shows_values_and_opens_the_step_of_a_point(page: tuple[Tab, str]) -> None:
    tab, address = page
    await tab.open(f"{address}#/0/overview")
    await tab.until(VIEWS["overview"])
    await tab.until("document.querySelector('.u-over').getBoundingClientRect().width > 100")
    await tab.drag(".u-over", 0.25, 0.75)
    await tab.until("document.querySelector('.chart').plot.scales.x.min > 1")
    await tab.until("document.querySelector('.u-legend').innerText.match(/reward.all.mean\\s*0\\.\\d/)")
    await tab.drag(".u-over", 0.5, 0.5)
    await tab.until("location.hash.startsWith('#/0/timeline?step=')")
    await tab.until(f"{TEXT}.includes('no trace of step')")
    await until(lambda: bool(tab.errors))
    assert all("404" in error for error in tab.errors)  # of the browser, for the answer that the page has shown
    tab.errors.clear()


async def test_an_engine_missed_no_version_from_before_it_came_or_after_another_took_its_place(
    page: tuple[Tab, str], run_path: Path
) -> None:
    tab, address = page
    add_version(run_path, 10, {"e2": 0.1})  # a resumed run's engine; e0 and e1 are gone
    await tab.open(f"{address}#/0/weights")
    cells = (
        "[...document.querySelector('svg.rails').closest('table').tBodies[0].rows]"
        ".map(row => [...row.cells].slice(-3).map(cell => cell.innerText))"
    )
    await tab.until(f"{cells}.length == 4")
    assert await tab.ask(cells) == [
        ["-", "-", "125 ms"],
        ["125 ms", "not taken", "-"],
        ["125 ms", "125 ms", "-"],
        ["125 ms", "125 ms, 2.5 s after the first", "-"],
    ]


async def test_a_failed_rollout_of_a_long_named_environment_is_read_without_scrolling(
    page: tuple[Tab, str], run_path: Path
) -> None:
    tab, address = page
    failed = {
        "picked": "failed", "step": 10, "rollout_id": "failed-10", "group_id": "group-10", "task_key": "key",
        "environment": "reasoning_gym:leg_counting", "agent": "", "reason": "ENVIRONMENT_FAILED", "message": "no",
    }  # fmt: skip
    with zstandard.open(run_path / "rollouts/step_10.jsonl.zst", "wt", encoding="utf-8") as file:
        file.write(json.dumps(failed) + "\n" + json.dumps(rollout(10, "best", 1.0, "good 10")) + "\n")
    await tab.open(f"{address}#/0/rollouts?step=10&id=failed-10")
    await tab.until(f"{TEXT}.includes('ENVIRONMENT_FAILED: no')")
    assert "undefined" not in await tab.ask(TEXT)
    assert await tab.ask("(list => list.scrollWidth - list.clientWidth)(document.querySelector('.two .scroll'))") == 0


async def test_the_axis_of_a_share_that_is_0_throughout_ends_at_1(page: tuple[Tab, str], run_path: Path) -> None:
    tab, address = page
    with (run_path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 11, "errored_rollouts/made": 0.0, "reward/made/mean": 0.5}) + "\n")
    await tab.open(f"{address}#/0/environments")
    await tab.until("document.querySelector('.chart[aria-label=Failed]').plot.scales.y.max == 1")


async def test_charts_are_smoothed_and_run_along_time_and_rollouts_are_read_by_keys(page: tuple[Tab, str]) -> None:
    tab, address = page
    await tab.open(f"{address}#/0/overview?keep=0.9&along=time&log=1")
    await tab.until("document.querySelector('.u-legend').innerText.includes('smoothed')")
    await tab.until("document.querySelector('.u-legend').innerText.includes('seconds of training')")
    await tab.open(f"{address}#/0/rollouts?id=worst-10")
    await tab.until(f"{TEXT}.includes('worst-10')")
    for key, shown in (("j", "best-10"), ("k", "worst-10"), ("[", "worst-9")):
        await tab.ask(f"dispatchEvent(new KeyboardEvent('keydown', {{ key: '{key}' }}))")
        await tab.until(f"document.querySelector('article')?.innerText.includes('{shown}')")


async def test_a_finished_run_has_no_services_and_a_dead_one_says_why(page: tuple[Tab, str], run_path: Path) -> None:
    tab, address = page
    (run_path / "configs/trainer.toml").write_text('[server]\nhost = "127.0.0.1"\nport = 1\n')
    await tab.open(f"{address}?a#/0/overview")
    await tab.until(f"{TEXT}.includes('the run is over') || {TEXT}.includes('not running')")
    await asyncio.to_thread((run_path / "logs").mkdir)
    at = "2026-11-23T03:48:33.991"
    line = f"{at} ERROR   rl trainer died: was killed by SIGKILL. Ending all other programs. Last lines of x:"
    (run_path / "logs/rl.log").write_text(f"{line}\n    the last line of the trainer\n")
    await tab.until(f"{TEXT}.includes('trainer died at {at}')")
    await tab.until(f"{TEXT}.includes('the last line of the trainer')")
    assert "not answering" not in await tab.ask(TEXT)


async def test_a_report_draws_its_curves_from_the_file_alone(run_path: Path, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    await asyncio.to_thread(path.write_text, report_page(RunFolder(run_path), 2.0))
    async with browser_tab() as tab:
        await tab.open(path.as_uri())
        await tab.until("document.querySelectorAll('.u-wrap').length == 3")
        await tab.until("document.querySelectorAll('rect.span').length == 2")
        await tab.until("document.querySelectorAll('svg.rails circle').length == 2")
        assert tab.errors == []
        assert await tab.ask("document.querySelector('#view img, main img')") is None


async def test_what_a_policy_wrote_is_never_markup(page: tuple[Tab, str]) -> None:
    tab, address = page
    await tab.open(f"{address}#/0/rollouts?id=worst-10")
    await tab.until(f"{TEXT}.includes('<img src=x onerror=alert(1)>')")
    assert await tab.ask("document.querySelectorAll('#view img').length") == 0


async def test_the_page_follows_a_run_that_goes_on(page: tuple[Tab, str], run_path: Path) -> None:
    tab, address = page
    await tab.open(f"{address}#/0/overview")
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
