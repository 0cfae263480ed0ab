"""What every other package may import, and what imports none of them.

The job specification, errors, the journal, the layout of a job's directory and the environment variables
that connect a worker with its master. No gRPC, no framework, no threads.
"""
