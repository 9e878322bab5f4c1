"""Annotated pages: what a file of the library says in docstrings and comments, beside the lines that carry it.

A page is made of rows. On the left of a row stands a docstring or a comment, on the right the lines it speaks of, with
their numbers in the file. Nothing is written here that is not in the file, so that a page cannot drift from it.
"""

import ast
import inspect
import io
import re
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from docstrings import escaped, to_markdown

__all__ = ["PAGES", "SOURCES", "Row", "page", "rows"]

SOURCES = Path(__file__).parents[1] / "src" / "torchcaps"

PAGES = {
    "dynamic": "routing/dynamic.py",
    "attention": "routing/attention.py",
    "em": "routing/em.py",
    "squash": "squash.py",
    "losses": "losses.py",
    "rounds": "routing/_rounds.py",
    "passes": "routing/_passes.py",
    "streamed": "routing/_streamed.py",
    "capsnet": "models/capsnet.py",
    "inverted-attention": "models/inverted_attention.py",
    "experts": "energy/experts.py",
}
"""The file of each page annotated/NAME.md."""

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass(frozen=True)
class Row:
    """Some lines of a file and what is said of them."""

    name: str
    """Of the function or class that begins here, or nothing."""
    words: str
    """Markdown."""
    code: tuple[tuple[int, str], ...]
    """Lines and their numbers."""
    level: int = 2
    """Of the heading: 2 for what stands by itself, 3 for what belongs to a class."""
    folded: str = ""
    """What it is folded away under, where it is."""


def page(source: str, path: str) -> str:
    """The page of a file in Markdown: `source` is what the file holds, `path` what it is called."""
    found = list(rows(source))
    links = " ".join(f"[`{row.name}`](#{_anchor(row.name)})" for row in found if row.name and row.level == 2)
    intro = to_markdown(ast.get_docstring(ast.parse(source)) or "")
    return "\n\n".join(
        [
            f"---\ntitle: {path}\nhide: [navigation, toc]\n---",
            f"# {path} {{ .file }}",
            f'<div class="intro" markdown>\n\n{intro}\n\n</div>',
            f'<div class="contents" markdown>\n\n{links}\n\n</div>',
            *map(_written, found),
        ]
    )


def rows(source: str) -> Iterator[Row]:
    """All rows of a file in its order; together they hold each line of code once."""
    file = _File(source)
    yield from file.statements(_without_docstring(file.tree), 2, "")


