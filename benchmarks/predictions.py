"""Predictions of millions of small records: beside a plain reader, and on workers that come and go.

    python -m benchmarks.predictions [--samples 10000000] [--repetitions 3] [--small]

The plain reader is PyTorch's `DataLoader`, a model in inference mode and NumPy's ``savez``. In turn with it `elasticdl predict` runs on one worker; of that
counts the time from the first world to the end, so that the imports of neither do. Then the same on one to four workers, one of which is killed every few
seconds: each number must come back once and in order. The memory of workers is looked at meanwhile. The same workers and kills befall a training of as
many samples a step, for its pauses.
"""

from __future__ import annotations

import argparse
import itertools
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil

from benchmarks.harness import Parser, Results, add_out, show_summaries, summarise
from benchmarks.job import ElasticJob, success_of
from benchmarks.processes import Processes, scratch

MODULE = """
import os
import torch

class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return int(os.environ["SAMPLES"])

    def __getitem__(self, index):
        return torch.tensor([index, 1.0], dtype=torch.float64)

class Pairs(Numbers):
    def __getitem__(self, index):
        return super().__getitem__(index), torch.zeros(2)

def custom_model():
    model = torch.nn.Linear(2, 2, dtype=torch.float64)
    with torch.no_grad():
        model.weight.copy_(torch.eye(2))
        model.bias.zero_()
    return model

def dataset(mode, path):
    if mode == "evaluation":
        raise ValueError("there is none")
    return Numbers() if mode == "prediction" else Pairs()

def loss(labels, predictions):
    return (0 * predictions).sum() / len(labels)

def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.0)
"""
PLAIN = """
import sys, time
import numpy, torch
import numbers_module
model, found = numbers_module.custom_model().eval(), []
began = time.monotonic()
with torch.inference_mode():
    for batch in torch.utils.data.DataLoader(numbers_module.dataset("prediction", ""), batch_size=int(sys.argv[1])):
        found.append(model(batch).numpy())
numpy.savez(sys.argv[2], predictions=numpy.concatenate(found))
print("seconds", time.monotonic() - began)
"""
BATCH, BATCHES_OF_PART = 4096, 16
SECONDS = 3600.0
KILL_EACH = 8.0  # seconds
LOOK_EACH = 0.5


def main() -> int:
    args = parse()
    results = Results("predictions", args.out)
    summaries = {}
    with scratch(env={"SAMPLES": str(args.samples)}) as processes:
        (processes.folder / "numbers_module.py").write_text(MODULE)
        job = train(processes, "trained", "1", BATCH)
        finish(job)
        plain, ours = [], []
        for number in range(args.repetitions):
            plain.append(run_plain(processes, number))
            ours.append(run_one(processes, number, args.samples))
        ratio = summarise(mine / theirs for mine, theirs in zip(ours, plain, strict=True))
        results.add("one worker", samples=args.samples, plain=summarise(plain), elasticdl=summarise(ours), ratio=ratio)
        summaries["one worker"] = {"plain, s": summarise(plain), "elasticdl, s": summarise(ours), "ratio": ratio}
        found = run_disturbed(predict(processes, "disturbed", "1-4"))
        require_exact(processes.folder / "disturbed.npz", args.samples)
        training = run_disturbed(train(processes, "training", "1-4", args.samples))
        for kind, each in {"predict": found, "train": training}.items():
            results.add(f"{kind}, 1-4 workers, killed", samples=args.samples, **each.told())
            summaries[f"{kind}, 1-4 workers, killed"] = {
                "pause, s": summarise(each.pauses or [0.0]),
                "MiB of a worker": summarise(each.memory),
            }
        assert job.dir.path.exists()
    show_summaries(f"{args.samples:,} predictions", summaries)
    print(
        f"{found.kills} kills, ids exact; memory in the last half {found.growth:+.1%} of that in the first; results: {results.path}"
    )
    return 0


def parse() -> argparse.Namespace:
    parser = Parser("predictions", __doc__)
    parser.add_argument("--samples", type=int, default=10_000_000)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--small", action="store_true", help="a tiny run, to see that it runs")
    add_out(parser)
    args = parser.parse_args()
    if args.small:
        args.samples, args.repetitions = 300_000, 1
    return args


