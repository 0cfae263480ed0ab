"""What the first worker alone does: it writes files and tells the job of evaluations and checkpoints. And which checkpoint a trainer resumes from.

And what its callbacks keep.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from typing import Any

from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from elasticdl.elastic.core.reporting import Activity
from elasticdl.elastic.torch_kit.tensors import ElasticContext
from elasticdl.elastic.torch_kit.torch_pieces import holders_of_callbacks
from elasticdl.elastic.training.attributes import Holder

WAIT_SECONDS, POLL_SECONDS = 600.0, 0.05  # of a worker for the checkpoint that another writes
LAST_FILE = "trainer_state.json"  # the file of a checkpoint that is written last
# How names of a trainer's metrics end that say how fast it evaluates, and when.
OF_SPEED = ("_runtime", "_per_second", "epoch")


def follow_rank(args: Any, is_first: Callable[[], bool]) -> None:
    """Have these ``TrainingArguments`` say that files are written where ``is_first`` holds at that time."""
    plain = type(args)

    class ElasticArguments(plain):  # type: ignore[misc, valid-type]
        @property
        def should_save(self) -> bool:
            return is_first()

        @property
        def should_log(self) -> bool:
            return is_first()

        def __reduce_ex__(self, protocol: Any) -> Any:
            """Saved with a model, they are what the script has made."""
            return object.__new__, (plain,), dict(vars(self))

    ElasticArguments.__name__, ElasticArguments.__qualname__ = plain.__name__, plain.__qualname__
    args.__class__ = ElasticArguments


# What the job is told of evaluations and checkpoints, so that their time does not count as training.


def tell_evaluation(job: ElasticContext, trainer: Any, metrics: Any, seconds: float) -> None:
    numbers = {name: each for name, each in dict(metrics or {}).items() if type(each) in (int, float)}
    quality = {name: each for name, each in numbers.items() if not name.endswith(OF_SPEED)}
    about = {"step": trainer.state.global_step, "epoch": int(trainer.state.epoch or 0)}
    job.tell_work("evaluation", **about, metrics=quality, seconds=seconds)


def tell_checkpoint(job: ElasticContext, trainer: Any, folder: str, seconds: float) -> None:
    job.tell_work("checkpoint", step=trainer.state.global_step, path=folder, seconds=seconds, held=seconds)


# -- checkpoints --


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


class FirstsCheckpoint:
    """A checkpoint that the first worker writes. If that one is lost meanwhile, the next first does it, in the world that follows."""

    def __init__(self, job: ElasticContext, is_first: Callable[[], bool], rejoin: Callable[[str], None]) -> None:
        """``rejoin``: be in the next world, as the present one broke for this reason."""
        self._job = job
        self._is_first = is_first
        self._rejoin = rejoin
        self._unwritten: tuple[str, Callable[[], None]] | None = None  # its last file, and what writes it

    def leave(self, folder: str, write: Callable[[], None]) -> None:
        """Another worker writes this one, by ``write``."""
        self._unwritten = (folder, write)

    def wait(self, folder: str) -> None:
        """Until it is there, or has not come for long."""
        deadline = time.monotonic() + WAIT_SECONDS
        while not is_whole(folder) and time.monotonic() < deadline:
            self._job.advance(Activity.WAIT)
            if self._job.world_is_broken:
                self._rejoin("the world broke before the best checkpoint was there")
            if self._is_first():
                self.write()
            time.sleep(POLL_SECONDS)
        self._job.advance(Activity.ALIVE)

    def write(self) -> None:
        """Parameters are still those of the last step. Who was the first worker has written it, unless this one is now."""
        if self._unwritten is None:
            return
        (folder, write), self._unwritten = self._unwritten, None
        if self._is_first() and not is_whole(folder):
            write()


# What a trainer of Hugging Face and its callbacks hold.

PACKAGES = ("transformers", "accelerate", "elasticdl")


def holders_of(trainer: Any) -> Iterator[Holder]:
    """The script's own callbacks that are no ``ExportableState``."""
    callbacks = [each for each in trainer.callback_handler.callbacks if not isinstance(each, ExportableState)]
    yield from holders_of_callbacks(callbacks, PACKAGES, "make the callback an ExportableState")
