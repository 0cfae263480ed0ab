"""The sizes of the models that every system trains in every benchmark: multi-layer perceptrons."""

from __future__ import annotations

WORKER_BATCH = 64
CLASSES = 10
LAYERS = {
    "1m": (784, 768, 512, CLASSES),
    "2.6m": (256, 1440, 1440, 128, CLASSES),
    "25m": (1024, 4096, 4096, 1024, CLASSES),
}
