"""What travels as plain data comes back as what it is, in many threads as well; what would not is not plain."""

import dataclasses
import enum
import gc
import io
import sys
import time
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from pathlib import Path

import numpy as np
import pytest
from elastic_kit import in_threads
from hypothesis import given
from hypothesis import strategies as st

from elasticdl.elastic.training import attributes, plain_data
from elasticdl.parsing_threads import TRIES, parsed_beside_threads

Pair = namedtuple("Pair", "first second")


class Text(str):
    __slots__ = ()


class Level(enum.IntEnum):
    LOW = 1


@dataclasses.dataclass
class Best:
    epoch: int = 0


KEYS = st.one_of(st.none(), st.booleans(), st.integers(), st.text(), st.binary(), st.tuples(st.integers(), st.text()))
LEAVES = KEYS | st.floats() | st.complex_numbers() | st.frozensets(KEYS) | st.just(Path("a/b"))


def collections_of(inner):
    dicts = st.dictionaries(KEYS, inner, max_size=3)
    lists = st.lists(inner, max_size=3)
    return st.one_of(
        lists,
        lists.map(tuple),
        st.sets(KEYS, max_size=3),
        st.builds(deque, lists, st.none() | st.integers(1, 4)),
        dicts,
        st.dictionaries(st.just("__kind__") | st.just("__tuple__"), inner),
        st.builds(defaultdict, st.sampled_from([None, list, int, dict]), dicts),
        dicts.map(OrderedDict),
        st.dictionaries(st.text(), st.integers()).map(Counter),
    )


def outline(value):
    """What it is, as text; of sets in an order."""
    if isinstance(value, set | frozenset):
        return type(value).__name__, sorted(map(repr, value))
    if isinstance(value, dict):
        kind = type(value), getattr(value, "default_factory", None)
        return *kind, [(outline(key), outline(each)) for key, each in value.items()]
    if isinstance(value, list | tuple | deque):
        return type(value), getattr(value, "maxlen", None), [*map(outline, value)]
    return type(value), repr(value)


@given(st.recursive(LEAVES, collections_of, max_leaves=12))
def test_values_travel_as_what_they_are(value):
    assert plain_data.is_plain(value)
    plain_data.write(value, file := io.BytesIO())
    back = plain_data.read(io.BytesIO(file.getvalue()))
    assert outline(back) == outline(value)
    if b"set" not in file.getvalue():  # which have no order
        assert plain_data.checksum(back) == plain_data.checksum(value)


@pytest.mark.parametrize(
    ("held", "value"),
    [(Counter(a=1, b=2), Counter(a=5)), (OrderedDict(a=1), OrderedDict(b=2)), ({1}, {2, 3}), (deque([1]), deque([2]))],
)
def test_a_collection_that_others_hold_as_well_has_anothers_content(held, value):
    assert attributes.assigned(held, value) is held
    assert held == value


OTHERS = [Best(), Level.LOW, Pair(1, 2), Text("a"), object(), np.array([object()]), defaultdict(lambda: 1)]
ARRAYS = [np.ma.masked_array([1]), np.zeros(1, [("a", "f4")])]


@pytest.mark.parametrize("value", [*OTHERS, {"a": [object()]}, *ARRAYS], ids=lambda value: type(value).__name__)
def test_what_would_come_back_as_something_else_is_not_plain(value):
    assert not plain_data.is_plain(value)


def test_an_outline_that_another_version_has_written_is_no_dict():
    with pytest.raises(ValueError, match="another version"):
        plain_data.put_together({"betas": {"__tuple__": [0.9, 0.999]}}, {})


# ---- threads that parse at the same time ----


def test_arrays_are_read_in_many_threads():
    """CPython 3.11 lets them break each other off, and does so often if it collects garbage."""
    plain_data.write([np.float32(3), np.arange(3)], file := io.BytesIO())

    def read(_):
        return [int(plain_data.read(io.BytesIO(file.getvalue()))[1].sum()) for _ in range(100)]

    def give_way(*_):
        time.sleep(0)

    interval, thresholds = sys.getswitchinterval(), gc.get_threshold()
    sys.setswitchinterval(1e-6)
    gc.set_threshold(7, 2, 2)
    gc.callbacks.append(give_way)
    try:
        assert in_threads(read, range(5)) == [[3] * 100] * 5
    finally:
        gc.callbacks.remove(give_way)
        gc.set_threshold(*thresholds)
        sys.setswitchinterval(interval)


def test_what_fails_each_time_is_told():
    tried = []

    def fail():
        tried.append(1)
        raise SystemError("broken")

    with pytest.raises(SystemError, match="broken"):
        parsed_beside_threads(fail)
    assert len(tried) == TRIES
