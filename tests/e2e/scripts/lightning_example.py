"""One of the examples for Lightning, slower while a file is there.

lightning_example.py NAME FOLDER STRATEGY
"""

import importlib
import os
import sys
import time
from pathlib import Path

import lightning as L

sys.path.insert(0, str(Path(__file__).parents[3] / "examples" / "lightning"))


def wait_a_little(trainer):
    """Longer with each step: what a test waits for happens before the last, however busy the machine."""
    if os.path.exists(os.environ.get("TEST_SLOW_WHILE", "")):
        time.sleep(min(2.0, 0.05 * 1.05**trainer.global_step))


class SlowSteps(L.Callback):
    def on_train_batch_end(self, trainer, *_):
        wait_a_little(trainer)


class SlowUpdates(L.Callback):
    """A worker is killed between two updates of one training step."""

    def on_before_optimizer_step(self, trainer, *_):
        wait_a_little(trainer)


if __name__ == "__main__":
    name, folder, strategy = sys.argv[1:]
    # Rounding errors grow in a hundred steps of Adam; errors of another kind show all the better.
    precision = "32-true" if name == "classifier" else "64-true"
    example = importlib.import_module(name)
    slow = SlowUpdates() if name == "gan" else SlowSteps()
    trainer = example.main(folder, strategy, callbacks=[slow], enable_progress_bar=False, precision=precision)
    if trainer.is_global_zero:
        metrics = {key: float(value) for key, value in trainer.callback_metrics.items()}
        print("ended", trainer.global_step, trainer.current_epoch, *sorted(metrics.items()), flush=True)
