"""Everything that master and command line share of Kubernetes; the rest of the package does without it.

kubeconfig    where a cluster is, and as whom it is asked
client        the requests, over the connections of the official package ``kubernetes``, and following the objects of one kind
job_pods      which pods are a job's, and a port of this machine that leads to its master
names         what its objects are called
manifests     the objects of a job: pure functions of its specification
"""
