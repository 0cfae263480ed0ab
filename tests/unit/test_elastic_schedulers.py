"""Every scheduler of torch in a plain loop that a worker joins anywhere: rates are those of one device."""

import pickle

import pytest
import torch
from elastic_kit import Board, PlainScript
from session_kit import joins_others
from torch.optim import lr_scheduler as s
from torch.optim.swa_utils import SWALR
from torch.utils.data import DataLoader, TensorDataset

EPOCHS, BATCHES = 4, 4
STEPS = EPOCHS * BATCHES
DATA = TensorDataset(torch.arange(STEPS, dtype=torch.float32)[:, None])

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


def train(make, *, per_step, told=(0, 0), state=None, is_given=True):
    """The rate of each step that is made on the job's own model, and the job's state before each of them."""
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = make(optimizer)
    arguments = (1.0,) if isinstance(scheduler, s.ReduceLROnPlateau) else ()
    loader = DataLoader(DATA, batch_size=BATCHES)
    script = PlainScript(0, Board(1), model, optimizer, loader, {"scheduler": scheduler} if is_given else {})
    view = script.host
    script.context.session.jobs_place = lambda: told
    if state is not None:
        joins_others(script.context, pickle.loads(state))
    rates, states = {}, {}
    for epoch in range(EPOCHS):
        for number, (inputs,) in enumerate(script.loader):
            step = epoch * BATCHES + number
            if not view.is_idle:
                rates[step] = optimizer.param_groups[0]["lr"]
                states[step] = pickle.dumps(view.participant.state.state_dict())
            optimizer.zero_grad()
            (model(inputs) * 0.001).mean().backward()
            optimizer.step()
            if per_step:
                scheduler.step(*arguments)
        if not per_step:
            scheduler.step(*arguments)
    if view.is_idle:
        view.finish()
    rates[STEPS] = optimizer.param_groups[0]["lr"]
    return rates, states


@pytest.mark.filterwarnings("error:Detected call of")  # torch's, where the optimizer's own step was not called before
@pytest.mark.parametrize("per_step", [True, False], ids=["per step", "per epoch"])
@pytest.mark.parametrize("is_given", [True, False], ids=["given", "not given"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_rates_are_those_of_one_device_wherever_a_worker_joins(name, is_given, per_step):
    """Also of one that was not given: on a worker that comes later the script has stepped it as often."""
    whole, states = train(SCHEDULERS[name], per_step=per_step, is_given=is_given)
    assert sorted(whole) == list(range(STEPS + 1))
    for stands in range(2, STEPS, 2):  # every eighth
        for told in (stands, stands // 2):  # the job has gone on since
            place = divmod(told, BATCHES)
            rates, _ = train(SCHEDULERS[name], per_step=per_step, told=place, state=states[stands], is_given=is_given)
            expected = {step: rate for step, rate in whole.items() if step >= stands}
            assert rates == expected, f"joins at {stands}, told {told}"
