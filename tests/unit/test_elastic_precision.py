"""Mixed precision, clipping, a schedule, the compiler and checkpointing in one loop: what differs, and why."""

import contextlib

import torch
from elastic_kit import Board, SumOfThreads, in_threads, make_data
from session_kit import FakeMaster, enter
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from elasticdl.elastic.core.plan import BatchPolicy
from elasticdl.elastic.torch_kit.loaders import ElasticDataLoader
from elasticdl.elastic.torch_kit.tensors import ElasticContext
from elasticdl.elastic.torch_kit.torch_state import TorchState

EPOCHS, BATCH, SAMPLES = 2, 32, 256


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.middle = torch.nn.Linear(8, 32), torch.nn.Linear(32, 32)
        self.last = torch.nn.Linear(32, 3)

    def forward(self, inputs):
        hidden = checkpoint(self.middle, torch.relu(self.first(inputs)), use_reentrant=False)
        return self.last(torch.relu(hidden))


class Member:
    def __init__(self, rank, board, micro_batch, dtype):
        self.context = ElasticContext(
            FakeMaster().session, SumOfThreads(rank, board), BatchPolicy(BATCH, None, micro_batch), seed=0
        )
        torch.manual_seed(0)
        self.half = dtype is torch.bfloat16
        self.dtype = torch.float32 if self.half else dtype
        self.model = Net().to(self.dtype)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.loader = ElasticDataLoader(self.context, make_data(SAMPLES))
        steps = EPOCHS * SAMPLES // BATCH
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 0.02, total_steps=steps)
        self.state = TorchState(self.context, self.model, self.optimizer, self.loader, {"schedule": self.schedule})
        enter(self.context, self.context.world)

    def train(self):
        compiled = torch.compile(self.model, backend="aot_eager")
        for _ in self.loader.epochs(EPOCHS):
            for batch in self.loader:
                for inputs, labels in batch:
                    with torch.autocast("cpu", torch.bfloat16) if self.half else contextlib.nullcontext():
                        loss = cross_entropy(compiled(inputs.to(self.dtype)), labels)
                    batch.backward(loss)
                self.state.reduce_gradients()
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
                self.optimizer.step()
                self.schedule.step()
                self.state.commit()
        return torch.cat([parameter.detach().flatten() for parameter in self.model.parameters()])


def train(workers, micro_batch, dtype):
    board = Board(workers)
    return in_threads(Member.train, [Member(rank, board, micro_batch, dtype) for rank in range(workers)])[0]


def difference(one, other):
    return float((one - other).abs().max())


def test_two_workers_and_one_agree_as_far_as_the_numbers_reach():
    for dtype, bound in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        assert difference(train(1, BATCH, dtype), train(2, BATCH, dtype)) < bound


def test_in_bfloat16_the_size_of_the_micro_batches_shows_and_the_number_of_workers_does_not():
    whole, halves = train(1, BATCH, torch.bfloat16), train(1, BATCH // 2, torch.bfloat16)
    assert difference(whole, halves) > 1e-3  # by rounding alone: one worker, the same samples
    assert difference(halves, train(2, BATCH // 2, torch.bfloat16)) == 0
