"""The front ends, each by its bench: what it needs to run one script, a model of two layers for five steps an epoch.

`test_front_ends.py` has the promises that all of them keep. A bench is a class, of which each worker has an object:

- ``Bench(script)`` makes model and optimizer, always the same ones.
- ``alone()`` trains as the library does by itself, on one device, without elasticdl.
- ``train(job)`` trains on one worker of a `Job`, in the thread of that worker, to the end of the script.
- ``trained()`` is what came of it, asked for when the script has ended.
- ``runtimes``: dotted names, in front ends that take what knows their process's job from a module. There the job is put.
- ``refusals``: what it refuses, a sequence of `Refusal`; to be left out if there is none.
- ``hears_of_all``: hooks are called behind a step, too, whose state was taken from others; to be left out if they are not.
- ``Job``: the kind of `job_kit.Job`, to be left out if it is PyTorch's.

What a front end does not promise is said in `FRONT_ENDS`, with the reason: ``lacks``, by the name of the promise.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

STEPS, BATCH, FEATURES, CLASSES = 5, 8, 8, 3
SAMPLES = STEPS * BATCH


@dataclass(frozen=True)
class Script:
    """What the script of a bench does. The model counts its forward passes in an attribute ``calls``, and its output depends on them.

    ``shuffle``: its loader does. ``dropout``: of the model. ``draws``: a random number of its own after each step, or after each epoch where a step's numbers are not the script's.
    ``notes``: the losses; else it does nothing but train.
    """

    epochs: int = 2
    shuffle: bool = False
    dropout: float = 0.0
    draws: bool = False
    notes: bool = True


@dataclass
class Trained:
    """``weights``: of the model, and what its optimizer remembers. ``losses``: of the steps that were made here, means over the global batch.
    ``calls``: what the model has counted. ``drawn``: by the script."""

    weights: list[np.ndarray]
    losses: list[float]
    calls: int
    drawn: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Refusal:
    """What a script does that can't be had. ``words``: a pattern of the error, which is one line.

    ``train(job)``: the script, on each worker. ``make()``: what it needs, in the main thread, before; it returns ``train``. ``workers``: on how many it is refused.
    """

    what: str
    make: Callable[[], Callable[[Any], object]]
    words: str
    workers: tuple[int, ...] = (1, 2)


@dataclass(frozen=True)
class FrontEnd:
    """``bench``: module and class. ``lacks``: promises that it does not give, and why."""

    bench: str
    lacks: dict[str, str] = field(default_factory=dict)

    def load(self):
        """The class. No front end's library is imported before."""
        module, name = self.bench.split(".")
        return getattr(importlib.import_module(module), name)


ORDER = "the order of samples is elasticdl's"
FRONT_ENDS = {
    "library loop": FrontEnd("loop_benches.LibraryLoop", {}),
    "plain loop": FrontEnd("loop_benches.PlainLoop"),
    "small front end": FrontEnd("loop_benches.SmallFrontEnd"),
    "Lightning": FrontEnd("trainer_benches.Lightning"),
    "Lightning by hand": FrontEnd("trainer_benches.LightningByHand"),
    "Hugging Face": FrontEnd("trainer_benches.HuggingFace"),
    "Keras loop": FrontEnd("keras_benches.KerasLoop"),
    "Keras fit": FrontEnd("keras_benches.KerasFit", {"alone to the bit": ORDER}),
    "several calls of fit": FrontEnd(
        "keras_benches.FitsByEpoch",
        {
            "alone to the bit": ORDER,
            "a newcomer at any batch": "it hears from the others which calls are over",
            "kept state": "a script that begins anew does not come to its second call by itself",
            "refused alone": "as of one call",
        },
    ),
    "Horovod's elastic mode": FrontEnd(
        "horovod_benches.HorovodScript",
        {
            "a newcomer at any batch": "its order and its random numbers are the script's, as in Horovod",
            "torn draws": "random numbers are the script's, as in Horovod",
            "kept state": "a script writes its own checkpoints",
            "refused alone": "nothing that a script of PyTorch's does",
        },
    ),
}


def samples():
    """Inputs and labels."""
    draw = np.random.default_rng(1)
    inputs = draw.normal(size=(SAMPLES, FEATURES)).astype(np.float32)
    return inputs, inputs[:, :CLASSES].argmax(1)
