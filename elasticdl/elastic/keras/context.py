"""INTERFACE: ``connect(policy, *, seed, environ) -> ElasticContext``; see `elasticdl.elastic.torch.context`.

``ElasticContext`` (a ``elasticdl.elastic.context.JobContext``, as the torch one) has ``sampler(data)``,
``loader(dataset, *, shuffle=True)`` and ``state(step, loader, values)``. Neutral types for the trainer:
``elasticdl.elastic.context.JobContext``, ``elasticdl.elastic.state.TrainingState``,
``elasticdl.elastic.sampler.StepBatch`` / ``ElasticSampler``, ``elasticdl.elastic.vote.Vote``.
"""
