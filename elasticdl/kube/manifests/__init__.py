"""The Kubernetes objects of a job as plain mappings: pure functions of the job's specification.

The command line submits them and the master adds the workers' pods. Nothing here talks to a cluster or knows its client.
"""
