"""Extras of this package: packages that are installed only for those who ask for them."""

from __future__ import annotations


def how_to_install(extra: str) -> str:
    """For messages. An index of packages is not named: what PyPI has under the name elasticdl is another project's."""
    return f"pip install '.[{extra}]' in a checkout of elasticdl, or its wheel with [{extra}] (docs/install.md)"
