"""Hooks of mkdocs: notebooks become pages, and what docstrings name as Sphinx does, :func:`name`, shows as `name`."""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from nbconvert import MarkdownExporter

NOTEBOOKS = Path(__file__).resolve().parent.parent / "notebooks"


def on_files(files: Files, config: Any, **_: Any) -> Files:
    """With a page for each notebook, and the notebook itself."""
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        text, _resources = MarkdownExporter().from_filename(str(path))
        title, _line, rest = text.partition("\n")
        text = f"{title}\n\n[This page as a notebook]({path.name}), for Jupyter and Colab.\n{rest}"
        files.append(File.generated(config, f"notebooks/{path.stem}.md", content=text))
        files.append(File.generated(config, f"notebooks/{path.name}", abs_src_path=str(path)))
    return files


def on_page_content(html: str, **_: Any) -> str:
    """The page's HTML without the roles."""
    return re.sub(r":(?:attr|class|data|exc|func|meth|mod):(<code>)~?", r"\1", html)
