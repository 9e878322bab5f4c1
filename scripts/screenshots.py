"""Serve a run, draw a three on its page in chromium, and keep what is seen in docs/pictures: serve(-phone).png.

    python scripts/screenshots.py runs/digits_capsnet_dynamic

Prints how long it took from the end of a stroke to the first picture on screen, ten times.
"""

import io
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

PICTURES = Path(__file__).parents[1] / "docs" / "pictures"
THREE = [(80, 60), (140, 40), (190, 70), (180, 110), (130, 130), (190, 150), (200, 200), (150, 240), (80, 220)]


def open_page(browser: Browser, address: str, width: int) -> Page:
    """The page, ready to be drawn on."""
    page = browser.new_page(viewport={"width": width, "height": 900})
    page.goto(address)
    page.wait_for_selector("canvas[data-ready]")
    return page


def draw(page: Page) -> float:
    """Draw a three on a clean sheet; seconds from the end of the stroke to the first picture."""
    page.get_by_role("button", name="Clear").click()
    page.wait_for_function("document.querySelectorAll('#maps img').length == 0")
    box = page.locator("canvas").bounding_box()
    assert box is not None
    for i, (x, y) in enumerate(THREE):
        page.mouse.move(box["x"] + x * box["width"] / 280, box["y"] + y * box["height"] / 280)
        if i == 0:
            page.mouse.down()
    began = time.perf_counter()
    page.mouse.up()
    page.wait_for_selector("#maps img")
    return time.perf_counter() - began


def keep(page: Page, path: Path, height: int) -> None:
    """The upper part of the page as a small PNG."""
    shot = Image.open(io.BytesIO(page.screenshot(full_page=True)))
    few = shot.crop((0, 0, shot.width, min(height, shot.height))).convert("RGB")
    few.convert("P", palette=Image.Palette.ADAPTIVE, colors=128).save(path, optimize=True)
    print(f"{path.name}: {path.stat().st_size / 1000:.0f} kB")


def main(run: str) -> None:
    """Serve, draw, keep."""
    command = [sys.executable, "-m", "torchcaps", "serve", run]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server, sync_playwright() as driver:
        assert server.stdout is not None
        address = next(line.split()[0] for line in server.stdout if line.startswith("http"))
        chromium = shutil.which("chromium")
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        page = open_page(browser, address, 1280)
        took = [draw(page) for _ in range(10)]
        load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
        print(f"first picture: {', '.join(f'{s:.2f}' for s in took)} s; median {statistics.median(took):.2f} s; "
              f"{os.cpu_count()} cores, load {load}")  # fmt: skip
        slider = page.locator("#poses input[type=range]").nth(3)
        for _ in range(25):
            slider.press("ArrowRight")
        page.wait_for_function("document.querySelectorAll('#drawing img').length == 3")
        keep(page, PICTURES / "serve.png", 1300)
        phone = open_page(browser, address, 390)
        draw(phone)
        keep(phone, PICTURES / "serve-phone.png", 1500)
        browser.close()
        server.terminate()


if __name__ == "__main__":
    main(sys.argv[1])
