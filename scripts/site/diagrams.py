"""Mermaid's diagrams in the pages of the site, drawn at build: who reads them needs no network, and no JavaScript for them."""

from __future__ import annotations

import itertools
from typing import Any

import mmdr
from pymdownx.superfences import SuperFencesException

_numbers = itertools.count(1)


def drawn(source: str, language: str, css_class: str, options: Any, md: Any, **_: Any) -> str:
    """What the Markdown extension superfences puts in the place of a fence.

    Raises:
        SuperFencesException: it is no diagram; any other exception would have the fence shown as it stands.
    """
    try:
        svg = mmdr.render(source).svg()
    except Exception as error:
        raise SuperFencesException(f"this can't be drawn: {error}\n{source}") from error
    # A page may have several, whose styles and arrows go by the name of the drawing.
    return f'<div class="{css_class}">{svg.replace("merman", f"diagram-{next(_numbers)}")}</div>'
