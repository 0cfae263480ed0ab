"""The page itself: as one file that needs nothing else, or in the pieces that a server hands out."""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
from importlib.resources import files
from typing import Any

from elasticdl.report.page_data import as_json

MARK = "<!-- elasticdl report -->"  # in the first lines of each report: so it is told from other files
# Of a page that is served. Plotly sets styles of elements, which takes 'unsafe-inline'.
LIVE_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; connect-src 'self'; "
    "img-src data: blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_PLOTLY = "plotly/plotly-basic.min.js.gz"  # the folder has its licence, too


def asset(name: str) -> str:
    """A file of this package."""
    return (files("elasticdl.report") / name).read_text(encoding="utf-8")


def plotly_script() -> str:
    """The library that draws: of Plotly the part that has bars and lines, which is a quarter of the whole."""
    return gzip.decompress((files("elasticdl.report") / _PLOTLY).read_bytes()).decode()


def report(data: dict[str, Any]) -> str:
    """One HTML file. Its policy lets nothing be loaded, and no script run but those that are in it now."""
    scripts = [plotly_script(), asset("charts.js"), asset("page.js")]
    hashes = " ".join(f"'sha256-{_digest(script)}'" for script in scripts)
    policy = f"default-src 'none'; img-src data: blob:; style-src 'unsafe-inline'; script-src {hashes}"
    head = f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n<style>{asset("page.css")}</style>'
    body = f'<script type="application/json" id="data">{as_json(data)}</script>\n'
    return _fill(data["job"], "job", head, body + "\n".join(f"<script>{script}</script>" for script in scripts))


def live_page(title: str, view: str, root: str) -> str:
    """A page that asks for its numbers. ``view``: job or overview; ``root``: the relative path to the assets."""
    head = f'<link rel="stylesheet" href="{root}page.css">'
    names = ("plotly.js", "charts.js", "page.js") if view == "job" else ("page.js",)
    return _fill(title, view, head, "\n".join(f'<script src="{root}{name}" defer></script>' for name in names))


def _fill(title: str, view: str, head: str, scripts: str) -> str:
    text = asset("template.html").replace("{{mark}}", MARK).replace("{{view}}", view)
    text = text.replace("{{main}}", asset(f"{view}.html")).replace("{{head}}", head)
    # Last, as what was put in is not looked at again. Half a pair of surrogates, which JSON may have, fits in no file.
    before, _, after = text.partition("{{scripts}}")
    called = html.escape(title or "job").encode(errors="replace").decode()
    return before.replace("{{title}}", called) + scripts + after


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
