"""What mkdocs calls while it builds the site: annotated pages and figures are added, and equations become MathML."""

from annotated import PAGES, SOURCES
from annotated import page as annotated_page
from figures import with_figures
from mathml import with_mathml
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

__all__ = ["on_files", "on_page_content", "on_page_markdown"]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add annotated/NAME.md for each file of `PAGES`."""
    for name, path in PAGES.items():
        content = annotated_page((SOURCES / path).read_text("utf-8"), path)
        files.append(File.generated(config, f"annotated/{name}.md", content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Figures of a page from the records."""
    return with_figures(markdown)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Equations of a page as MathML."""
    return with_mathml(html)
