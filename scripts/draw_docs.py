"""Make the pictures of the pages on explaining: run their code in docs/pictures.

python scripts/draw_docs.py             a minute of training
"""

import os
import re
from pathlib import Path

from PIL import Image

DOCS = Path(__file__).parents[1] / "docs"
PAGES = ("what-did-my-model-learn.md", "reading-a-coupling-map.md")


def draw(page: Path, folder: Path) -> list[Path]:
    """Run a page's code blocks in a folder, and bring the pictures that it shows to a few colours; their paths."""
    os.chdir(folder)
    text = page.read_text("utf-8")
    names: dict[str, object] = {"__name__": page.stem}
    for block in re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        exec(compile(block, str(page), "exec"), names)
    drawn = [folder / name for name in re.findall(r'savefig\("([^"]+)"\)', text)]
    for path in drawn:
        Image.open(path).convert("RGB").convert("P", palette=Image.Palette.ADAPTIVE, colors=128).save(
            path, optimize=True
        )
    return drawn


if __name__ == "__main__":
    for name in PAGES:
        for path in draw(DOCS / name, DOCS / "pictures"):
            print(f"{path.relative_to(DOCS.parent)}: {path.stat().st_size / 1000:.0f} kB")
