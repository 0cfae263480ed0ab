"""The ``elasticdl`` command: groups of commands over two places where jobs are, and what they share.

    commands   what people type: start (train, run), jobs (which is meant; status, events, logs, scale, stop, delete), look (report, dashboard), zoo_image
    job_handle a job as the commands see it, and what comes of it until it is over: in a folder (`folder_job`), or in a namespace of a
               Kubernetes cluster (`namespace_job`)
    follow     following a job on a screen, the same for `train`, `run` and `status --follow`

The cluster's side is imported only when one is meant. It imports no framework and no Horovod, so that it starts in a fraction of a
second; what needs a framework is done by the processes that it starts. The master is imported by a command that starts a job on this
machine, as it is the job's master. Nothing imports this package.
"""
