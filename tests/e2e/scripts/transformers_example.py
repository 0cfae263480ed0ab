"""An example of examples/transformers, observed.

    transformers_example.py NAME FOLDER plain|elastic [ARGUMENT=VALUE ...]

Trains with ``transformers.Trainer`` itself or elastically, with further arguments for TrainingArguments, and writes into
FOLDER: a line per step to ``curve``, and what it has come to at the end to ``end.json``.
"""

import importlib.util
import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch
import transformers

import elasticdl.elastic.transformers as elastic

name, folder, kind, *options = sys.argv[1:]
folder = Path(folder)
given = {option.split("=")[0]: json.loads(option.split("=")[1]) for option in options}
base = transformers.Trainer if kind == "plain" else elastic.Trainer


class Observer(transformers.TrainerCallback):
    def on_train_begin(self, *_, **__):
        random.random()  # all workers draw alike, as one device does

    def on_epoch_begin(self, *_, **__):
        random.random()
        torch.rand(1)

    def on_step_end(self, args, state, control, **_):
        if state.is_world_process_zero:
            with (folder / "curve").open("a") as curve:
                curve.write(f"{state.global_step}\n")
        if os.path.exists(os.environ.get("TEST_SLOW_WHILE", "")):
            time.sleep(min(2.0, 0.05 * 1.05**state.global_step))  # what a test waits for comes before the last step


class Observed(base):
    def __init__(self, **arguments):
        super().__init__(**arguments, callbacks=[Observer()])

    def _save_optimizer_and_scheduler(self, output_dir):
        """Where TEST_DIES_AT names a file that is there, holding a number of a step, its first worker is lost meanwhile."""
        mark = Path(os.environ.get("TEST_DIES_AT", "none"))
        if mark.is_file() and int(mark.read_text()) == self.state.global_step:
            mark.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        super()._save_optimizer_and_scheduler(output_dir)

    def evaluate(self, *args, **kwargs):
        metrics = super().evaluate(*args, **kwargs)
        if not self.is_in_train and self.is_world_process_zero():
            end = {
                "step": self.state.global_step,
                "epoch": self.state.epoch,
                "best_metric": self.state.best_metric,
                "best_checkpoint": Path(self.state.best_model_checkpoint or "none").name,
                "checkpoints": sorted(path.name for path in (folder / "out").glob("checkpoint-*")),
                "metrics": metrics,
                "history": self.state.log_history,
            }
            (folder / "end.json").write_text(json.dumps(end))
        return metrics


def arguments(**example):
    return transformers.TrainingArguments(**{**example, "logging_steps": 1, "output_dir": str(folder / "out"), **given})


def main():
    path = Path(__file__).parents[3] / "examples" / "transformers" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    example.Trainer, example.TrainingArguments = Observed, arguments
    folder.mkdir(parents=True, exist_ok=True)
    example.main()


if __name__ == "__main__":
    main()
