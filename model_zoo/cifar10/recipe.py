"""The numbers that training ResNet20 goes by, for both frameworks."""

from __future__ import annotations

LEARNING_RATE = 0.001
PADDING = 4
MEAN = (125.3, 123.0, 113.9)  # of the real training pixels, by channel
DEVIATION = (63.0, 62.1, 66.7)


def learning_rate(epoch: int) -> float:
    """Of one worker."""
    for after, factor in ((80, 0.01), (60, 0.1), (40, 0.2), (35, 0.5)):
        if epoch > after:
            return LEARNING_RATE * factor
    return LEARNING_RATE
