"""How the state of a Keras training is written."""

from __future__ import annotations

from typing import IO, Any

from elasticdl.elastic.keras import plain_data


class KerasCodec:
    """Arrays in the order of the variables; see `elasticdl.worker.resume.Codec`."""

    suffix = ".npz"

    def copy(self, value: Any) -> Any:
        return plain_data.copied(value)

    def write(self, content: dict[str, Any], file: IO[bytes]) -> None:
        plain_data.write(content, file)

    def read(self, file: IO[bytes]) -> Any:
        return plain_data.read(file)

    def is_other_optimizer(self, there: Any, here: Any) -> bool:
        return False  # the state itself compares the number and shapes of its variables
