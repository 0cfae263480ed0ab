"""What a job needs of the training state that it brings from world to world."""

from __future__ import annotations

from collections.abc import Mapping
from typing import IO, Any, Protocol

from elasticdl.elastic.core.progress import Progress
from elasticdl.elastic.core.vote import Vote
from elasticdl.elastic.core.world import World


class Carried(Protocol):
    """See `elasticdl.elastic.training.state.TrainingState`."""

    begins_as_told: bool
    resumed: tuple[str, Mapping[str, Any]] | None
    cannot_be_kept: str

    @property
    def has_state(self) -> bool: ...

    @property
    def progress(self) -> Progress: ...

    @property
    def step(self) -> int: ...

    @property
    def origin(self) -> Mapping[str, Any]: ...

    def bind_state(self) -> None: ...

    def require_jobs_facts(self) -> None: ...

    def sync(self, world: World) -> None: ...

    def cast_end_vote(self) -> Vote: ...

    def write(self, file: IO[bytes], **more: Any) -> None: ...

    def unpack(self, file: IO[bytes]) -> Any: ...

    def read(self, file: IO[bytes]) -> None: ...

    def load(self, unpacked: dict[str, Any]) -> None: ...

    def misfit(self, saved: dict[str, Any]) -> str: ...
