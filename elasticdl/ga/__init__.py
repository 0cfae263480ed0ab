"""Gradient accumulation on its own: one optimizer step from several micro-batches, as if they had been one big batch.

``ga.torch.optim`` for PyTorch, ``ga.keras.optimizers`` for Keras. Needs the one framework and nothing else: no cluster,
no Horovod, no other part of this package but ``common``.
"""