def predict(processes: Processes, name: str, workers: str) -> ElasticJob:
    options = {
        "minibatch_size": BATCH,
        "num_minibatches_per_task": BATCHES_OF_PART,
        "output": processes.folder / f"{name}.npz",
    }
    return start(processes, "predict", name, workers, options)


def train(processes: Processes, name: str, workers: str, samples: int) -> ElasticJob:
    part = min(samples, BATCH * BATCHES_OF_PART)
    options = {"minibatch_size": part, "max_step": max(samples // part, 1), "checkpoint_dir": processes.folder / name}
    return start(processes, "train", name, workers, options)


def start(processes: Processes, task: str, name: str, workers: str, options: dict[str, object]) -> ElasticJob:
    where = {
        "model_zoo": processes.folder,
        "model_def": "numbers_module",
        "checkpoint_dir": processes.folder / "trained",
    }
    given = {key: str(value) for key, value in {**where, **options}.items()}
    job = ElasticJob(name, workers, (), given, processes, task)
    job.start()
    return job


def finish(job: ElasticJob) -> None:
    job.journal.wait(lambda entry: entry["event"] == "job_finished", 0, SECONDS, "the end of the job")
    success_of(job.dir.name, job.journal.entries)


def run_plain(processes: Processes, number: int) -> float:
    """Seconds."""
    name = f"plain{number}"
    command = [sys.executable, "-c", PLAIN, str(BATCH), str(processes.folder / f"{name}.npz")]
    process = processes.start(name, command, {"PYTHONPATH": str(processes.folder)})
    if process.wait(SECONDS):
        processes.raise_if_any_failed()
    return float(processes.log_of(name).read_text().split()[-1])


def run_one(processes: Processes, number: int, samples: int) -> float:
    """Seconds from the world to the end."""
    job = predict(processes, f"one{number}", "1")
    finish(job)
    require_exact(processes.folder / f"one{number}.npz", samples)
    return float(job.journal.of("job_finished")[0]["time"] - job.journal.of("world_formed")[0]["time"])


@dataclass(frozen=True, slots=True)
class Disturbed:
    """``pauses``: seconds. ``memory``: MiB of a worker, one look after the other. ``growth``: from the first half of the looks to the last."""

    kills: int
    pauses: list[float]
    memory: list[float]

    @property
    def growth(self) -> float:
        half = len(self.memory) // 2
        return float(np.median(self.memory[half:]) / np.median(self.memory[:half]) - 1)

    def told(self) -> dict[str, object]:
        return {
            "kills": self.kills,
            "pauses": summarise(self.pauses or [0.0]),
            "memory": summarise(self.memory),
            "growth": self.growth,
        }


def run_disturbed(job: ElasticJob) -> Disturbed:
    job.journal.wait(lambda entry: entry["event"] == "world_formed", 0, SECONDS, "the first world")
    memory: list[float] = []
    kills, next_kill = 0, time.monotonic() + KILL_EACH
    for look in itertools.count():
        if job.journal.of("job_finished"):
            break
        pids = {entry["worker"]: int(entry["pid"]) for entry in job.journal.of("worker_started")}
        members = job.world()["members"]
        memory += [rss for worker in members if (rss := memory_of(pids[worker]))]
        if time.monotonic() > next_kill and len(members) > 1:
            os.kill(pids[members[look % len(members)]], signal.SIGKILL)
            kills, next_kill = kills + 1, time.monotonic() + KILL_EACH
        time.sleep(LOOK_EACH)
    finish(job)
    return Disturbed(kills, [float(entry["total"]) for entry in job.journal.of("pause")], memory)


def memory_of(pid: int) -> float:
    """MiB; 0 if the process is gone."""
    try:
        return float(psutil.Process(pid).memory_info().rss / 2**20)
    except psutil.NoSuchProcess:
        return 0.0


def require_exact(path: Path, samples: int) -> None:
    with np.load(path) as found:
        predictions = found["predictions"]
    assert predictions.shape == (samples, 2), predictions.shape
    assert bool((predictions[:, 0] == np.arange(samples)).all()), "an id is missing, doubled or out of order"
    path.unlink()


if __name__ == "__main__":
    sys.exit(main())
