"""Names for jobs that nobody has named: easy to say, to type and to tell from another."""

from __future__ import annotations

import random
from collections.abc import Callable

_ATTEMPTS = 20
ADJECTIVES = (
    "amber", "bold", "brave", "bright", "brisk", "calm", "clever", "cosy", "eager", "fair", "gentle", "golden",
    "happy", "keen", "kind", "lively", "lucky", "mellow", "merry", "mighty", "nimble", "noble", "patient", "proud",
    "quick", "quiet", "silver", "steady", "sunny", "swift", "tidy", "warm", "wise", "witty", "young", "zesty",
)  # fmt: skip
ANIMALS = (
    "badger", "bear", "beaver", "bison", "crane", "deer", "dolphin", "eagle", "falcon", "ferret", "finch", "fox",
    "gecko", "hare", "hawk", "heron", "ibex", "koala", "lark", "lemur", "lion", "lynx", "marten", "moose",
    "newt", "otter", "owl", "panda", "puffin", "raven", "robin", "seal", "stoat", "swan", "tiger", "wren",
)  # fmt: skip


def made_up_name(is_taken: Callable[[str], bool]) -> str:
    """As ``brave-otter-42``: easy to say, to type and to tell from another."""
    rng = random.SystemRandom()
    for _ in range(_ATTEMPTS):
        name = f"{rng.choice(ADJECTIVES)}-{rng.choice(ANIMALS)}-{rng.randrange(10, 100)}"
        if not is_taken(name):
            return name
    return f"job-{rng.randrange(10**9)}"