class _File:
    def __init__(self, source: str) -> None:
        self.tree = ast.parse(source)
        self.lines = source.split("\n")
        self.comments = {
            token.start[0]: token.string.strip("# -")
            for token in tokenize.generate_tokens(io.StringIO(source).readline)
            if token.type == tokenize.COMMENT and not token.line[: token.start[1]].strip()
        }

    def statements(self, body: Sequence[ast.stmt], level: int, owner: str) -> Iterator[Row]:
        """Rows of what follows one another in a file or class: definitions each by itself, the rest together."""
        loose: list[ast.stmt] = []
        for statement in body:
            if isinstance(statement, Definition):
                yield from self.loose(loose, level)
                loose = []
                yield from self.definition(statement, level, owner)
            else:
                loose.append(statement)
        yield from self.loose(loose, level)

    def definition(self, node: Definition, level: int, owner: str) -> Iterator[Row]:
        """Rows of a function or class: its docstring beside its head, then its comments beside what follows them."""
        name = f"{owner}.{node.name}" if owner else node.name
        said = ast.get_docstring(node)
        body = _without_docstring(node)
        is_class = isinstance(node, ast.ClassDef)
        lines = self.all_lines(node)
        if said is not None:
            lines -= self.all_lines(node.body[0])
        if is_class and body:
            lines -= set(range(self.first_line(body[0]), _last_line(node) + 1))
        silent = said is None and not is_class and not owner and node.name.startswith("_")
        yield from self.split(lines, name, to_markdown(said or ""), level, name if silent else "")
        if is_class:
            yield from self.statements(body, 3, name)

    def loose(self, statements: Sequence[ast.stmt], level: int) -> Iterator[Row]:
        """Rows of imports, which are folded away, and of values, each beside the text below it."""
        gathered: list[ast.stmt] = []
        told = False
        for statement, following in zip_longest(statements, statements[1:]):
            if told:  # this is the text of the value before it
                told = False
                continue
            told = following is not None and _is_text(following)
            if gathered and (told or _imports(statement) != _imports(gathered[0])):
                yield from self.plain(gathered, level)
                gathered = []
            if told:
                yield from self.value(statement, following, level)
            else:
                gathered.append(statement)
        if gathered:
            yield from self.plain(gathered, level)

    def value(self, statement: ast.stmt, text: ast.stmt, level: int) -> Iterator[Row]:
        name = ast.unparse(statement).split(":", 1)[0].split(" = ", 1)[0]
        words = f"**`{name}`**\n\n{to_markdown(_text(text))}"
        yield from self.split(self.all_lines(statement), "", words, level, "")

    def plain(self, statements: Sequence[ast.stmt], level: int) -> Iterator[Row]:
        numbers = {n for statement in statements for n in self.all_lines(statement)}
        yield from self.split(numbers, "", "", level, "Imports" if _imports(statements[0]) else "")

    def split(self, numbers: set[int], name: str, words: str, level: int, folded: str) -> Iterator[Row]:
        """Lines as rows: a row ends where a comment on lines of its own begins, and the comment is the next one's."""
        told: list[str] = []
        code: list[int] = []
        between = {n for n in range(min(numbers), max(numbers)) if not self.lines[n - 1].strip()}
        for number in sorted(numbers | between):
            if number in self.comments:
                if any(self.lines[n - 1].strip() for n in code):
                    yield self.row(name, told, words, code, level, folded)
                    name, words, told, code = "", "", [], []
                told.append(self.comments[number])
            else:
                code.append(number)
        yield self.row(name, told, words, code, level, folded)

    def row(self, name: str, told: list[str], words: str, code: list[int], level: int, folded: str) -> Row:
        comment = escaped(" ".join(filter(None, told)))
        lines = tuple((n, self.lines[n - 1]) for n in code)
        return Row(name, "\n\n".join(filter(None, (comment, words))), lines, level, folded)

    def all_lines(self, node: ast.stmt) -> set[int]:
        return set(range(self.first_line(node), _last_line(node) + 1))

    def first_line(self, node: ast.stmt) -> int:
        """The first line of a statement, its decorators and the comments above it included."""
        decorators = node.decorator_list if isinstance(node, Definition) else []
        line = min([node.lineno, *(d.lineno for d in decorators)])
        while line - 1 in self.comments or (line - 2 in self.comments and not self.lines[line - 2].strip()):
            line -= 1
        return line


def _without_docstring(node: ast.Module | Definition) -> list[ast.stmt]:
    return node.body if ast.get_docstring(node) is None else node.body[1:]


def _last_line(node: ast.stmt) -> int:
    assert node.end_lineno is not None
    return node.end_lineno


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _text(node: ast.stmt) -> str:
    assert isinstance(node, ast.Expr)
    assert isinstance(node.value, ast.Constant)
    return inspect.cleandoc(str(node.value.value))


def _imports(node: ast.stmt) -> bool:
    """Whether a statement belongs to the head of a file: imports and `__all__`."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        return True
    return isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"


def _anchor(name: str) -> str:
    return name.replace(".", "-").strip("_")  # as it is written: em and EM stand on one page


def _written(row: Row) -> str:
    """A row in Markdown: two boxes side by side, or, on a narrow screen, one above the other."""
    heading = f"{'#' * row.level} {escaped(row.name)} {{ #{_anchor(row.name)} .name }}" if row.name else ""
    words = "\n\n".join(filter(None, (heading, row.words)))
    code = "\n\n".join(_fence(part) for part in _runs(row.code))
    both = (
        '<div class="row" markdown>\n\n<div class="words" markdown>\n\n'
        f'{words}\n\n</div>\n\n<div class="code" markdown>\n\n{code}\n\n</div>\n\n</div>'
    )
    if not row.folded:
        return both
    return f'<details class="fold" markdown>\n<summary>{row.folded}</summary>\n\n{both}\n\n</details>'


def _runs(code: Sequence[tuple[int, str]]) -> Iterator[list[tuple[int, str]]]:
    """Lines that follow one another in the file, without blank ones at either end."""
    run: list[tuple[int, str]] = []
    for number, line in code:
        if run and number != run[-1][0] + 1:
            yield run
            run = []
        if run or line.strip():
            run.append((number, line))
    yield run


def _fence(run: list[tuple[int, str]]) -> str:
    if not run:
        return ""
    text = re.sub(r"\s+$", "", "\n".join(line for _, line in run))
    return f'````python linenums="{run[0][0]}"\n{text}\n````'
