"""What a framework imports only when it is first used: better before the others wait for this worker than while they do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def warm_up(modules: Mapping[str, Any]) -> None:
    """``modules``: those imported so far. A script makes its optimizer after its ``hvd.init()``, and PyTorch's first one
    imports a compiler, which takes seconds."""
    if "horovod.torch" in modules:
        torch = modules["torch"]
        torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
