"""A node of the test cluster that runs containers' commands as local processes, and tells the truth about them.

It speaks to the API server as a kubelet does, with a node's own certificate: registers, says that it is there, lists and
watches its pods, runs them, reports what became of them, serves their logs. What differs from a real node:

- A pod has one container, and that is a process of this machine and user: no image, no isolation, no limits on resources,
  and a ``securityContext`` is ignored. A process that does not handle SIGTERM dies of it; as the first process of a real
  container it would not. Probes and ``preStop`` are not run. ``exec`` and ``attach`` are not served.
- GPUs are only counted, by the scheduler: a container is told nothing of them.
- Volumes are folders below ``$ELASTICDL_POD_ROOT``, where the container would see ``/``. Mount paths that occur in the
  command and in ``env`` are replaced by the real ones. A mounted service account also sets ``KUBECONFIG``, since
  ``/var/run/secrets`` cannot be had. What is mounted is not refreshed when its source changes.
- A pod has an address of its own, ``127.<node>.x.y``, that is reached from everywhere on this machine. There is no DNS,
  and the API server accepts no loopback address as an endpoint of a Service; ``NAME.NAMESPACE.svc:PORT`` in a container's
  environment leads to the Service's first pod all the same (``services``).
- When a line of a log was written is known of those that begin with it; for others it is when they are read.
  Logs are served whole.
- A container runs once, whatever the ``restartPolicy``. What controls its pod may make another pod. There are no events of pods.
- Every image is there, except those whose name begins with ``missing/``.
"""
