"""The documentation site: annotated pages hold their files, links lead somewhere, nothing is loaded from elsewhere."""

import ast
import importlib
import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import markdown
import pytest
from annotated import PAGES, SOURCES, page, rows
from browser import DESK, PHONE, Looked, browser  # noqa: F401  (a fixture)
from docstrings import escaped, to_markdown
from figures import with_figures
from mathml import with_mathml

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
FILES = list(PAGES.values())
ROOMS = ["routing", "layers", "models", "losses", "squash", "data", "training", "explain", "energy", "testing"]


def read(path: str) -> str:
    return (SOURCES / path).read_text("utf-8")


def definitions(source: str) -> list[str]:
    """Functions and classes, those of classes included and those of functions not, as dotted names."""
    found: list[str] = []

    def walk(body: list[ast.stmt], owner: str) -> None:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found.append(f"{owner}{node.name}")
                if isinstance(node, ast.ClassDef):
                    walk(node.body, f"{owner}{node.name}.")

    walk(ast.parse(source).body, "")
    return found


def docstrings(source: str) -> list[str]:
    """All of them, those below values included."""
    return [
        node.value.value
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    ]


def words(text: str) -> list[str]:
    """What remains when it does not matter how text is laid out or marked up."""
    text = text.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&")
    return re.sub(r"````\w*|[`*:]", " ", text.replace("\\", "")).split()


# ---------------------------------------------------------------------------------------------------------------------
# Annotated pages


@pytest.mark.parametrize("path", FILES)
def test_every_function_and_class_of_a_file_begins_one_row(path: str) -> None:
    source = read(path)
    assert [row.name for row in rows(source) if row.name] == definitions(source)


@pytest.mark.parametrize("path", FILES)
def test_every_line_of_code_stands_once_with_its_number(path: str) -> None:
    source = read(path)
    lines = source.split("\n")
    shown = [(number, line) for row in rows(source) for number, line in row.code if line.strip()]
    assert [line for _, line in shown] == [lines[number - 1] for number, _ in shown]
    assert [number for number, _ in shown] == sorted({number for number, _ in shown})
    silent = {n for n, line in enumerate(lines, 1) if not line.strip() or line.lstrip().startswith("#")}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            assert node.end_lineno is not None
            silent |= set(range(node.lineno, node.end_lineno + 1))
    assert {number for number, _ in shown} == set(range(1, len(lines) + 1)) - silent


@pytest.mark.parametrize("path", FILES)
def test_a_page_numbers_its_code_as_the_file_does(path: str) -> None:
    lines = read(path).split("\n")
    fences = re.findall(r'^````python linenums="(\d+)"\n(.*?)\n````$', page(read(path), path), re.MULTILINE | re.DOTALL)
    assert len(fences) > 5
    for first, code in fences:
        shown = code.split("\n")
        assert [line.rstrip() for line in lines[int(first) - 1 : int(first) - 1 + len(shown)]] == shown


@pytest.mark.parametrize("path", FILES)
def test_a_page_says_all_that_docstrings_and_comments_say(path: str) -> None:
    source = read(path)
    said = " ".join(words(page(source, path)))
    for docstring in docstrings(source):
        for block in re.split(r"\n\s*\n", docstring):
            assert " ".join(words(block)) in said
    for comment in re.findall(r"^ *# (.*\w.*)$", source, re.MULTILINE):
        assert " ".join(words(comment)) in said


def test_a_page_changes_with_its_source() -> None:
    source = read("squash.py")
    before = page(source, "squash.py")
    assert page(source, "squash.py") == before
    assert page(source.replace("Every kind keeps the direction", "Each kind keeps it"), "squash.py") != before
    assert page(source.replace("_SERIES_BELOW = 1e-2", "_SERIES_BELOW = 1e-3"), "squash.py") != before


def test_silent_helpers_and_imports_are_folded_away_and_nothing_else() -> None:
    source = '"""A file."""\nimport math\ndef _silent(x):\n    return x\ndef _told(x):\n    """Told."""\n    return x\n'
    assert [(row.name, row.folded) for row in rows(source)] == [
        ("", "Imports"), ("_silent", "_silent"), ("_told", ""),
    ]  # fmt: skip


def test_a_comment_stands_beside_the_lines_that_follow_it() -> None:
    source = "def f(x):\n    y = x\n    # why\n    # indeed\n    z = y  # beside\n    return z\n"
    (head, rest) = rows(source)
    assert (head.words, head.code) == ("", ((1, "def f(x):"), (2, "    y = x")))
    assert (rest.words, rest.code) == ("why indeed", ((5, "    z = y  # beside"), (6, "    return z")))


def test_text_below_a_value_stands_beside_it() -> None:
    (told, plain) = rows('A = 1\n"""What A is."""\nB = 2\n')
    assert (told.words, told.code) == ("**`A`**\n\nWhat A is.", ((1, "A = 1"),))
    assert (plain.words, plain.code) == ("", ((3, "B = 2"),))


