"""The worker: trains a model-zoo module as one member of an elastic job.

``main`` is the process, ``check`` the same module's dry run before a job is started. ``trainer`` is the same for every
framework; what differs between them is in its `Learner` (``torch_learner``, ``keras_learner``).
"""
