"""Plain values in attributes are sent, put back and compared; what another worker can't use is named by its type."""

import copy
import sys
from types import ModuleType

import numpy as np
import pytest
import torch

from elasticdl.elastic.torch_kit.torch_state import TENSORS
from elasticdl.elastic.training.attributes import Attributes, Holder, is_scripts_own


class Keeps:
    def __init__(self):
        self.number, self.text, self.flag, self.folder = 1, "a", False, "/mine"
        self.seen, self.by, self.rows = [1], {"a": (1,)}, np.zeros(2)
        self.average, self.large = torch.zeros(2), torch.zeros(5000)

    def go_on(self):
        self.number, self.text, self.flag = 2, "b", True
        self.seen.append(2)
        self.by["b"] = {3}
        self.rows += 1
        self.average += 1
        self.large += 1
        self.later = 7


def attributes_of(kept, told=pytest.fail):
    made = Attributes(lambda: [Holder("one", "the callback Keeps", kept)], TENSORS, told)
    made.begin()
    return made


def text_of(kept):
    return str({**vars(kept), "large": float(kept.large[0])})


def test_what_has_changed_is_sent_and_what_has_not_stays():
    first, newcomer = Keeps(), Keeps()
    newcomer.folder = "/own"
    sender, receiver = attributes_of(first), attributes_of(newcomer)
    first.go_on()
    receiver.load(copy.deepcopy(sender.dump()))
    assert newcomer.folder == "/own"
    newcomer.folder = first.folder
    assert text_of(newcomer) == text_of(first)
    third = Keeps()
    attributes_of(third).load(copy.deepcopy(receiver.dump()))
    assert text_of(third) == text_of(first), "a newcomer sends on what it was sent"


def test_what_is_small_is_put_back_into_the_same_collections():
    kept = Keeps()
    attributes = attributes_of(kept)
    seen, before = kept.seen, text_of(kept)
    noted = attributes.note()
    for _ in range(2):
        kept.go_on()
        attributes.put_back(noted)
        assert kept.large[0] > 0, "what is large stays"
        kept.large.zero_()
        assert text_of(kept) == before
        assert kept.seen is seen


def test_what_cant_be_sent_is_named_once_by_its_type():
    kept, told = Keeps(), []
    attributes = attributes_of(kept, told.append)
    kept.average_model, kept.hook, kept.stream = torch.nn.Linear(1, 1), print, np.random.default_rng()
    kept.own = Keeps()
    for _ in range(2):
        assert "own" not in attributes.dump()["changed"].get("one", {})
    what = "is not sent to workers that come later: keep it as plain data"
    assert told == [
        f"the callback Keeps: average_model, a Linear, {what}",
        f"the callback Keeps: stream, a Generator, {what}",
        f"the callback Keeps: own, a Keeps, {what}",
    ]


@pytest.mark.parametrize(
    ("file", "is_own"),
    [
        ("/home/me/.local/lib/python3.11/site-packages/library/layers.py", False),
        ("/usr/lib/python3/dist-packages/library/layers.py", False),
        (sys.modules["json"].__file__, False),
        ("/home/me/experiment/layers.py", True),
    ],
)
def test_a_class_of_an_installed_package_is_no_scripts_wherever_packages_are(monkeypatch, file, is_own):
    module = ModuleType("layers_of_somebody")
    module.__file__ = file
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert is_scripts_own(type("Layer", (), {"__module__": module.__name__})) is is_own
