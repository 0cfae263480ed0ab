"""The loop that `benchmarks.rescale` runs under horovodrun: Horovod's own elastic state, committed every some steps."""

from __future__ import annotations

from typing import Any

import horovod.torch as hvd
import torch
from torch.nn.functional import cross_entropy

from benchmarks.loops.peer_common import Batches, parse
from benchmarks.loops.steplog import StepLog
from benchmarks.models import recovery_steps
from benchmarks.torch_models import make_model, make_optimizer


def main() -> None:
    args = parse()
    torch.set_num_threads(1)
    hvd.init()
    model = make_model(args.model)
    optimizer = hvd.DistributedOptimizer(make_optimizer(model), named_parameters=model.named_parameters())
    batches, log = Batches(args.model), StepLog(args.folder)

    @hvd.elastic.run  # type: ignore[untyped-decorator]
    def train(state: Any) -> None:
        while True:
            images, labels = batches.of(state.step, hvd.rank(), hvd.size())
            optimizer.zero_grad()
            cross_entropy(model(images), labels).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            state.step += 1
            log.step(state.step, str(hvd.size()), hvd.size())
            if state.step % recovery_steps(args.model) == 0:
                state.commit()
            else:
                state.check_host_updates()

    train(hvd.elastic.TorchState(model=model, optimizer=optimizer, step=0))


if __name__ == "__main__":
    main()
