"""The ``elasticdl`` command: one module per command, and what they share.

It finds jobs by their directory (`elasticdl.common.jobdir`) and speaks gRPC to their masters (`client`).
It imports ``common`` and ``proto`` only: no framework and no Horovod, so that it starts in a fraction of a
second; what needs a framework is done by the processes that it starts. Nothing imports this package.
"""
