"""What ``elasticdl --version`` says: the version, the interpreter, and which collectives and frameworks are installed.

Only the metadata of the packages are read: importing the frameworks would take seconds.
"""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Iterator

import elasticdl
from elasticdl.common.front_ends import FRONT_ENDS

# Each by the names under which it is published.
_COLLECTIVES = {"Horovod": ("horovod",), "torch.distributed": ("torch",)}


def version_text() -> str:
    """Two lines, as for a report of a fault."""
    collectives = [f"{name} {found[1]}" for name, names in _COLLECTIVES.items() for found in _installed(names)]
    libraries = [names for each in FRONT_ENDS for names in each.packages]
    frameworks = [f"{name} {version}" for names in libraries for name, version in _installed(names)]
    return (
        f"elasticdl {elasticdl.__version__}, Python {platform.python_version()}\n"
        f"collectives: {', '.join(collectives) or 'none'}; frameworks: {', '.join(frameworks) or 'none'}"
    )


def _installed(names: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Name and version of the first of the packages that is there."""
    for name in names:
        try:
            yield name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        return
