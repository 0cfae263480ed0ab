"""Evaluating a module's trained model, or predicting with it: one pass over the data, divided over workers that may come and go.

Each step gives each worker one part. What the parts give is put together at the end by rank 0, piece by piece; if it dies at this, the
next rank 0 does it again.
"""

from __future__ import annotations

import logging
import os
import socket
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from elasticdl.common.errors import UserError
from elasticdl.common.reason import name_of, one_line
from elasticdl.elastic.collectives.port import memory_of_the_worker
from elasticdl.elastic.core.protocol import World
from elasticdl.elastic.core.reporting import Activity
from elasticdl.elastic.training.checkpoint_store import Checkpoint, WholeFiles
from elasticdl.elastic.training.cursor import StepBatch
from elasticdl.elastic.training.epochs import EpochLedger
from elasticdl.elastic.training.evaluation import Array, from_root, require_rows
from elasticdl.elastic.training.job import Hooks, JobContext
from elasticdl.elastic.training.parts import WRITERS, Parts, arrow_table, import_parquet, put_away, write_json
from elasticdl.elastic.training.pieces import load_all, mapped, named_leaves
from elasticdl.job.journal import plain
from elasticdl.job.spec import EVALUATE, PREDICT, PREDICTION_SUFFIXES, JobSpec
from elasticdl.worker.learner import Learner, open_store
from elasticdl.worker.zoo import ModelModule, make_processor, open_inference

log = logging.getLogger(__name__)

MOST_AHEAD = 1024  # parts that workers have in hand, whatever has become of their worlds
PREDICTIONS = "predictions"  # the name of what a model puts out, if that has none of its own


