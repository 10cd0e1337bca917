"""Takes the pictures of `meshrl ui` in docs/images/ui: every page, and sheets of all pages at a phone's width and dark.

    python scripts/picture_ui.py RUN [OTHER_RUN ...] [--to FOLDER] [--only PAGE ...]

RUN is a run's output folder; the others are compared with it. Needs Chromium on PATH.
"""

import argparse
import asyncio
import base64
import sys
from pathlib import Path

from aiohttp.test_utils import TestServer

sys.path.append(str(Path(__file__).parents[1] / "tests/support"))

from browser import Tab, browser_tab
from meshrl.cli.run_folder import RunFolder
from meshrl.cli.ui.server import Page

TO = Path(__file__).parents[1] / "docs/images/ui"
DRAWN = "document.querySelectorAll('.u-wrap').length"
PAGES = {
    "overview": ("overview?keep=0.6", f"{DRAWN} > 5"),
    "timeline": ("timeline", "document.querySelectorAll('rect.span').length > 10"),
    "rollout": ("rollouts", "document.querySelector('.message.assistant')"),
    "logprobs": ("rollouts?look=logprobs", "document.querySelector('.tokens .block i')"),
    "gap": ("rollouts?look=gap", "document.querySelector('.tokens .block i')"),
    "beside": ("rollouts?aside={first}/best", "document.querySelectorAll('article .message.assistant').length > 1"),
    "weights": ("weights", f"{DRAWN} > 3 && document.querySelector('svg.rails')"),
    "environments": ("environments", f"{DRAWN} > 2"),
    "compare": ("compare?metric=reward/all/mean,mismatch_kl/all/mean", f"{DRAWN} == 2"),
    "runs": ("runs", "document.querySelector('tbody tr') && !document.querySelector('.asking')"),
    "hosts": ("hosts", "document.querySelector('#view table, #view p')"),
}
"""Under the name of a picture: the view, and when it is drawn."""
WIDE, NARROW, HIGH = 1280, 390, 900
SHEETS = {"wide_dark": (WIDE, "dark"), "narrow_light": (NARROW, "light"), "narrow_dark": (NARROW, "dark")}
QUALITY = 55
THUMB = 320
STYLE = f"""
body {{ margin: 8px; display: grid; grid-template-columns: repeat(4, {THUMB}px); gap: 8px; font: 13px system-ui }}
figure {{ margin: 0; border: 1px solid #8888 }}
img {{ width: 100%; max-height: 340px; object-fit: cover; object-position: top }}
figcaption {{ padding: 4px }}
"""


async def look(tab: Tab, address: str, width: int, scheme: str, ready: str) -> bytes:
    """A picture of one page."""
    await tab.call("Emulation.setDeviceMetricsOverride", width=width, height=HIGH, deviceScaleFactor=1, mobile=False)
    await tab.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    await tab.open("about:blank")
    await tab.open(address)
    await tab.until(ready)
    await asyncio.sleep(0.5)  # charts take the width of their boxes
    return await tab.picture(QUALITY)


async def sheet(tab: Tab, pictures: dict[str, bytes]) -> bytes:
    """All pictures beside each other, small, each with its name."""
    shown = "".join(
        f'<figure><img src="data:image/webp;base64,{base64.b64encode(picture).decode()}">'
        f"<figcaption>{name}</figcaption></figure>"
        for name, picture in pictures.items()
    )
    page = f"<!doctype html><style>{STYLE}</style>{shown}"
    await tab.call("Emulation.setEmulatedMedia", features=[])
    width = 4 * THUMB + 40
    await tab.call("Emulation.setDeviceMetricsOverride", width=width, height=HIGH, deviceScaleFactor=1, mobile=False)
    await tab.open("about:blank")
    frame = (await tab.call("Page.getFrameTree"))["frameTree"]["frame"]["id"]
    await tab.call("Page.setDocumentContent", frameId=frame, html=page)
    await tab.until("document.images.length && [...document.images].every((one) => one.complete)")
    size = await tab.ask("[document.body.scrollWidth, document.body.scrollHeight]")
    clip = {"x": 0, "y": 0, "width": size[0] + 16, "height": size[1] + 16, "scale": 1}
    return await tab.picture(QUALITY, captureBeyondViewport=True, clip=clip)


async def take(runs: list[Path], to: Path, pages: list[str]) -> None:
    folders = [RunFolder(path) for path in runs]
    server = TestServer(Page(folders).application(hosts=None, token=None))
    await server.start_server()
    first = folders[0].sampled_steps()[0]
    async with browser_tab() as tab:
        for name, (width, scheme) in {"wide_light": (WIDE, "light"), **(SHEETS if pages == [*PAGES] else {})}.items():
            taken = {}
            for page in pages:
                view, ready = PAGES[page]
                address = f"{server.make_url('/')}?{name}#/0/{view.format(first=first)}"
                taken[page] = await look(tab, address, width, scheme, ready)
            if name in SHEETS:
                taken = {f"sheet_{name}": await sheet(tab, taken)}
            for page, picture in taken.items():
                await asyncio.to_thread((to / f"{page}.webp").write_bytes, picture)
                print(f"{page}: {len(picture) / 1000:.0f} kB", flush=True)
        assert tab.errors == [], tab.errors
    await server.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--to", type=Path, default=TO)
    parser.add_argument("--only", nargs="+", choices=PAGES, default=[*PAGES], help="these pages, without the sheets")
    given = parser.parse_args()
    given.to.mkdir(parents=True, exist_ok=True)
    asyncio.run(take(given.runs, given.to, given.only))


if __name__ == "__main__":
    main()
