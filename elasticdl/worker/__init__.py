"""The worker: trains a model-zoo module as one member of an elastic job.

``main`` is the process, ``check`` the same module's dry run before a job is started. ``trainer`` is the same for every
framework; what differs between them is behind its `Learner` (``torch_trainer``).
"""
