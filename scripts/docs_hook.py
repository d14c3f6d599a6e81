"""A hook of mkdocs: docstrings name things as Sphinx does, :func:`name`, and the site shows `name`."""

import re
from typing import Any


def on_page_content(html: str, **_: Any) -> str:
    """The page's HTML without the roles."""
    return re.sub(r":(?:attr|class|data|exc|func|meth|mod):(<code>)~?", r"\1", html)
