"""The ``elasticdl`` command: groups of commands over two places where jobs run, and what they share.

    commands   what people type: start (train, run), jobs (status, events, logs, scale, stop, delete), zoo_image
    local      jobs of this machine, found by their directory (`elasticdl.job.jobdir`)
    cluster    jobs on a Kubernetes cluster; imported only when one is meant
    job_handle what commands know of a job, wherever it is

It imports no framework and no Horovod, so that it starts in a fraction of a second; what needs a framework is done by
the processes that it starts. Nothing imports this package.
"""
