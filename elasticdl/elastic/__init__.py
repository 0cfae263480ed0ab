"""The library that a training script imports: membership, the elastic loop, the batch plan, commit and restore.

Framework-free modules live here; what differs between frameworks is in ``elastic.torch`` (and its twins).
Nothing here imports the master or the worker. Only ``elastic.horovod_collective`` imports horovod, when it is asked to.
"""
