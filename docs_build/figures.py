"""Figures on pages, read from the records when the site is built: nobody copies a number by hand.

In a page stands a comment, which readers of the bare file do not see:

    <!-- speed fc -->               the rows of workload fc in docs/measurements/layers.json
    <!-- results Su's test -->      the table below that heading of docs/results.md, or below one that begins so
"""

import json
import re
from pathlib import Path

__all__ = ["with_figures"]

DOCS = Path(__file__).parents[1] / "docs"

FORMS = {
    "tutorial": "einsum, as tutorials write it",
    "reference": "the equations on all votes (`reference`)",
    "batched": "a careful product form on all votes",
    "compiled": "`torch.compile` of the reference",
    "streamed": "a tile of children at a time (`streamed`)",
    "native": "compiled kernels (`native`)",
    "uniform": "routing off: one uniform round",
}


def with_figures(page: str) -> str:
    """The page with a table in the place of each comment. ValueError for one that asks for what is not there."""
    return re.sub(r"^<!-- (speed|results) (.+?) -->$", _table, page, flags=re.MULTILINE)


def _table(match: re.Match[str]) -> str:
    kind, name = match.groups()
    return _speed(name) if kind == "speed" else _results(name)


def _speed(workload: str) -> str:
    record = json.loads((DOCS / "measurements" / "layers.json").read_text("utf-8"))
    rows = {row["form"]: row for row in record["rows"] if row["workload"] == workload}
    if not rows:
        raise ValueError(f"docs/measurements/layers.json holds no workload {workload!r}")
    slowest = rows["tutorial"]["both"]
    lines = [
        "| how | forward, ms | forward + backward, ms | times faster | memory, MB |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for form, words in FORMS.items():
        if form in rows:
            row = rows[form]
            lines.append(
                f"| {words} | {1e3 * row['forward']:.1f} | {1e3 * row['both']:.1f} | {slowest / row['both']:.1f} "
                f"| {row['memory_both'] / 1e6:.0f} |"
            )
    lines += ["", f"float32, torch {record['torch']}, threads: {record['threads']}, {record['machine']}."]
    return "\n".join(lines)


def _results(heading: str) -> str:
    text = (DOCS / "results.md").read_text("utf-8")
    sections = re.split(r"^(?=#+ )", text, flags=re.MULTILINE)
    section = next((part for part in sections if part.lstrip("# ").startswith(heading)), "")
    found = re.search(r"(?:^\|.*\n)+", section, re.MULTILINE)
    if found is None:
        raise ValueError(f"docs/results.md has no table below a heading that begins with {heading!r}")
    return found[0].rstrip("\n")
