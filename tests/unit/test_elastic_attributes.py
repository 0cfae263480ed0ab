"""Which attributes of an object are a package's, and how nested values are gone through."""

import importlib
import logging
from collections import OrderedDict, namedtuple

from elasticdl.common.tree import leaves, mapped
from elasticdl.elastic.training.attributes import set_by

Pair = namedtuple("Pair", "one other")


class OwnHandler(logging.StreamHandler):
    def __init__(self):
        super().__init__()
        self.mine = 1


class HasNoSource:
    """As of a package that is installed without it."""


HasNoSource.__module__ = "logging.nowhere"


def test_attributes_that_the_source_of_a_package_sets_are_the_packages():
    assert set_by(OwnHandler, ("logging",)) >= {"stream", "level", "formatter", "lock"}
    assert "mine" not in set_by(OwnHandler, ("logging",))
    assert set_by(OwnHandler, ("another",)) == frozenset()
    assert set_by(HasNoSource, ("logging",)) == frozenset()


def test_what_an_example_in_a_text_sets_is_the_scripts(monkeypatch, tmp_path):
    (tmp_path / "packaged.py").write_text(
        'class Base:\n    """As in\n        self.outputs = []\n    """\n    def __init__(self):\n        self.a, self.b = 1, 2\n'
        "        self.c: dict[str, int] = {}\n        self.d.e += self.f == 1\n\n\nclass Another:\n    def __init__(self):\n        self.g = 1\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    packaged = importlib.import_module("packaged")
    assert set_by(type("Own", (packaged.Base,), {}), ("packaged",)) == {"a", "b", "c", "e"}


def test_each_leaf_is_replaced_and_collections_keep_their_kinds():
    value = {"a": [1, (2, Pair(3, OrderedDict(b=4)))], "c": None}
    doubled = mapped(lambda leaf: leaf and 2 * leaf, value)
    assert doubled == {"a": [2, (4, Pair(6, {"b": 8}))], "c": None}
    assert type(doubled["a"][1][1]) is Pair
    assert list(leaves(value)) == [1, 2, 3, 4, None]
