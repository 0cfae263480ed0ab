"""The Kubernetes objects of a job as plain mappings: pure functions of the job's specification.

Whoever submits a job and the master that runs it both import this; nothing here talks to a cluster or knows its client.
"""
