"""What the elastic loop raises to change its course.

ElasticDLError
+-- WorldBroken    a collective failed: restore, join the next world, sync, go on
+-- WorldChanged   all members agreed to leave after this step: join the next world, sync, go on
+-- StageSuperseded      the others have ended this training already: leave it, and go on in the script
+-- Stopped        this worker is to leave for good: clean up and end the process
"""

from elasticdl.common.errors import ElasticDLError


class WorldBroken(ElasticDLError):
    """A collective of this world failed; parameters are as before or as after the step, never in between."""


class WorldChanged(ElasticDLError):
    """The vote of the last step says that everybody leaves this world now."""


class StageSuperseded(ElasticDLError):
    """This worker is in a training that the others have ended; there is a later one to take part in."""


class Stopped(ElasticDLError):
    """This worker was told to leave: the job stops, or it alone is drained and training goes on without it."""

    def __init__(self, reason: str, *, checkpoint: bool, drained: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.checkpoint = checkpoint
        self.drained = drained
