"""The front ends of `elasticdl.elastic` that scripts import, each once: for what must know all of them, and imports none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

TRITON = "elasticdl.common.triton_first:import_triton"
TORCH = ("torch", "torch._dynamo")  # PyTorch's first optimizer would import its compiler


@dataclass(frozen=True, slots=True)
class FrontEnd:
    """One that scripts import.

    ``name``: of its package. ``use``: by which a script trains, for messages. ``packages``: its libraries, each by the names under which it is
    published. ``libraries``: for each name that a script may import, what its workers are forked with. ``first``: what they import before the
    front end itself.
    """

    name: str
    use: str
    packages: tuple[tuple[str, ...], ...]
    libraries: Mapping[str, tuple[str, ...]]
    first: tuple[str, ...] = TORCH

    @property
    def module(self) -> str:
        return f"elasticdl.elastic.{self.name}"


FRONT_ENDS = (
    FrontEnd("torch", "torch.prepare() for a plain loop", (("torch",),), {"torch": TORCH}),
    FrontEnd(
        "keras",
        "keras.models.Model for Keras's fit",
        (("tensorflow", "tensorflow-cpu", "tensorflow-rocm"), ("keras",)),
        {"tensorflow": (TRITON, "tensorflow"), "keras": (TRITON, "keras")},
        first=(),
    ),
    FrontEnd(
        "lightning",
        'Trainer(strategy="elastic") of Lightning',
        (("lightning", "pytorch-lightning"),),
        {"lightning": (*TORCH, "lightning.pytorch"), "pytorch_lightning": (*TORCH, "pytorch_lightning")},
    ),
    FrontEnd("transformers", "transformers.Trainer", (("transformers",),), {"transformers": ("transformers",)}),
)
