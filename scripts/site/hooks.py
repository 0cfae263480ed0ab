"""What MkDocs asks for while it builds the site: pages that are not in docs/, and each page's text.

Generated pages (`reference`, `library`) are made at each build, and are in no commit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

from scripts.site import library, pages, reference

HEADS = {"index.md": "---\nhide: [navigation]\n---\n"}


def on_files(files: Files, config: Any) -> Files:
    """Adds what is not in docs/."""
    for path, page in pages.AT_THE_ROOT.items():
        files.append(File.generated(config, page, content=HEADS.get(page, "") + (pages.ROOT / path).read_text()))
    for page, text in {**reference.pages(), **library.pages()}.items():
        files.append(File.generated(config, page, content=text))
    for picture in pages.pictures_outside():
        files.append(File.generated(config, picture, abs_src_path=str(pages.ROOT / picture)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    return pages.with_blank_lines(pages.with_links_of_the_site(markdown, page.file.src_uri))


def on_page_content(html: str, page: Any, config: Any, files: Files) -> str:
    if page.file.src_uri.startswith("reference/python/"):
        html = pages.with_links_of_docstrings(html, page.file.src_uri)
    return pages.with_whole_options(html)


def on_post_build(config: Any) -> None:
    """
    Raises:
        PluginError: a browser that shows the site would ask another host.
    """
    for path in sorted(Path(config.site_dir).rglob("*")):
        if path.suffix in (".html", ".css") and (found := pages.fetched_from_elsewhere(path.read_text())):
            raise PluginError(f"{path}: is fetched from elsewhere: {', '.join(found)}; the site has to have it itself")
