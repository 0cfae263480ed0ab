"""Pods of a Kubernetes cluster as places for workers; the rest of the master does not know that there is one."""
