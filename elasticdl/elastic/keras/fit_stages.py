"""Several calls of ``fit`` in one script: each is a stage, and all members of a world train in the same one.

A newcomer runs the script from its top, so it comes to the first ``fit`` while the others may be in a later one. In the
first world that it enters it is handed what each stage made that the others have ended: the model's weights and what the
callbacks kept. Then all leave that world, and the newcomer runs on to the present stage on its own: each ``fit`` that
is over returns at once and leaves behind what it left behind on the others, so whatever the script does in between comes
out as it did there. The others wait for it in the next world, not longer than for any worker that makes no progress.

A member that was lost in the very end of a stage, after others had passed it, ends that stage by itself.
"""

from __future__ import annotations

import functools
import io
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any

import numpy as np

from elasticdl.common.errors import JobFailedError, UserError
from elasticdl.elastic.collectives.port import Collective
from elasticdl.elastic.core.errors import StageSuperseded, WorldChanged
from elasticdl.elastic.core.progress import Progress
from elasticdl.elastic.core.step_times import Activity
from elasticdl.elastic.core.world import ALONE
from elasticdl.elastic.keras import callback_state
from elasticdl.elastic.keras.callbacks import KerasCallbacks
from elasticdl.elastic.training import plain_data
from elasticdl.tensorflow import keras

KEEP_ALIVE_SECONDS = 1.0


Advance = Callable[..., None]  # as `elasticdl.elastic.training.job.JobContext.advance`


class Stages:
    """The calls of ``fit``, as one process has seen them. Stages are counted from 1."""

    def __init__(self) -> None:
        self._records: list[
            IO[bytes]
        ] = []  # of the stages that are over, as far as is known here: files without a name
        self._passed = 0  # stages that this process has left
        self._keep_alive: KeepAlive | None = None
        self.progress = Progress()  # steps and samples of all stages so far
        self.has_state = False  # this process trained to the end of the last stage

    @property
    def present(self) -> int:
        """The stage that this process is in, or comes to next."""
        return self._passed + 1

    @property
    def overtaken(self) -> bool:
        """The others have ended that stage already."""
        return len(self._records) > self._passed

    def begin(self) -> None:
        """This process is about to train in the present stage."""
        if self._keep_alive is not None:
            self._keep_alive.stop()
            self._keep_alive = None

    def end(
        self,
        model: keras.Model,
        callbacks: KerasCallbacks,
        data: Sequence[Mapping[str, Any]],
        progress: Progress,
        advance: Advance | None,
    ) -> None:
        """This process has trained to the end of the present stage. Without ``advance`` there are no others.

        ``data``: where its data sets are.
        """
        if advance is not None:
            kept = callbacks.pack()["callbacks"]
            left_behind = {"weights": model.get_weights(), "callbacks": kept, "data": list(data)}
            self._keep(self._passed, lambda file: plain_data.write(left_behind, file))
            self._keep_alive = KeepAlive(advance)
        else:
            self._records.append(io.BytesIO())
        self._passed += 1
        self.progress, self.has_state = progress, True

    def repeat(self, model: keras.Model, callbacks: Sequence[keras.callbacks.Callback]) -> list[Any]:
        """Leave behind what the present stage, which is over, left behind on the others; returns where data sets are then."""
        record = plain_data.loads(self._read(self._passed))
        model.set_weights(record["weights"])
        for number, kept in record["callbacks"].items():
            callback_state.put(callbacks[int(number)], kept)
        for callback in callbacks:
            callback.set_model(model)
        self._passed += 1
        self.has_state = False
        data: list[Any] = record["data"]
        return data

    def meet(self, collective: Collective) -> None:
        """See that all members of the world are in the same stage, before anything else is done in it.

        Raises:
            StageSuperseded: the others have ended this stage.
            WorldChanged: another member has to catch up; join the next world.
            WorldBroken: a member was lost meanwhile.
            JobFailedError: nobody is left who holds the state.
        """
        world = collective.world
        if world == ALONE:
            return
        if self.present > 1 and world.is_first:
            raise JobFailedError(
                f"all workers that had begun fit() number {self.present} were lost; start the job anew"
            )
        if world.size == 1:
            return
        mine = np.zeros(world.size)
        mine[world.rank] = self.present
        stages = np.asarray(collective.sum(mine, "elasticdl.stages"))
        newest = int(stages.max())
        if stages.min() == newest:
            return
        if stages[0] == newest:
            self._hand_over(collective, int(stages.min()) - 1)
        if self.overtaken or (self.present < newest and world.members[world.rank].has_state):
            raise StageSuperseded(f"the others are at fit() number {newest} already")
        raise WorldChanged(f"a worker has to catch up to fit() number {newest}")

    def _hand_over(self, collective: Collective, first: int) -> None:
        """One after the other, as there may be many, and each has the weights."""
        count = np.array([len(self._records) if collective.world.rank == 0 else 0], np.float32)
        for number in range(first, int(np.asarray(collective.sum(count, "elasticdl.stages"))[0])):
            mine = self._read(number) if collective.world.rank == 0 else b""
            received = collective.broadcast_bytes(mine, "elasticdl.records")
            if number >= len(self._records):
                self._keep(number, functools.partial(_put, received))

    def _keep(self, number: int, write: Callable[[IO[bytes]], object]) -> None:
        """On disk, for as long as this process lives: a newcomer may want it at any time.

        Raises:
            UserError: there is no room.
        """
        for record in self._records[number:]:
            record.close()
        file = tempfile.TemporaryFile()  # noqa: SIM115 - it is closed with the process
        try:
            write(file)
            file.flush()
        except OSError as error:
            file.close()
            raise UserError(
                f"what fit() number {number + 1} ended with could not be kept in {tempfile.gettempdir()}: {error.strerror}"
            ) from error
        self._records[number:] = [file]

    def _read(self, number: int) -> bytes:
        self._records[number].seek(0)
        return self._records[number].read()


def _put(record: bytes, file: IO[bytes]) -> None:
    file.write(record)


class KeepAlive:
    """Says that a process which is between two stages gets on, whatever it does there: nobody waits for its steps."""

    def __init__(self, advance: Advance) -> None:
        self._advance = advance
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="elasticdl-between-fits", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(KEEP_ALIVE_SECONDS):
            self._advance(Activity.ALIVE)
