"""Jobs on a Kubernetes cluster, as the command line makes, follows and removes them.

    cluster_spec   the user's module that adapts pods and the service
    submission     all of a job's objects, or none
    cluster_run    what ``train`` and ``run`` do when there is an image: from the submission to the job's end
    cluster_job    a job as the commands see any job, and its deletion
    configured     whether there is a cluster
    job_streams    its journal and its logs

Imported only for a job that is on a cluster.
"""
