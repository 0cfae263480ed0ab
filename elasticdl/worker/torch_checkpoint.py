"""How the state of a PyTorch training is written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import IO, Any

import torch


class TorchCodec:
    """In torch's own format, read without unpickling any code; see `elasticdl.worker.resume.Codec`."""

    suffix = ".pt"

    def copy(self, value: Any) -> Any:
        """Dicts, lists and tuples become plain ones."""
        if isinstance(value, torch.Tensor):
            return value.detach().to("cpu", copy=True)
        if isinstance(value, Mapping):
            return {key: self.copy(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(self.copy(item) for item in value)
        return value

    def write(self, content: dict[str, Any], file: IO[bytes]) -> None:
        torch.save(content, file)

    def read(self, file: IO[bytes]) -> Any:
        return torch.load(file, map_location="cpu", weights_only=True)

    def is_other_optimizer(self, there: Any, here: Any) -> bool:
        groups = zip(there["param_groups"], here["param_groups"], strict=False)
        # Both have options that the other lacks; a newer version of the same optimizer only has more of them.
        return any(was.keys() - now.keys() and now.keys() - was.keys() for was, now in groups)
