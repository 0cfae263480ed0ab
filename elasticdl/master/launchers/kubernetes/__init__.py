"""Workers as pods of a Kubernetes cluster.

    worker_pods   pure: the manifest of a worker's pod
    judge         pure: what a pod's status, and the events about it, say of the worker
    ledger        pure: what is to be reported, from all that was seen
    notices       pure: what is worth an event on the Job, and how few there may be
    ports         the requests that a master makes
    task_runner   blocking requests in threads, and tasks that end with the launcher
    pod_informer  a list of the job's pods, and the watches that go on from it
    launcher      the port of `elasticdl.master.launchers.base`
    announcer     tells the notices
    finalize      writes down how the job has ended

The rest of the master does not know that there is a cluster.
"""
