"""Jobs on a Kubernetes cluster, as the command line makes, follows and removes them.

    submission      all of a job's objects, or none
    cluster_run     what ``train`` and ``run`` do when there is an image: from the submission to the job's end
    namespace_job   a job, which jobs there are, and removing one
    pod_logs        its logs, and what its workers print, as it comes

Imported only for a job that is on a cluster.
"""
