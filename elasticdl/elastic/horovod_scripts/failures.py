"""Which errors of a script come from a broken world, by their cause and not by the class they happen to have.

Horovod's own elastic mode takes a TensorFlow ``UnknownError`` that names one of three of its operations for such a
failure, lets errors of other classes end the worker, and swallows any other ``UnknownError``: training then seems to
have finished.
"""

from __future__ import annotations

INTERNAL_ERROR = "HorovodInternalError"
_NOT_INITIALIZED = "Horovod has not been initialized"
# Horovod's operations fail in TensorFlow with one of its errors, which names the operation or says this.
_IN_TENSORFLOW = ("Horovod", "horovod")
_DEPTH = 8


def is_failed_collective(error: BaseException) -> bool:
    """Whether this error, or one that it was raised from, says that a collective failed."""
    cause: BaseException | None = error
    for _ in range(_DEPTH):
        if cause is None:
            return False
        if _says_so(cause):
            return True
        cause = cause.__cause__
    return False


def _says_so(error: BaseException) -> bool:
    classes = type(error).__mro__
    if any(c.__name__ == INTERNAL_ERROR and c.__module__.startswith("horovod.") for c in classes):
        return True
    if isinstance(error, ValueError) and _NOT_INITIALIZED in str(error):
        return True
    in_tensorflow = any(c.__name__ == "OpError" and c.__module__.startswith("tensorflow.") for c in classes)
    return in_tensorflow and any(name in str(error) for name in _IN_TENSORFLOW)
