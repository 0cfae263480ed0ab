"""The order of samples: a pure function of seed and epoch, so that no history of workers can change it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def epoch_order(samples: int, seed: int, epoch: int, *, shuffle: bool = True) -> npt.NDArray[np.int64]:
    """Indices of all samples in the order of this epoch, shape (samples,); every index exactly once.

    Philox is counter-based: (seed, epoch) select independent streams, on every platform the same.
    """
    if not shuffle:
        return np.arange(samples, dtype=np.int64)
    generator = np.random.Generator(np.random.Philox(key=[seed, epoch]))
    return generator.permutation(samples).astype(np.int64, copy=False)


def step_seed(seed: int, step: int, rank: int) -> int:
    """Seed of every random draw that ``rank`` makes in ``step`` (dropout, augmentation); 32 bits.

    A step that is repeated after a failure draws the same numbers again, whatever happened before it.
    """
    return int(np.random.SeedSequence([seed, step, rank]).generate_state(1)[0])