class Pass(Hooks):
    """One worker's part of it."""

    def __init__(
        self, spec: JobSpec, context: JobContext, module: ModelModule, learner: type[Learner], model: Any
    ) -> None:
        """Raises:
        UserError: the module does not keep the contract, or nothing is to be done with the predictions.
        Exception: whatever the user's code raises.
        """
        self._spec, self._context, self._module, self._learner = spec, context, module, learner
        self._process = make_processor(module) if spec.task == PREDICT else None
        if spec.task == PREDICT and not spec.output and self._process is None:
            raise UserError(
                f"--output is missing: name a file for the predictions, which ends in {' or '.join(PREDICTION_SUFFIXES)}, or give the "
                f"module a {spec.prediction_outputs_processor}"
            )
        self._is_table = spec.task == PREDICT and spec.output.endswith(".parquet")
        if self._is_table:
            import_parquet()
        self._evaluator = learner.evaluator_of(module, spec, context, model, open_inference(module, spec))
        self._ledger = EpochLedger()
        self.state = self._evaluator.state(f"{spec.task} data", {"ledger": self._ledger, "checkpoint": {}})
        self._size = context.policy.batch_size(1)  # of a part
        self._writer = f"{socket.gethostname()}-{os.getpid()}"
        self._parts: Parts | None = None
        if spec.output if spec.task == PREDICT else self._evaluator.metrics:
            files = WholeFiles("--output", spec.parts, self._writer)
            alive = partial(context.advance, Activity.ALIVE)
            self._parts = Parts(files, len(self._evaluator.dataset), self._size, alive)
        self._began = time.monotonic()
        self._processed: set[int] = set()  # parts of which the processor has all, and no step is known to be made
        self._metrics: dict[str, float] = {}
        self._is_put_together = False

    def check(self) -> None:
        """Whether a worker could do this.

        Raises:
            UserError: it could not; one line says why.
        """
        self._require_free()
        self._load()
        rows = min(2, len(self._evaluator.dataset))
        model = f"{name_of(self._module.custom_model)}()'s model, given the first samples of the data,"
        with self._module.blame(model):
            with closing(self._evaluator.fetch([np.arange(rows)])) as samples:
                (outputs, labels), _ = self._evaluator.test(*next(samples), rows)
            columns = self._columns(outputs, labels, rows)
        if self._is_table:
            arrow_table(columns)

    def run(self) -> None:
        """To the end.

        Raises:
            Stopped: this worker was told to leave; the position has been kept if that was its task.
        """
        context = self._context
        context.run(self._work, self.state, self)
        if context.rank == 0 and self._parts is not None:
            self._parts.files.remove_all()
        context.finish(step=self.state.step, epochs=1, metrics=self._metrics)

    # -- entering a world --

    def before_sync(self, world: World) -> None:
        if not (world.is_first and world.rank == 0):
            return
        self._require_free()
        found = self._load()
        self.state.checkpoint = {"step": found.step, "path": found.path}
        log.info("the model is that of %s", found.path)
        if self._parts is not None:
            self._parts.begin()

    def on_world(self, world: World) -> None:
        self._context.plan_total(self.state.cursor.order.total_steps(self.state.progress, 1, world.size), 1)
        if self._process is not None and world.size > 1:
            first, mine = self.state.progress.position // self._size, np.zeros(MOST_AHEAD)
            mine[[number - first for number in self._processed if number - first in range(MOST_AHEAD)]] = 1
            told = np.asarray(self._context.collective.sum(mine, "elasticdl.processed"))
            self._processed |= {first + int(number) for number in np.flatnonzero(told)}
        asked, used = self._spec.checkpoint_step, self.state.checkpoint.get("step")
        if asked and used and asked != used:
            raise UserError(
                f"--checkpoint_step {asked}: the job goes on with the checkpoint of step {used}; give another --job_name to begin anew"
            )

    def _require_free(self) -> None:
        output = self._spec.output
        files, name = self._place_of(output)
        if output and name in files.names():
            raise UserError(f"--output {output} exists: remove it, or name another file")

    def _load(self) -> Checkpoint:
        """The trained model.

        Raises:
            UserError: there is no checkpoint, or it is of another model, or can't be read.
        """
        spec = self._spec
        store = open_store(spec, self._learner.codec.suffix)
        assert store is not None, "JobSpec has seen to it"
        read, step = self._learner.read_checkpoint, spec.checkpoint_step
        readable = store.read_newest(read, "name another checkpoint, or another --checkpoint_dir", step)
        if readable is None:
            which = f"checkpoint of step {step}" if step else "checkpoint"
            raise UserError(
                f"--checkpoint_dir {spec.checkpoint_dir} holds no {which}: train the model with it, or name another folder"
            )
        found, loaded = readable
        try:
            with memory_of_the_worker("the model"):
                load_all(self.state.model, loaded["state"])
        except UserError as error:
            raise UserError(f"{found.path} is not of this model: {error}") from error
        return found

    # -- the pass --

    def _work(self) -> None:
        cursor, context = self.state.cursor, self._context
        ahead = (np.arange(each.samples) + each.indices[0] for plan in cursor.plans() for each in plan.micro_batches)
        with closing(self._evaluator.fetch(ahead)) as samples:
            for plan in cursor.plans():
                self._make_part(cursor.begin(StepBatch(plan, samples, context)))
                self.state.commit()
        cursor.end()
        metrics = self._put_together() if context.rank == 0 else {}
        context.advance(Activity.WAIT)
        self._metrics = from_root(context.collective, metrics, "elasticdl.complete")
        context.advance(Activity.UPDATE)

    def _make_part(self, batch: StepBatch) -> None:
        plan = batch.plan
        loss_sum, rows = 0.0, list[dict[str, Array]]()
        number = plan.micro_batches[0].indices[0] // self._size if plan.micro_batches else -1
        for micro_batch, (inputs, labels) in zip(plan.micro_batches, batch, strict=True):
            (outputs, labels), loss = self._evaluator.test(inputs, labels, micro_batch.samples)
            loss_sum += loss * micro_batch.samples
            if self._parts is not None:
                rows.append(self._columns(outputs, labels, micro_batch.samples))
            if self._process is not None and number not in self._processed:
                self._process(self._evaluator.on_host(outputs), self._context.worker_id)
            self._context.advance(Activity.ALIVE)
        if self._parts is not None and rows:
            self._parts.write(number, rows)
        if number >= 0:
            self._processed.add(number)
        loss = self.state.close_step(plan.samples, loss_sum)
        self._ledger.add_loss(loss, plan.batch)
        self._processed = {number for number in self._processed if number > plan.whole[-1] // self._size}

    def _columns(self, outputs: Any, labels: Any, rows: int) -> dict[str, Array]:
        if self._spec.task == EVALUATE:
            return {str(number): each for number, each in enumerate(self._evaluator.flatten((outputs, labels), rows))}
        columns = {name or PREDICTIONS: self.state.host_array(leaf) for name, leaf in named_leaves(outputs).items()}
        leaves: list[Any] = []
        mapped(leaves.append, outputs)
        if len(columns) < len(leaves):
            raise UserError(
                f"two of the model's {len(leaves)} outputs have the same name: there are {', '.join(columns)}"
            )
        for name, column in columns.items():
            require_rows(f"the model's output {name}", column, rows)
        return columns

    # -- the end --

    def _put_together(self) -> dict[str, float]:
        """On rank 0. Returns the metrics."""
        spec, at = self._spec, self.state.progress
        metrics = {"loss": self._ledger.epoch_loss} if spec.task == EVALUATE else {}
        if self._is_put_together:
            return self._metrics or metrics
        if spec.task == EVALUATE:
            self._metrics = metrics = metrics | self._compute_metrics()
            checkpoint = self.state.checkpoint
            default = f"{spec.checkpoint_dir.rstrip('/')}/evaluation-{checkpoint['step']:010d}.json"
            found = {"samples": at.samples, "metrics": metrics}
            self._write(spec.output or default, partial(write_json, plain({"checkpoint": checkpoint, **found})))
            seconds = time.monotonic() - self._began
            self._context.session.notify("evaluation", step=at.step, epoch=0, **found, seconds=seconds)
        elif self._parts is not None:
            if self._parts.claim():
                self._require_free()  # others may have written it meanwhile
            write = next(write for suffix, write in WRITERS.items() if spec.output.endswith(suffix))
            self._write(spec.output, partial(write, self._parts))
            self._context.session.notify("predicted", samples=at.samples, path=spec.output)
        self._is_put_together = True
        return metrics

    def _compute_metrics(self) -> dict[str, float]:
        evaluator = self._evaluator
        if self._parts is None:
            return {}
        with closing(evaluator.fetch([np.arange(1)])) as first:
            like, _ = evaluator.test(*next(first), 1)
        with tempfile.TemporaryDirectory() as folder:
            try:
                columns = list(self._parts.mapped(Path(folder)).values())
            except OSError as error:
                raise UserError(
                    f"TMPDIR: {folder} can't hold what the metrics are computed of: {one_line(error)}"
                ) from error
            outputs, labels = evaluator.join(columns, like)
            found = {}
            for name, of in evaluator.metrics.items():
                with self._module.blame(f"eval_metrics_fn(): {name}"):
                    found[name] = float(of(labels, outputs))
                self._context.advance(Activity.ALIVE)
        return found

    def _write(self, path: str, dump: Callable[[Any], object]) -> None:
        files, name = self._place_of(path)
        with put_away(path):
            files.make_folder()
            files.write(name, dump, aside=self._parts.files if self._parts is not None else None)
        log.info("written: %s", path)

    def _place_of(self, path: str) -> tuple[WholeFiles, str]:
        """A file's folder, and its name there."""
        folder, slash, name = path.rpartition("/")
        return WholeFiles("--output", folder or slash or ".", self._writer), name
