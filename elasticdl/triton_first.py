"""triton before TensorFlow: the one order in which a process can hold PyTorch's CUDA build and TensorFlow.

TensorFlow since 2.20 shows the symbols of its library to all that is loaded after it (RTLD_GLOBAL). triton since 3.7, the
compiler that comes with PyTorch's CUDA build, then takes TensorFlow's LLVM for its own: `import tensorflow; import triton`
ends the interpreter by SIGSEGV, with triton 3.9 by SIGABRT (tensorflow#124205); `import triton; import tensorflow` works.
PyTorch imports triton by itself: at the first optimizer, at `torch.compile`, and when Lightning or transformers' Trainer are imported.

So whoever imports TensorFlow in this package does it by `elasticdl.tensorflow`, and whoever runs a user's module that may
import both calls `import_triton` before.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import re
import sys

from elasticdl.common.errors import UserError
from elasticdl.common.reason import tell_uncaught_in_one_line

# The first of each that clash.
CLASHING = {"tensorflow": (2, 20), "triton": (3, 7)}


def import_triton() -> None:
    """Before TensorFlow is imported; does nothing where one of the two is missing, or TensorFlow came before."""
    if "tensorflow" in sys.modules or importlib.util.find_spec("tensorflow") is None:
        return
    with contextlib.suppress(ImportError):  # no triton, or one that is broken: PyTorch goes without it, too
        importlib.import_module("triton")


def require_triton_first(importing: str) -> None:
    """To be called by the module ``importing`` before it imports PyTorch. Afterwards TensorFlow may be imported.

    Raises:
        UserError: TensorFlow was imported before triton.
    """
    if "triton" not in sys.modules:
        refuse_triton(importing)
        import_triton()  # PyTorch itself does so much later, when the script may have imported TensorFlow


def refuse_triton(importing: str = "triton") -> None:
    """To be called before triton is imported; an error that is not caught ends the script with one line.

    Raises:
        UserError: triton would crash this process.
    """
    if "tensorflow" not in sys.modules or not _clash():
        return
    tell_uncaught_in_one_line()
    raise UserError(
        f"import {importing}: TensorFlow is imported already, and PyTorch's compiler, triton, which would be imported now, crashes "
        f"a process in that order (tensorflow#124205): move `import {importing}` above `import tensorflow` or `import keras`"
    )


def why_it_crashed(dump: str) -> str:
    """Why a process ended by SIGSEGV or SIGABRT, if the order of imports was the cause; else empty.

    ``dump``: the stacks that `faulthandler` has written.
    """
    if "/triton/__init__.py" not in dump:
        return ""
    return "it imported triton after TensorFlow (tensorflow#124205): put `import triton` above `import tensorflow`"


def _clash() -> bool:
    """Whether the installed versions do."""
    return all(_version(package) >= first for package, first in CLASHING.items())


def _version(package: str) -> tuple[int, ...]:
    """Major and minor; empty if it is not installed. TensorFlow's wheels have several names, so its module is asked."""
    try:
        text = getattr(sys.modules.get(package), "__version__", "") or importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ()
    return tuple(int(number) for number in re.findall(r"\d+", text)[:2])
