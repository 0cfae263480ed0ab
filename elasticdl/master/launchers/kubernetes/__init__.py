"""Workers as pods of a Kubernetes cluster.

    worker_pods       pure: the manifest of a worker's pod
    judge             pure: what a pod's status, and the events about it, say of the worker
    ledger            pure: what is to be reported, from all that was seen
    ports             the requests that a master makes
    launcher          the port of `elasticdl.master.launchers.base`
    announcer         tells what is worth an event on the Job, and how few there may be
    state_config_map  the snapshot, the journal and the status, and how the job has ended

The rest of the master does not know that there is a cluster.
"""
