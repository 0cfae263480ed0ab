"""The models that every system trains in every benchmark: multi-layer perceptrons by size, a small ResNet and transformer."""

from __future__ import annotations

WORKER_BATCH = 64
CLASSES = 10
LAYERS = {
    "digits": (64, 128, CLASSES),  # as in the examples
    "1m": (784, 768, 512, CLASSES),
    "2.6m": (256, 1440, 1440, 128, CLASSES),
    "25m": (1024, 4096, 4096, 1024, CLASSES),
}
RESNET20 = "resnet20"  # the model zoo's, for PyTorch, at the pace of a simulated GPU if there is one
TRANSFORMER = "transformer"  # four layers of 128, for PyTorch
RESNET50, TINY = "resnet50", "tiny"  # in bf16, with images that are on the device; for `benchmarks.gpu` alone
TORCH_MODELS = (*LAYERS, RESNET20, TRANSFORMER)


def worker_batch(model: str) -> int:
    """Samples per worker and step."""
    return {RESNET20: 9, TRANSFORMER: 16, RESNET50: 256, TINY: 4}.get(model, WORKER_BATCH)


def recovery_steps(model: str) -> int:
    """Steps from one recovery point to the next where a system goes back to one: as few as cost little beside them."""
    return 1 if model == RESNET20 else 20
