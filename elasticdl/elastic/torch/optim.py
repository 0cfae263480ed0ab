"""Torch's optimizers in a loop over micro-batches, as `elasticdl.ga.torch.optim`, with the steps of the present world.

optimizer = elastic.optim.Optimizer(torch.optim.Adam(model.parameters()))
state = elastic.TorchState(model=model, optimizer=optimizer, loader=loader)

@elastic.run
def train(state):
    for epoch in loader.epochs(10):
        for inputs, labels in optimizer.micro_batches(state):
            optimizer.zero_grad()
            loss = cross_entropy(model(inputs), labels)
            loss.backward()
            optimizer.step(loss=loss)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from elasticdl.common.errors import UserError
from elasticdl.elastic.torch_kit.loaders import StepBatch
from elasticdl.elastic.torch_kit.torch_state import TorchState
from elasticdl.elastic.training.batch_shape import job
from elasticdl.ga.torch import optim


class Optimizer(optim.Optimizer):
    """``optimizer``, stepping once for each global batch, on the mean gradient over it, as in the example above (docs/runai.md).

    In a script that runs alone it may also be used without `micro_batches`: it then steps once for every
    ``elasticdl.elastic.steps`` micro-batches.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        """Wrap one of torch's optimizers.

        Raises:
            UserError: `init` has not been called.
        """
        super().__init__(optimizer, job.numbers.steps)
        self._batch: StepBatch | None = None

    def micro_batches(self, state: TorchState) -> Iterator[Any]:
        """This worker's micro-batches to the end of the epoch, one `step` each. Commits after each global batch.

        Raises:
            UserError: the state has no loader, or a micro-batch was not given to `step`.
        """
        if state.loader is None:
            raise UserError(
                "optimizer.micro_batches(state): make it TorchState(..., loader=elastic.DataLoader(dataset))"
            )
        self.discard()
        for batch in state.loader:
            self._batch = batch
            self.steps = max(1, len(batch.plan.micro_batches))
            for micro_batch in batch:
                batch.expect_backward()  # `step` weighs the gradients themselves
                yield micro_batch
            if not batch.plan.micro_batches:
                self.optimizer.step()  # this worker has no sample in this step; the others wait for it
            elif not self.stepped:
                raise UserError(
                    "optimizer.micro_batches(state): call optimizer.step() exactly once for each micro-batch"
                )
            self._batch = None
            state.commit()

    def step(
        self,
        closure: Callable[[], Any] | None = None,
        *,
        samples: float | None = None,
        loss: torch.Tensor | None = None,
    ) -> Any:
        """Hand over the gradient of one micro-batch. ``loss``: its mean loss, for reports only.

        Raises:
            UserError: other workers would not hear of it.
        """
        if self._batch is None:
            if job.under_master:
                raise UserError("optimizer.step(): under `elasticdl run`, loop over optimizer.micro_batches(state)")
            return super().step(closure, samples=samples)
        result = self._evaluate(closure)
        reported = loss if loss is not None else result if isinstance(result, torch.Tensor) else torch.tensor(torch.nan)
        self._batch.weigh(reported.detach())
        self.stepped = False
        if self.accumulate(self._batch.micro_batch_size):
            for parameter in self._params():
                if parameter.grad is not None:
                    parameter.grad.mul_(self._batch.share)  # the workers' gradients are summed
            super().step()
        return result
