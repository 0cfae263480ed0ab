"""Runs a script whose progress bar waits after each batch while FOLDER/slow is there: slow_bars.py SCRIPT ARGUMENTS... FOLDER"""

import runpy
import sys
import time
import types
from pathlib import Path

import tqdm

import elasticdl.elastic.torch as elastic


class SlowBar(tqdm.tqdm):
    waited = 0

    def __iter__(self):
        for each in super().__iter__():
            yield each
            if Path(sys.argv[-1], "slow").exists() and not elastic.catching_up():
                time.sleep(min(1.0, 0.05 * 1.03**SlowBar.waited))  # what a test waits for comes before the last step
                SlowBar.waited += 1


if __name__ == "__main__":
    tqdm.tqdm = SlowBar
    # By that TensorBoard does without TensorFlow, and starts sooner.
    sys.modules["tensorboard.compat.notf"] = types.ModuleType("notf")
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
