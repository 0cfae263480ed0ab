"""Documents that name the files of a walk, in the order in which they come in: traced by a test, which writes the list.

With ELASTICDL_WRITE_WALKS=1 the lists are written into the document; without it they must be those that are there.
"""

import ast
import os
import re
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
# The walk of a name is the list of the document that follows this comment.
MARK = "<!-- walk: {} -->"


def require_written(document, walk, paths):
    """That this list is the document's, whatever its order; ``paths``: below `elasticdl/`."""
    print(f"{walk}: {len(paths)} files\n", *paths, sep="\n")
    found = _listed(document, walk)
    if os.environ.get("ELASTICDL_WRITE_WALKS"):
        width = max(map(len, paths)) + 2
        lines = "".join(f"{path:{width}}{_said(path)}\n" for path in paths)
        text = document.read_text()
        document.write_text(text[: found.start(1)] + lines + text[found.end(1) :])
        found = _listed(document, walk)
    assert {line.split()[0] for line in found[1].splitlines()} == set(paths)


def _said(path):
    """The first sentence of a file's docstring."""
    text = ast.get_docstring(ast.parse((REPOSITORY / "elasticdl" / path).read_text())) or ""
    return re.split(r"(?<=\w)[.:](?:\s|$)", " ".join(text.split("\n\n")[0].split()), maxsplit=1)[0].rstrip(".")


def _listed(document, walk):
    """The list of a walk, and where it is."""
    text = document.read_text()
    found = re.search(re.escape(MARK.format(walk)) + r"\n```text\n(.*?)```", text, re.DOTALL)
    assert found, f"{document} has no {MARK.format(walk)}"
    return found
