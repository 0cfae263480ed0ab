"""CIFAR-10 from its official archives, or from a small set made by ``generate.py`` in the same format."""
