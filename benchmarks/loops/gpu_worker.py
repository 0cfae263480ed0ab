"""What `benchmarks.gpu` measures in one process: steps of a ResNet, plain and elastic; commit and checkpoint of a large state."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import cross_entropy

import elasticdl.elastic.torch as elastic
from benchmarks.loops.memorylog import forget_peak, memory_of
from benchmarks.loops.meter import Meter
from benchmarks.loops.options import make_parser
from benchmarks.models import CLASSES
from benchmarks.torch_models import make_dataset, make_model, make_optimizer, make_resnet50
from elasticdl.elastic.torch_kit.gpu import GPU, choose_device, wait_for
from elasticdl.elastic.torch_kit.pieces.torch_state import TorchState

COMMITS = 20
Step = Callable[[torch.Tensor], torch.Tensor]


def main() -> None:
    parser = make_parser()
    parser.add_argument("--loop", choices=(*LOOPS, "state"), required=True)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--pixels", type=int, default=32)
    parser.add_argument("--warm_up", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=1.0)
    args = parser.parse_args()
    if args.loop == "state":
        measure_state(args)
        return
    device = choose_device()
    torch.manual_seed(0)
    model = make_resnet50(small=args.model == "tiny").to(device)
    for parameter in model.parameters():
        if parameter.ndim == 4:
            parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)
    optimizer = make_optimizer(model)
    # Images are on the device: no loader of either loop's decides. Samples are numbers of images.
    images = torch.randn(2 * args.batch, 3, args.pixels, args.pixels, device=device)
    images = images.to(memory_format=torch.channels_last)
    labels = torch.randint(0, CLASSES, (len(images),), device=device)

    def loss_of(numbers: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            return cross_entropy(model(images[numbers]), labels[numbers])

    def agree(number: int) -> int:
        wait_for(device)
        return number

    meter = Meter(args.warm_up, args.seconds, agree)
    LOOPS[args.loop](model, optimizer, len(images), args.batch, loss_of, device, meter)
    meter.write(args.folder, 0)


def run_plain(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    samples: int,
    batch: int,
    loss_of: Step,
    device: torch.device,
    meter: Meter,
) -> None:
    numbers = torch.arange(batch, device=device)
    meter.begin()
    over = False
    while not over:
        optimizer.zero_grad()
        loss_of(numbers).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        over = finish_step(meter, device)


def run_elastic(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    samples: int,
    batch: int,
    loss_of: Step,
    device: torch.device,
    meter: Meter,
) -> None:
    elastic.init(batch_size_per_worker=batch)
    loader = elastic.DataLoader(torch.utils.data.TensorDataset(torch.arange(samples)))
    state = elastic.TorchState(model=model, optimizer=optimizer, loader=loader)

    @elastic.run
    def train(state: TorchState) -> None:
        meter.begin()
        for _ in loader.epochs(10**9):
            for given in loader:
                for (numbers,) in given:
                    given.backward(loss_of(numbers))
                optimizer.step()
                state.commit()
                if finish_step(meter, device):
                    return

    train(state)


def run_prepared(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    samples: int,
    batch: int,
    loss_of: Step,
    device: torch.device,
    meter: Meter,
) -> None:
    dataset = torch.utils.data.TensorDataset(torch.arange(samples))
    given: Any = torch.utils.data.DataLoader(dataset, batch_size=batch, pin_memory=device.type == GPU)
    prepared: Any = elastic.prepare(model, optimizer, given)
    _, stepped, loader = prepared
    meter.begin()
    while True:
        for (numbers,) in loader:
            stepped.zero_grad()
            loss_of(numbers.to(device, non_blocking=True)).backward()  # type: ignore[no-untyped-call]
            stepped.step()
            if finish_step(meter, device):
                return


LOOPS = {"plain": run_plain, "elastic": run_elastic, "prepared": run_prepared}


def finish_step(meter: Meter, device: torch.device) -> bool:
    """Whether it was the last; the host waits for the device at the end of what is measured."""
    if meter.is_last:
        wait_for(device)
    return meter.done()


def measure_state(args: Any) -> None:
    """Alone: how long a commit and a checkpoint hold up training, and what they take of the device."""
    elastic.init(batch_size_per_worker=1)
    device = elastic.device()
    model = make_model(args.model).to(device)
    optimizer = make_optimizer(model)
    data = make_dataset(args.model, COMMITS)
    loader = elastic.DataLoader(data)
    state = elastic.TorchState(model=model, optimizer=optimizer, loader=loader)
    commits: list[float] = []

    @elastic.run
    def train(state: TorchState) -> None:
        for _ in loader.epochs(1):
            for batch in loader:
                for images, labels in batch:
                    batch.backward(cross_entropy(model(images), labels))
                optimizer.step()
                wait_for(device)
                before = time.perf_counter()
                state.commit()
                wait_for(device)
                commits.append(time.perf_counter() - before)

    train(state)
    forget_peak(device)
    held = memory_of(device)
    before = time.perf_counter()
    with (args.folder / "checkpoint").open("wb") as file:
        state.write(file)
    seconds = time.perf_counter() - before
    after = memory_of(device)
    result = {
        "state_bytes": (args.folder / "checkpoint").stat().st_size,
        "commit_seconds": commits,
        "checkpoint_seconds": seconds,
        "device_bytes_of_checkpoint": after.peak - held.allocated if after and held else None,
    }
    (args.folder / "state.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
