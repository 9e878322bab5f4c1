"""The page in a browser: a person draws, opens files and moves sliders, and sees the pictures change."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser import DESK, PHONE, Looked, browser  # noqa: F401  (a fixture)
from PIL import Image

pytest.importorskip("gradio", reason="pip install 'torchcaps[explain]'")
pytest.importorskip("playwright", reason="pip install playwright")
from served_pages import serving

LINES = {"seven": [(70, 60), (210, 60), (120, 230)], "one": [(140, 50), (140, 230)]}


@pytest.fixture(scope="module")
def addresses() -> Iterator[list[str]]:
    with serving() as found:
        yield found


@pytest.fixture(params=[PHONE, DESK])
def looked(request: pytest.FixtureRequest, browser: Any, addresses: list[str]) -> Iterator[Looked]:  # noqa: F811
    opened = Looked(browser, addresses[0], request.param)
    opened.page.wait_for_selector("canvas[data-ready]")
    opened.page.wait_for_function("[...document.images].every(each => each.complete)")  # and nothing moves the sheet
    yield opened
    assert opened.complaints == []
    assert {url.split("/")[2] for url in opened.asked if url.startswith("http")} == {addresses[0].split("/")[2]}
    assert not opened.wider_than_its_window
    opened.page.close()


def draw(page: Any, line: list[tuple[int, int]]) -> None:
    page.locator("canvas").scroll_into_view_if_needed()
    box = page.locator("canvas").bounding_box()
    scale = box["width"] / 280
    page.mouse.move(box["x"] + scale * line[0][0], box["y"] + scale * line[0][1])
    page.mouse.down()
    for x, y in line[1:]:
        page.mouse.move(box["x"] + scale * x, box["y"] + scale * y, steps=5)
    page.mouse.up()


def sources(page: Any, where: str) -> list[str]:
    found: list[str] = page.eval_on_selector_all(f"{where} img", "all => all.map(e => e.src)")
    return found


def until_changed(page: Any, where: str, before: list[str]) -> list[str]:
    page.wait_for_function(
        "([where, before]) => JSON.stringify([...document.querySelectorAll(where + ' img')].map(e => e.src)) != before",
        arg=[where, page.evaluate("JSON.stringify", before)],
    )
    return sources(page, where)


def open_file(page: Any, path: Path) -> None:
    page.set_input_files("#paper input[type=file]", str(path))


def test_a_drawing_is_looked_at_and_its_pose_moved(looked: Looked) -> None:
    page = looked.page
    assert sources(page, "#maps") == []
    draw(page, LINES["seven"])
    maps = until_changed(page, "#maps", [])
    assert len(maps) == 3 * 3
    assert page.locator("#lengths tr").count() == 4
    still = sources(page, "#drawing")
    assert len(still) == 2

    slider = page.locator("#poses input[type=range]").nth(1)
    slider.scroll_into_view_if_needed()
    slider.focus()
    slider.press("ArrowRight")
    moved = until_changed(page, "#drawing", still)
    assert len(moved) == 3
    assert moved[:2] == still
    for _ in range(30):
        slider.press("ArrowRight")
    further = until_changed(page, "#drawing", moved)
    assert further[:2] == still

    page.get_by_role("button", name="Back to the pose as it is").click()
    page.wait_for_function("document.querySelectorAll('#drawing img').length == 2")
    assert sources(page, "#drawing") == still
    assert slider.input_value() == "0"

    page.locator("#poses input[type=range]").nth(0).press("ArrowLeft")
    until_changed(page, "#drawing", still)
    draw(page, LINES["one"])
    others = until_changed(page, "#maps", maps)
    assert len(others) == 9
    page.wait_for_function("document.querySelector('#poses input[type=range]').value == 0")
    assert len(sources(page, "#drawing")) == 2


def test_routing_is_switched_off(looked: Looked) -> None:
    page = looked.page
    draw(page, LINES["seven"])
    maps = until_changed(page, "#maps", [])
    page.get_by_label("routing").click()
    assert len(until_changed(page, "#maps", maps)) == 3 * 1
    page.get_by_label("routing").click()
    page.wait_for_function("document.querySelectorAll('#maps img').length == 9")
    assert sources(page, "#maps") == maps


def test_an_image_is_opened_and_the_sheet_cleared(looked: Looked, tmp_path: Path) -> None:
    page = looked.page
    blank = page.evaluate("document.querySelector('canvas').toDataURL()")
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 60, 3), np.uint8)).save(tmp_path / "a.jpg")
    open_file(page, tmp_path / "a.jpg")
    maps = until_changed(page, "#maps", [])
    assert len(maps) == 9
    sheet = "document.querySelector('canvas').toDataURL()"
    page.wait_for_function(f"{sheet} != {blank!r}")
    page.get_by_role("button", name="Clear").click()
    page.wait_for_function("document.querySelectorAll('#maps img').length == 0")
    assert page.evaluate(sheet) == blank
    draw(page, LINES["one"])
    assert until_changed(page, "#maps", []) != maps


def test_what_is_no_image_or_too_large_gets_a_message(looked: Looked, tmp_path: Path) -> None:
    page = looked.page
    text = tmp_path / "{{x}} ${y} <b>z.txt"
    text.write_text("hello")
    open_file(page, text)
    alert = page.get_by_role("alert")
    alert.wait_for()
    assert alert.inner_text() == f"{text.name} is no image that can be read: give a PNG, JPEG or another picture"
    large = tmp_path / "large.png"
    large.write_bytes(b"\x89PNG" + bytes(6 * 2**20))
    open_file(page, large)
    page.get_by_text("large.png is too large: give a file of 5 MB or less").wait_for()
    draw(page, LINES["seven"])
    until_changed(page, "#maps", [])
    assert alert.count() == 0


def test_two_people_do_not_see_each_others_images(browser: Any, addresses: list[str]) -> None:  # noqa: F811
    contexts = [browser.new_context(viewport={"width": DESK, "height": 900}) for _ in range(2)]
    pages = [context.new_page() for context in contexts]
    for page in pages:
        page.goto(addresses[0])
        page.wait_for_selector("canvas[data-ready]")
    draw(pages[0], LINES["seven"])
    first = until_changed(pages[0], "#drawing", [])
    assert sources(pages[1], "#drawing") == []
    draw(pages[1], LINES["one"])
    second = until_changed(pages[1], "#drawing", [])
    assert first[0] != second[0]
    pages[0].locator("#poses input[type=range]").nth(2).press("ArrowRight")
    assert until_changed(pages[0], "#drawing", first)[:2] == first
    for context in contexts:
        context.close()


def test_an_expert_draws_when_its_slider_moves(browser: Any, addresses: list[str]) -> None:  # noqa: F811
    looked = Looked(browser, addresses[1], PHONE)
    before = until_changed(looked.page, "#drawing", [])
    looked.page.locator("input[type=range]").press("ArrowRight")
    assert until_changed(looked.page, "#drawing", before) != before
    assert looked.complaints == []
    assert not looked.wider_than_its_window
    looked.page.close()