# ---------------------------------------------------------------------------------------------------------------------
# Docstrings, equations, figures


def test_columns_become_a_list_and_what_is_laid_out_otherwise_stays() -> None:
    assert to_markdown("poses     `[N, I]`, and\n          more.\nlong_name b_ij.") == (
        "`poses`\n:   `[N, I]`, and more.\n\n`long_name`\n:   b\\_ij."
    )
    assert (
        to_markdown("a      one\nb, long_name  two,\n       and more")
        == "`a`\n:   one\n\n`b, long_name`\n:   two, and more"
    )
    assert (
        to_markdown("Args:\n    a: One.\n    b: Two,\n        and more.") == "`a`\n:   One.\n\n`b`\n:   Two, and more."
    )
    for table in ("Sizes     10    100\n    small  1     2", "Either:  no norm    `a`\n         no rounds  `b`"):
        assert to_markdown(table) == f"````text\n{table}\n````"
    assert to_markdown("Of v:\n\n    v = s\n\n    w = v\n\nSo.") == "Of v:\n\n````text\nv = s\n\nw = v\n````\n\nSo."
    assert to_markdown("x = f(y)\ng(x).h") == "````python\nx = f(y)\ng(x).h\n````"
    assert to_markdown(">>> 1 + 1\n2") == "````pycon\n>>> 1 + 1\n2\n````"


def test_prose_is_not_taken_for_markup() -> None:
    prose = "b_ij + <u_ij, v_j>; _w_ *x*, [N][I], # and | but `a_b*c` as `[N, I]`"
    html = markdown.markdown(escaped(prose), extensions=["tables"])
    assert html == (
        "<p>b_ij + &lt;u_ij, v_j&gt;; _w_ *x*, [N][I], # and | but <code>a_b*c</code> as <code>[N, I]</code></p>"
    )


def test_tex_becomes_mathml_and_what_cannot_is_named() -> None:
    inline = with_mathml(r'<p><span class="arithmatex">\(a &lt; b\)</span></p>')
    assert re.search(r'<math [^>]*display="inline"', inline)
    assert "arithmatex" not in inline
    block = with_mathml(r'<div class="arithmatex">\[\begin{aligned} a &amp;= b \\ c &amp;= d \end{aligned}\]</div>')
    assert block.count("<mtr") == 2
    assert "&" not in re.sub(r"&#x\w+;", "", block)
    for wrong in (r"\left( a", r"\nosuchcommand{a}"):
        with pytest.raises(ValueError, match=f"cannot be turned into MathML: {re.escape(wrong)}"):
            with_mathml(f'<span class="arithmatex">\\({wrong}\\)</span>')


def test_a_link_in_the_contents_leads_to_its_own_name() -> None:
    """`em` and `EM`, `squash` and `_Squash` stand on one page."""
    for path in FILES:
        found = re.findall(r"\{ #([\w-]+) \.name \}", page(read(path), path))
        assert found
        assert len(found) == len(set(found)), path


def test_figures_come_from_the_records_and_what_is_not_there_is_an_error() -> None:
    table = with_figures("Before\n\n<!-- speed fc -->\n\nAfter")
    record = json.loads((DOCS / "measurements" / "layers.json").read_text("utf-8"))
    assert table.count("\n| ") == 2 + sum(row["workload"] == "fc" for row in record["rows"])
    assert with_figures("<!-- results Su's generalisation test -->").startswith("| network |")
    with pytest.raises(ValueError, match="no workload 'nothing'"):
        with_figures("<!-- speed nothing -->")
    with pytest.raises(ValueError, match=r"docs/results\.md has no table"):
        with_figures("<!-- results Nothing at all -->")


# ---------------------------------------------------------------------------------------------------------------------
# Pages


def test_every_test_that_a_page_names_is_there() -> None:
    tests = "\n".join(path.read_text("utf-8") for path in (ROOT / "tests").glob("test_*.py"))
    there = set(re.findall(r"^def (test_\w+)\(", tests, re.MULTILINE))
    pages = list((DOCS / "algorithms").glob("*.md"))
    named = {name for page in pages for name in re.findall(r"`(test_\w+)`", page.read_text("utf-8"))}
    assert len(named) >= 40
    assert named <= there


# ---------------------------------------------------------------------------------------------------------------------
# The site


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site as `make docs` builds it, strictly."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", folder],
        cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


