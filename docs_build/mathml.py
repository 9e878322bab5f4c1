"""TeX to MathML while the site is built, so that a browser shows equations with no script and no network."""

import html
import re

from latex2mathml.converter import convert

__all__ = ["with_mathml"]

_TEX = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)


def with_mathml(page: str) -> str:
    r"""The page with MathML where pymdownx.arithmatex, being generic, has left `\(TeX\)` and `\[TeX\]`."""
    return _TEX.sub(_mathml, page)


def _mathml(match: re.Match[str]) -> str:
    box, tex = match.groups()
    # what TeX calls aligned inside of mathematics, the converter knows by its other name alone
    known = html.unescape(tex).strip().replace("{aligned}", "{align*}")
    try:
        mathml = convert(known, display="block" if box == "div" else "inline")
    except Exception as error:  # the converter's own, of many kinds: say which equation it was
        raise ValueError(f"this TeX cannot be turned into MathML: {tex}") from error
    if "\\" in mathml:  # a command that the converter does not know, left as it is
        raise ValueError(f"this TeX cannot be turned into MathML: {tex}")
    return f'<{box} class="math">{mathml}</{box}>'
