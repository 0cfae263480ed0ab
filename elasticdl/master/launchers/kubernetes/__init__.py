"""Workers as pods of a Kubernetes cluster.

    pods      pure: the manifest of a worker's pod
    judge     pure: what a pod's status, and the events about it, say of the worker
    ledger    pure: what is to be reported, from all that was seen
    watch     list and watch, through everything that may interrupt it; a thread
    api       the few requests that are made, and their failures; the only module that knows the official client
    sight     all that is seen of a job's pods: a list, and the watches that go on from it
    launcher  the port
    notices   pure: what is worth an event on the Job, and how few there may be
    announcer tells them

Whether a cluster has more than this to say, the rest of the master does not know: nothing else imports the client.
"""
