"""Threads that parse at the same time. CPython 3.11 lets them break each other off, and does so often if it collects garbage."""

from __future__ import annotations

import gc
import io
import sys
import time

import numpy as np
import pytest
from elastic_kit import in_threads

from elasticdl.elastic.training import plain_data
from elasticdl.parsing_threads import TRIES, parsed_beside_threads


@pytest.fixture
def threads_that_switch_often():
    def give_way(*_):
        time.sleep(0)

    interval, thresholds = sys.getswitchinterval(), gc.get_threshold()
    sys.setswitchinterval(1e-6)
    gc.set_threshold(7, 2, 2)
    gc.callbacks.append(give_way)
    yield
    gc.callbacks.remove(give_way)
    gc.set_threshold(*thresholds)
    sys.setswitchinterval(interval)


def test_arrays_are_read_in_many_threads(threads_that_switch_often):
    file = io.BytesIO()
    plain_data.write([np.float32(3), np.arange(3)], file)

    def read(_):
        return [int(plain_data.read(io.BytesIO(file.getvalue()))[1].sum()) for _ in range(100)]

    assert in_threads(read, range(5)) == [[3] * 100] * 5


def test_what_fails_each_time_is_told():
    tried = []

    def fail():
        tried.append(1)
        raise SystemError("broken")

    with pytest.raises(SystemError, match="broken"):
        parsed_beside_threads(fail)
    assert len(tried) == TRIES
