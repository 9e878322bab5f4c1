"""The report in a browser: nothing to complain about, nothing fetched, nothing wider than a phone."""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from torchcaps.data import Arrays
from torchcaps.run.compare import compare

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed: apt-get install chromium")

LOOK = """
<body><script>
const found = {};
const widths = [390, 1280];
for (const width of widths) {
  const frame = document.createElement('iframe');
  frame.width = width; frame.height = 800; frame.src = 'PAGE';
  frame.onload = () => {
    const doc = frame.contentDocument, root = doc.documentElement;
    const boxes = selector => [...doc.querySelectorAll(selector)].map(e => e.getBoundingClientRect());
    const texts = [...doc.querySelectorAll('.chart')].flatMap(chart => {
      const around = chart.getBoundingClientRect();
      return [...chart.querySelectorAll('text')].map(t => t.getBoundingClientRect())
        .filter(b => b.left < around.left - 1 || b.right > around.right + 1 || b.bottom > around.bottom + 1);
    });
    found[width] = {
      scrolls: root.scrollWidth > root.clientWidth,
      charts: boxes('.chart').map(b => [b.width, b.height]),
      strips: boxes('.strip').map(b => [b.width, b.height]),
      cut: texts.length,
      wide: boxes('.strips').filter(b => b.right > width).length,
      small: [...doc.querySelectorAll('p, td, th, li')]
        .filter(e => parseFloat(getComputedStyle(e).fontSize) < 11).length,
      loads: boxes('[src], link:not([href^="data:"])').length,
      verdict: doc.querySelector('.verdict').innerText,
      ink: getComputedStyle(doc.body).color, paper: getComputedStyle(doc.body).backgroundColor,
    };
    if (Object.keys(found).length == widths.length) document.title = JSON.stringify(found);
  };
  document.body.append(frame);
}
</script></body>
"""


def look(page: Path, folder: Path, *flags: str) -> tuple[dict[str, Any], list[str]]:
    """(what a browser says of the page at the width of a phone and of a desk, its console's lines)."""
    (folder / "look.html").write_text(LOOK.replace("PAGE", page.resolve().as_uri()))
    command = [
        str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files",
        "--enable-logging=stderr", "--virtual-time-budget=10000", f"--user-data-dir={folder / 'profile'}", *flags,
        "--dump-dom", (folder / "look.html").as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    title = re.search(r"<title>(.*?)</title>", done.stdout)
    assert title is not None, done.stdout[:500] + done.stderr[-2000:]
    console = [line for line in done.stderr.splitlines() if ":CONSOLE" in line]
    return json.loads(html.unescape(title[1])), console


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    folder = tmp_path_factory.mktemp("report")
    x = np.random.default_rng(0).random((60, 12, 12))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torchcaps.run.compare.costs.SECONDS", 0.0)
        c = compare(
            Arrays(x, np.arange(60) % 3, test_fraction=0.5, batch_size=16), folder, seeds=2, epochs=2,
            label_fractions=(0.5, 1), head={"widths": (4, 8), "primary_types": 2}, say=lambda line: None,
            name="A set with a name that is rather long for a telephone <b>of</b> 390 pixels",
        )  # fmt: skip
    return c.verdict, folder / "report.html"


def test_the_report_opens_at_the_width_of_a_phone_and_of_a_desk(report: tuple[str, Path], tmp_path: Path) -> None:
    verdict, page = report
    found, console = look(page, tmp_path)
    assert console == []
    for width in ("390", "1280"):
        seen = found[width]
        assert (seen["scrolls"], seen["cut"], seen["wide"], seen["small"], seen["loads"]) == (False, 0, 0, 0, 0)
        assert len(seen["charts"]) == 7 + 1 + 2 + 2
        assert all(200 < w < int(width) and h > 100 for w, h in seen["charts"])
        assert all(w > 100 and h > 10 for w, h in seen["strips"])
        said = seen["verdict"].replace("\N{MINUS SIGN}", "-").replace("\N{NO-BREAK SPACE}", " ")
        assert said == verdict
    assert found["390"]["paper"] == "rgb(251, 250, 247)"
    dark, console = look(page, tmp_path, "--blink-settings=preferredColorScheme=0")
    assert console == []
    assert (dark["390"]["paper"], dark["390"]["ink"]) == ("rgb(21, 23, 26)", "rgb(233, 231, 226)")


def test_the_look_at_a_page_finds_what_is_wrong_with_it(report: tuple[str, Path], tmp_path: Path) -> None:
    broken = report[1].read_text().replace(
        "</main>",
        "<script>nothing.there</script><img src='not/there.png'><div style='width:700px'>.</div></main>",
    )  # fmt: skip
    (tmp_path / "broken.html").write_text(broken)
    found, console = look(tmp_path / "broken.html", tmp_path)
    assert any("ReferenceError" in line for line in console)
    assert found["390"]["scrolls"]
    assert not found["1280"]["scrolls"]
    assert found["390"]["loads"] == 1
