"""Runs a script whose progress bar waits after each batch while TEST_SLOW_WHILE is there: slow_bars.py SCRIPT ARGUMENTS..."""

import os
import runpy
import sys
import time
import types

import tqdm

import elasticdl.elastic.torch as elastic


class SlowBar(tqdm.tqdm):
    waited = 0

    def __iter__(self):
        for each in super().__iter__():
            yield each
            if os.path.exists(os.environ["TEST_SLOW_WHILE"]) and not elastic.catching_up():
                time.sleep(min(1.0, 0.05 * 1.03**SlowBar.waited))  # what a test waits for comes before the last step
                SlowBar.waited += 1


if __name__ == "__main__":
    tqdm.tqdm = SlowBar
    sys.modules["tensorboard.compat.notf"] = types.ModuleType(
        "notf"
    )  # by that TensorBoard does without TensorFlow, and starts sooner
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
