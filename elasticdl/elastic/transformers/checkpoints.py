"""Which checkpoint a trainer resumes from, where another worker may be writing one at this moment."""

from __future__ import annotations

import os

from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

LAST_FILE = "trainer_state.json"  # the file of a checkpoint that is written last


def is_whole(folder: str) -> bool:
    return os.path.exists(os.path.join(folder, LAST_FILE))


def whole_checkpoint(folder: str) -> str | None:
    """The latest one in this folder that was written to its end."""
    found = []
    for name in os.listdir(folder) if os.path.isdir(folder) else ():
        prefix, _, step = name.rpartition("-")
        if prefix == PREFIX_CHECKPOINT_DIR and step.isdecimal() and is_whole(os.path.join(folder, name)):
            found.append((int(step), name))
    return os.path.join(folder, max(found)[1]) if found else None


def is_meant(given: str | bool | None) -> bool:
    """Whether ``train(resume_from_checkpoint=...)`` names one that is not the latest in its folder: the script means that one."""
    return isinstance(given, str) and os.path.isdir(given) and not _is_latest(given)


def _is_latest(given: str) -> bool:
    latest = whole_checkpoint(os.path.dirname(os.path.abspath(given)))
    return latest is not None and os.path.samefile(given, latest)


def to_resume_from(given: str | bool | None, folder: str, *, comes_later: bool) -> str | bool | None:
    """What to give ``train(resume_from_checkpoint=...)`` in place of ``given``.

    True is the latest whole checkpoint in ``folder``. ``comes_later``: the job has trained already. Then a script that looks for the
    latest one itself may have found one that is being written.
    """
    if given is True:
        return whole_checkpoint(folder) or given
    if isinstance(given, str) and comes_later and os.path.isdir(given) and not is_whole(given):
        return whole_checkpoint(os.path.dirname(os.path.abspath(given))) or given
    return given
