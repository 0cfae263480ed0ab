"""What MkDocs asks for while it builds the site: pages that are not in docs/, and each page's text.

Generated pages (`reference`, `library`) are made at each build, and are in no commit.
"""

from __future__ import annotations

from typing import Any

from mkdocs.structure.files import File, Files

from scripts.site import library, pages, reference

HEADS = {
    "index.md": "---\nhide: [navigation]\n---\n",
    "changelog.md": "---\nsearch: {exclude: true}\n---\n",  # it has every word
}


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
