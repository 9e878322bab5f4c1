"""The docstrings of this library as Markdown.

They are plain text, laid out for reading in the file: prose, indented equations, examples, and columns of names beside
what they mean. Here each of these becomes what Markdown has for it, and nothing in the prose is taken for markup.
"""

import ast
import re
from collections.abc import Iterator

import griffe

__all__ = ["HouseDocstrings", "escaped", "to_markdown"]

_COLUMNS = re.compile(r"(?P<name>\S+(?: \S+)*)(?P<gap> {2,})(?P<meaning>\S.*)")


def to_markdown(docstring: str) -> str:
    """The Markdown of a docstring without its indentation (`ast.get_docstring` or `inspect.cleandoc`)."""
    return "\n\n".join(_block(block) for block in _blocks(docstring))


def escaped(text: str) -> str:
    """Prose whose letters stand for themselves in Markdown, but for `code` between backticks."""
    parts = re.split(r"(`[^`]+`)", text)
    return "".join(part if part.startswith("`") else _literal(part) for part in parts)


def _literal(text: str) -> str:
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    text = re.sub(r"([\\`*_\[\]#|$])", r"\\\1", text)
    return re.sub(r"^(\d+)([.)])|^([-+])(?= )", lambda m: f"{m[1] or ''}\\{m[2] or m[3]}", text)


def _blocks(docstring: str) -> Iterator[list[str]]:
    """The lines between blank ones; indented lines are one block, whatever blank lines are among them."""
    block: list[str] = []
    for line in docstring.strip("\n").split("\n"):
        goes_on = bool(block) and all(part == "" or part.startswith("  ") for part in block)
        if not line.strip():
            if goes_on:
                block.append("")
            elif block:
                yield block
                block = []
        elif goes_on and not line.startswith("  "):
            yield block
            block = [line]
        else:
            block.append(line)
    if block:
        yield block


def _block(lines: list[str]) -> str:
    lines = "\n".join(lines).rstrip().split("\n")
    if lines[0].startswith(">>>"):
        return _fenced("pycon", lines)
    if lines[0].startswith("  "):
        return _fenced("text", _dedented(lines))
    if lines[0] == "Args:" and (listed := _arguments(lines[1:])):
        return listed
    if _is_python(lines):
        return _fenced("python", lines)
    if _COLUMNS.fullmatch(lines[0]) or (len(lines) > 1 and any(line.startswith("  ") for line in lines)):
        return _columns(lines) or _fenced("text", lines)
    return escaped(" ".join(lines))


def _is_python(lines: list[str]) -> bool:
    """Whether lines are statements of Python; prose does not parse, but for single words."""
    try:
        statements = ast.parse("\n".join(lines)).body
    except SyntaxError:
        return False
    return any(isinstance(s, ast.Assign | ast.Import | ast.ImportFrom) for s in statements)


def _columns(lines: list[str]) -> str | None:
    """A list of names and meanings; None for lines that are laid out in another way, and have to stay."""
    found: list[tuple[str, str]] = []
    columns: set[int] = set()  # where meanings begin; a name may be too long for the first
    for line in lines:
        if line.startswith(" "):
            if _indentation(line) not in columns:
                return None
            name, meaning = found.pop()
            found.append((name, f"{meaning} {line.strip()}"))
        elif match := _COLUMNS.fullmatch(line):
            columns.add(match.start("meaning"))
            found.append((match["name"], match["meaning"]))
        elif (end := line.find(" ")) + 1 in columns:  # a name so long that one blank is left before its meaning
            found.append((line[:end], line[end + 1 :]))
        else:
            return None
    if any(re.search(r"\S {2,}\S", meaning) for _, meaning in found):
        return None
    return _list(found)


def _arguments(lines: list[str]) -> str | None:
    """A list of what stands below `Args:` as `name: meaning`, the form that command lines are made of."""
    found: list[tuple[str, str]] = []
    for line in lines:
        if match := re.fullmatch(r" {4}([*\w]+): (.*)", line):
            found.append((match[1], match[2]))
        elif found and _indentation(line) > 4:
            name, meaning = found.pop()
            found.append((name, f"{meaning} {line.strip()}"))
        else:
            return None
    return _list(found)


def _list(found: list[tuple[str, str]]) -> str:
    return "\n\n".join(f"{_name(name)}\n:   {escaped(meaning)}" for name, meaning in found)


def _indentation(line: str) -> int:
    return len(line) - len(line.lstrip())


def _name(name: str) -> str:
    return escaped(name) if "`" in name else f"`{name}`"


def _dedented(lines: list[str]) -> list[str]:
    least = min(_indentation(line) for line in lines if line.strip())
    return [line[least:] for line in lines]


def _fenced(language: str, lines: list[str]) -> str:
    return "\n".join([f"````{language}", *lines, "````"])


class HouseDocstrings(griffe.Extension):
    """Hands the reference of the API (mkdocstrings) these docstrings as Markdown."""

    def on_object(self, *, obj: griffe.Object, **_: object) -> None:
        """Called by griffe for everything that it finds."""
        if obj.docstring is not None:
            obj.docstring.value = to_markdown(obj.docstring.value)
