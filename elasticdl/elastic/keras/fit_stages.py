"""Several calls of ``fit`` in one script: each is a stage, and all members of a world train in the same one.

A newcomer runs the script from its top, so it comes to the first ``fit`` while the others may be in a later one. In the
first world that it enters it is handed what each stage that the others have ended has left behind: the model's weights and what
the callbacks kept. Then all leave that world, and the newcomer runs on to the present stage on its own: each ``fit`` that
is over returns at once and leaves the same behind, so whatever the script does in between comes out as it did on the others.
The others wait for it in the next world, not longer than for any worker that makes no progress.

A member that was lost in the very end of a stage, after others had passed it, ends that stage by itself.
"""

from __future__ import annotations

import functools
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any

from elasticdl.common.errors import JobFailedError, UserError
from elasticdl.elastic.collectives.port import Collective
from elasticdl.elastic.core.plan import Progress
from elasticdl.elastic.core.protocol import ALONE, StageSuperseded, WorldChanged
from elasticdl.elastic.core.reporting import Activity
from elasticdl.elastic.keras.driver import KerasDriver
from elasticdl.elastic.training import plain_data
from elasticdl.elastic.training.attributes import put
from elasticdl.elastic.training.evaluation import from_root, of_all
from elasticdl.tensorflow import keras

KEEP_ALIVE_SECONDS = 1.0
MOST_KEPT_BYTES = 4 << 30  # on this worker's disk, of all stages; the newest is kept whatever it takes

Advance = Callable[..., None]  # as `elasticdl.elastic.training.job.JobContext.advance`


class Records:
    """What the stages that are over have left behind, as far as this process knows: files without a name.

    A newcomer may want them at any time, so each worker keeps them for as long as it lives; but a script may call ``fit`` a
    thousand times. Of the oldest stages the weights are dropped when all records together take too much.
    """

    def __init__(self, most_bytes: int = MOST_KEPT_BYTES) -> None:
        self._most_bytes = most_bytes
        self._files: list[IO[bytes]] = []
        self._thinned = 0  # stages, from the first on, of which the weights were dropped

    def __len__(self) -> int:
        return len(self._files)

    def put(self, number: int, write: Callable[[IO[bytes]], object]) -> None:
        """Of the stage ``number``, counted from 0, and of none after it. ``write`` fills the file.

        Raises:
            UserError: there is no room on the disk.
        """
        for file in self._files[number:]:
            file.close()
        self._files[number:] = [_written(number, write)]
        self._thinned = min(self._thinned, number)
        while sum(file.tell() for file in self._files) > self._most_bytes and self._thinned < number:
            self._drop_weights(self._thinned)
            self._thinned += 1

    def get(self, number: int) -> bytes:
        self._files[number].seek(0)
        return self._files[number].read()

    def _drop_weights(self, number: int) -> None:
        rest = {**plain_data.loads(self.get(number)), "weights": None}
        self._files[number].close()
        self._files[number] = _written(number, functools.partial(plain_data.write, rest))


def _written(number: int, write: Callable[[IO[bytes]], object]) -> IO[bytes]:
    file = tempfile.TemporaryFile()  # noqa: SIM115 - it is closed with the process
    try:
        write(file)
        file.flush()
    except OSError as error:
        file.close()
        raise UserError(
            f"what fit() number {number + 1} ended with could not be kept in {tempfile.gettempdir()}: {error.strerror}"
        ) from error
    return file


def _copy(received: bytes, file: IO[bytes]) -> None:
    file.write(received)


class Stages:
    """The calls of ``fit``, as one process has seen them. Stages are counted from 1."""

    def __init__(self, most_bytes: int = MOST_KEPT_BYTES) -> None:
        self._records = Records(most_bytes)
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
        driver: KerasDriver,
        data: Sequence[Mapping[str, Any]],
        progress: Progress,
        advance: Advance | None,
    ) -> None:
        """This process has trained to the end of the present stage. Without ``advance`` there are no others.

        ``data``: where its data sets are.
        """
        if advance is not None:
            kept = driver.pack()["callbacks"]
            left_behind = {"weights": model.get_weights(), "callbacks": kept, "data": list(data)}
            self._records.put(self._passed, lambda file: plain_data.write(left_behind, file))
            self._keep_alive = KeepAlive(advance)
        self._passed += 1
        self.progress, self.has_state = progress, True

    def repeat(
        self, model: keras.Model, callbacks: Sequence[keras.callbacks.Callback], warn: Callable[[str], object]
    ) -> list[Any]:
        """Leave behind what the present stage, which is over, left behind on the others; returns where data sets are then."""
        record = plain_data.loads(self._records.get(self._passed))
        if record["weights"] is not None:
            model.set_weights(record["weights"])
        else:
            warn(
                f"after fit() number {self.present} a worker that has joined later has not the weights that the others had: they "
                f"are kept of the newest calls only, up to {MOST_KEPT_BYTES >> 30} GiB"
            )
        for number, kept in record["callbacks"].items():
            put(callbacks[int(number)], kept)
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
        stages = list(map(int, of_all(collective, self.present, "elasticdl.stages")))
        newest, oldest = max(stages), min(stages)
        if oldest == newest:
            return
        if stages[0] == newest:
            self._hand_over(collective, oldest - 1)
        if self.overtaken or (self.present < newest and world.own.has_state):
            raise StageSuperseded(f"the others are at fit() number {newest} already")
        raise WorldChanged(f"a worker has to catch up to fit() number {newest}")

    def _hand_over(self, collective: Collective, first: int) -> None:
        """One after the other, as there may be many, and each has the weights."""
        is_root = collective.world.rank == 0
        for number in range(first, from_root(collective, len(self._records), "elasticdl.stages")):
            received = collective.broadcast_bytes(self._records.get(number) if is_root else b"", "elasticdl.records")
            if number >= len(self._records):
                self._records.put(number, functools.partial(_copy, received))


class KeepAlive:
    """Reports progress of a process that is between two calls of ``fit``, whatever the script does there: no step is expected of it."""

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
