"""The master of one job: it decides who is in the world, starts and replaces workers, and keeps the job's history.

The core (`events`, `instructions`, `settings`, `world`, `liveness`, `fleet`, `job`) is pure: an event and the time go
in, instructions come out. It imports no gRPC, thread, socket, clock or protobuf. Everything else here is the edge,
which turns messages, exits of processes and timers into events and carries instructions out. Only `main` composes.

Nothing here imports `elasticdl.elastic` or `elasticdl.worker`, nor they this; they meet in `elasticdl.proto`.
"""
