"""What hosts have in common from the beginning to the end of a script."""

from __future__ import annotations

from collections.abc import Callable

from elasticdl.elastic.torch_kit.participant.host import Host
from elasticdl.elastic.torch_kit.participant.loop_state import LoopState
from elasticdl.elastic.torch_kit.participant.participant import Participant
from elasticdl.elastic.torch_kit.reduction.gradients import WeighedGradients
from elasticdl.elastic.torch_kit.torch_job import ElasticContext


class JoinedHost(Host):
    """A host that has its participant, once the front end has made that. It must have `remake`."""

    def __init__(self, job: ElasticContext, on_left: Callable[[], None]) -> None:
        """``on_left``: this worker leaves for good; see `ScriptRuntime.leave`."""
        self.job = job
        self._on_left = on_left
        self._joined: Participant | None = None

    @property
    def participant(self) -> Participant:
        assert self._joined is not None, "training has begun"
        return self._joined

    @property
    def is_catching_up(self) -> bool:
        """The trainer is on its way to where the job stands."""
        return self._joined is not None and self._joined.is_catching_up

    @property
    def is_first(self) -> bool:
        """Whether this worker writes files and prints: true on one, and never on one whose state is another's yet."""
        return self.job.known_rank == 0 and not self.is_catching_up

    def weighed(self, made_by: str, to_change: str) -> WeighedGradients:
        """Refuses gradients that are made otherwise than by ``made_by``. ``to_change``: where they may be changed."""
        return WeighedGradients(
            lambda: self.participant.state.parameters(), made_by, self.job.warn, may_be_summed=True, to_change=to_change
        )

    def finish(self) -> LoopState | None:
        """Return when the scripts of all workers are done; the state that they end with, if there is one."""
        participant = self._joined
        if participant is None:
            return None
        if participant.is_catching_up:
            participant.arrive()
        return participant.state if participant.end() else None

    def left(self) -> None:
        self._on_left()
