"""Everything that master and command line share of Kubernetes; the rest of the package does without it.

api_error     what may come of a request, in one line each
kubeconfig    where a cluster is, and as whom it is asked
client        the requests, over the connections of the official package ``kubernetes``
object_watch  list objects of one kind and follow their changes
job_pods      which pods are a job's, and a port of this machine that leads to its master
kueue         the end of a gang that Kueue has admitted
manifests     the objects of a job: pure functions of its specification
"""
