"""The elasticdl loop on Keras that `benchmarks.rescale` disturbs."""

from __future__ import annotations

import elasticdl.elastic.keras as elastic
from benchmarks.keras_models import make_arrays, make_loss, make_model, make_optimizer, use_one_thread
from benchmarks.loops.options import parse_steps
from benchmarks.loops.steplog import StepLog
from benchmarks.loops.tracelog import TraceLog
from benchmarks.models import WORKER_BATCH
from elasticdl.data import Arrays
from elasticdl.elastic.keras.keras_state import KerasState


def main() -> None:
    args = parse_steps()
    use_one_thread()
    job = elastic.init(batch_size_per_worker=WORKER_BATCH)
    model = make_model(args.model)
    loader = elastic.DataLoader(Arrays(*make_arrays(args.model, args.samples)))
    state = elastic.KerasState(model=model, optimizer=make_optimizer(), loss=make_loss(), loader=loader)
    log, traces = StepLog(args.folder), TraceLog(args.folder)

    @elastic.run
    def train(state: KerasState) -> None:
        for _ in loader.epochs(10**9):
            for batch in loader:
                state.make_step(batch)
                traces.write(state.train_step.traces)
                log.step(state.step, str(job.world.version), job.size)
                state.commit()

    train(state)


if __name__ == "__main__":
    main()
