"""Every scheduler of torch in a plain loop that a worker joins anywhere: rates are those of one device."""

import pytest
import torch
from job_kit import Job
from plain_kit import Script
from torch.optim import lr_scheduler as s
from torch.optim.swa_utils import SWALR

EPOCHS, BATCHES = 4, 4
STEPS = EPOCHS * BATCHES

SCHEDULERS = {
    "LambdaLR": lambda o: s.LambdaLR(o, lambda step: 0.9**step),
    "MultiplicativeLR": lambda o: s.MultiplicativeLR(o, lambda n: 0.9),
    "StepLR": lambda o: s.StepLR(o, 1, gamma=0.5),
    "MultiStepLR": lambda o: s.MultiStepLR(o, [1, 2], gamma=0.1),
    "ConstantLR": lambda o: s.ConstantLR(o, 0.5, total_iters=1),
    "LinearLR": lambda o: s.LinearLR(o, 0.5, total_iters=4),
    "ExponentialLR": lambda o: s.ExponentialLR(o, 0.5),
    "PolynomialLR": lambda o: s.PolynomialLR(o, total_iters=20, power=2.0),
    "CosineAnnealingLR": lambda o: s.CosineAnnealingLR(o, 4),
    "CosineAnnealingWarmRestarts": lambda o: s.CosineAnnealingWarmRestarts(o, 2),
    "CyclicLR": lambda o: s.CyclicLR(o, 0.01, 0.1, step_size_up=2),
    "OneCycleLR": lambda o: s.OneCycleLR(o, 0.2, total_steps=20),
    "ReduceLROnPlateau": lambda o: s.ReduceLROnPlateau(o, factor=0.5, patience=0, threshold=10.0),
    "SequentialLR": lambda o: s.SequentialLR(
        o, [s.LinearLR(o, 0.1, total_iters=2), s.ExponentialLR(o, 0.5)], milestones=[2]
    ),
    "ChainedScheduler": lambda o: s.ChainedScheduler([s.ConstantLR(o, 0.5, total_iters=2), s.ExponentialLR(o, 0.5)]),
    "SWALR": lambda o: SWALR(o, swa_lr=0.01, anneal_epochs=3),
}


class Scheduled(Script):
    """``rates``: of the steps that it makes, by their numbers, and the last one that is set."""

    def __init__(self, make, per_step, is_given):
        super().__init__(Scheduled.go, lambda: torch.nn.Linear(8, 3), samples=4 * BATCHES, batch=4)
        self.scheduler, self.per_step = make(self.optimizer), per_step
        self.others = [self.scheduler] if is_given else []
        self.arguments = (1.0,) if isinstance(self.scheduler, s.ReduceLROnPlateau) else ()
        self.rates = {}

    def go(self):
        for epoch in range(EPOCHS):
            for number, (x, _) in enumerate(self.loader):
                if not self.host.is_idle:
                    self.rates[epoch * BATCHES + number] = self.optimizer.param_groups[0]["lr"]
                self.optimizer.zero_grad()
                (self.model(x) * 0.001).mean().backward()
                self.optimizer.step()
                if self.per_step:
                    self.scheduler.step(*self.arguments)
            if not self.per_step:
                self.scheduler.step(*self.arguments)


def train(*script, **job):
    """The rate of each step that is made on the job's own model, and the job's state before each of them."""
    script, job = Scheduled(*script), Job(1, **job)
    assert job.run(lambda _: script.train(job))[0] == (None,)
    return {**script.rates, STEPS: script.optimizer.param_groups[0]["lr"]}, job.states


@pytest.mark.filterwarnings("error:Detected call of")  # torch's, where the optimizer's own step was not called before
@pytest.mark.parametrize("per_step", [True, False], ids=["per step", "per epoch"])
@pytest.mark.parametrize("is_given", [True, False], ids=["given", "not given"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_rates_are_those_of_one_device_wherever_a_worker_joins(name, is_given, per_step):
    """Also of one that was not given: on a worker that comes later the script has stepped it as often."""
    script = SCHEDULERS[name], per_step, is_given
    whole, states = train(*script)
    assert sorted(whole) == list(range(STEPS + 1))
    for stands in range(2, STEPS, 2):  # every eighth
        for told in (stands, stands // 2):  # the job has gone on since
            rates, _ = train(*script, finds=states[stands], place=divmod(told, BATCHES))
            expected = {step: rate for step, rate in whole.items() if step >= stands}
            assert rates == expected, f"joins at {stands}, told {told}"