class Links(HTMLParser):
    """What a page holds: anchors, links to follow, and what a browser loads to show it."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.feed(path.read_text("utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        if tag == "link" and given.get("rel") not in ("canonical", "next", "prev", "alternate"):
            self.loads.append(given["href"])
        self.loads += [given[name] for name in ("src", "srcset", "poster", "data") if name in given and tag != "a"]


def test_every_page_is_built(site: Path) -> None:
    names = [path.relative_to(DOCS).with_suffix("").as_posix() for path in DOCS.rglob("*.md")]
    names += [f"annotated/{name}" for name in PAGES]
    assert [name for name in names if not (site / f"{name}.html").exists()] == []
    assert len(names) >= 35


def test_links_inside_the_site_lead_somewhere(site: Path) -> None:
    pages = {path: Links(path) for path in site.rglob("*.html") if path.name != "404.html"}
    followed = 0
    for path, found in pages.items():
        for link in found.links + found.loads:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            assert target.exists(), f"{path.relative_to(site)}: {link}"
            if parts.fragment and target in pages:
                assert unquote(parts.fragment) in pages[target].anchors, f"{path.relative_to(site)}: {link}"
                followed += 1
    assert followed >= 500


def test_nothing_is_loaded_from_elsewhere_when_a_page_is_looked_at(site: Path) -> None:
    loads = {load for path in site.rglob("*.html") for load in Links(path).loads}
    assert len(loads) >= 5
    assert [load for load in loads if urlsplit(load).netloc] == []
    for sheet in site.rglob("*.css"):
        urls = re.findall(r"(?:url\(|@import )[\"']?([^\"')\s]+)", sheet.read_text("utf-8"))
        assert [url for url in urls if urlsplit(url).netloc] == []


@pytest.mark.parametrize("room", ROOMS)
def test_the_reference_shows_every_public_name_of_a_room_and_no_other(site: Path, room: str) -> None:
    public = importlib.import_module(f"torchcaps.{room}").__all__
    text = (site / "api" / f"{room}.html").read_text("utf-8")
    shown = re.findall(r'<h2 id="torchcaps\.([\w.]+)" class="doc doc-heading"', text)
    assert sorted(name.rpartition(".")[2] for name in shown) == sorted(public)


def test_no_equation_is_left_as_tex(site: Path) -> None:
    text = (site / "algorithms" / "em.html").read_text("utf-8")
    assert text.count("<math") >= 15
    assert "arithmatex" not in text
    assert "\\frac" not in text


def test_no_markup_of_docstrings_is_left_on_the_pages(site: Path) -> None:
    for path in [*(site / "annotated").glob("*.html"), *(site / "api").glob("*.html")]:
        assert re.findall(r"````|\\_|\\\*|<p>:   ", path.read_text("utf-8")) == [], path.name


# ---------------------------------------------------------------------------------------------------------------------
# In a browser, opened from the folder


LOOKED_AT = ["index", "results", "algorithms/dynamic-routing", "algorithms/em", "annotated/dynamic", "api/routing"]


@pytest.mark.parametrize("width", [PHONE, DESK])
@pytest.mark.parametrize("dark", [False, True])
def test_pages_fit_the_screen_and_ask_no_other_machine(site: Path, browser: Any, width: int, dark: bool) -> None:  # noqa: F811
    colours = set()
    for name in LOOKED_AT:
        looked = Looked(browser, (site / f"{name}.html").as_uri(), width, dark=dark)
        assert not looked.wider_than_its_window, name
        assert looked.complaints == []
        assert {urlsplit(url).scheme for url in looked.asked} <= {"file", "data", "blob"}
        colours.add(looked.page.evaluate("getComputedStyle(document.body).backgroundColor"))
        looked.page.close()
    (colour,) = colours
    assert (sum(map(int, re.findall(r"\d+", colour)[:3])) < 3 * 128) == dark


@pytest.mark.parametrize("width", [PHONE, DESK])
def test_code_stands_beside_its_text_or_below_it_on_a_phone(site: Path, browser: Any, width: int) -> None:  # noqa: F811
    looked = Looked(browser, (site / "annotated" / "attention.html").as_uri(), width)
    boxes = looked.page.evaluate(
        "[...document.querySelectorAll('.row')].filter(row => row.offsetParent && row.querySelector('.words > *'))"
        ".map(row => ['.words', '.code'].map(part => row.querySelector(part).getBoundingClientRect()))"
    )
    looked.page.close()
    assert len(boxes) >= 10
    for words, code in boxes:
        if width == PHONE:
            assert code["top"] >= words["bottom"]
            assert code["left"] == pytest.approx(words["left"], abs=1)
        else:
            assert code["left"] >= words["right"]
            assert code["top"] == pytest.approx(words["top"], abs=1)


def test_the_site_is_searched_without_a_server(site: Path, browser: Any) -> None:  # noqa: F811
    looked = Looked(browser, (site / "index.html").as_uri())
    looked.page.wait_for_load_state("networkidle")
    looked.page.locator("input.md-search__input").click()
    looked.page.keyboard.type("inverted attention")
    looked.page.wait_for_selector(".md-search-result__link", timeout=30_000)
    found = looked.page.locator(".md-search-result__link").first.get_attribute("href")
    looked.page.close()
    assert "attention" in found
