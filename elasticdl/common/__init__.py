"""What every other package may import, and what imports none of them.

The job specification, errors, the journal, the layout of a job's directory, and what connects a client or a worker
with its master: environment variables, credentials, certificates. Only `channel` imports gRPC; no framework, no threads.
"""
