"""Pages of the repository as the site has them: their names, where their links lead, and what another Markdown asks for.

They are written for a Git host, and link to each other by their paths in the repository.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
AT_THE_ROOT = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "vulnerabilities.md",
}
IN_THE_REPOSITORY = {page: path for path, page in AT_THE_ROOT.items()}
LINK = re.compile(r"\[([^\]]*)\]\((?!\w+:|#|/)([^)\s#]+)")
TITLE = re.compile(r"^# (.*)$", re.MULTILINE)
FENCE = re.compile(r"^(```|~~~)")
# What a browser fetches by itself; links are followed by people.
FETCHED = re.compile(
    r"""<(?:script|img|iframe|source|link)\b[^>]*\b(?:src|href)=["']?((?:https?:)?//[^"' >]+)|(?:url\(|@import )["']?((?:https?:)?//[^"')]+)"""
)
BLOCK = re.compile(r"^([-*] |\d+\. |\|)")
CODE = re.compile(r"<code>[^<]*</code>")
IN_A_DOCSTRING = re.compile(r"docs/(\w+)\.md(?![^<]*</(?:code|pre|a)>)")
OPTION = re.compile(r"(?<![\w-])--[\w-]+")


def pictures_outside() -> list[str]:
    """That pages of docs/ show and that lie elsewhere, by their paths in the repository."""
    targets = {target for path in (ROOT / "docs").glob("*.md") for _, target in LINK.findall(path.read_text())}
    found = {posixpath.normpath(posixpath.join("docs", target)) for target in targets if target.endswith(".png")}
    return sorted(each for each in found if not each.startswith("docs/"))


def with_links_of_the_site(markdown: str, page: str) -> str:
    """``page``: its path in the site."""
    if page.startswith("reference/"):
        return markdown
    path = IN_THE_REPOSITORY.get(page, f"docs/{page}")

    def led(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(path), link[2]))
        there = AT_THE_ROOT.get(target, target.removeprefix("docs/"))
        text = title_of(target) if link[1].endswith(".md") else link[1]
        return f"[{text}]({posixpath.relpath(there, posixpath.dirname(page) or '.')}"

    return LINK.sub(led, markdown)


def title_of(path: str) -> str:
    """Of a page of the repository: what stands in a link instead of the name of its file."""
    page = ROOT / path
    found = TITLE.search(page.read_text()) if page.is_file() else None
    return found[1] if found else path


def with_blank_lines(markdown: str) -> str:
    """A list or a table may follow a line of text on a Git host; Python's Markdown takes it for more text, without a line between."""
    lines: list[str] = []
    fenced = in_block = in_text = False
    for line in markdown.splitlines():
        if FENCE.match(line):
            fenced = not fenced
            in_block = in_text = False
        elif not fenced:
            begins = bool(BLOCK.match(line))
            if begins and in_text:
                lines.append("")
            in_block = begins or (in_block and line != "")
            in_text = not in_block and line != "" and not line.startswith(("#", " "))
        lines.append(line)
    return "\n".join(lines)


def with_links_of_docstrings(html: str, page: str) -> str:
    """A docstring names a page by its path in the repository. ``page``: where in the site the docstring is shown."""

    def led(found: re.Match[str]) -> str:
        there = posixpath.relpath(f"{found[1]}.html", posixpath.dirname(page))
        return f'<a href="{there}">{title_of(found[0])}</a>'

    return IN_A_DOCSTRING.sub(led, html)


def with_whole_options(html: str) -> str:
    """A browser breaks lines after hyphens, so a narrow one would show an option in two parts. site.css has the class."""
    return CODE.sub(lambda code: OPTION.sub(r'<span class="option">\g<0></span>', code[0]), html)


def fetched_from_elsewhere(text: str) -> list[str]:
    """Addresses that a page or a style sheet would have a browser fetch: the site is for people without a network, too."""
    return [page or style for page, style in FETCHED.findall(text)]
