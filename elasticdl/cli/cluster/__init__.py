"""Jobs on a Kubernetes cluster, as the command line makes, follows and removes them.

    cluster_spec   the user's module that adapts pods and the service
    submission     all of a job's objects, or none
    cluster_run    what ``train`` and ``run`` do when there is an image
    cluster_follow a job on the screen, from its submission to its end
    cluster_job    a job as the commands see any job
    job_streams    its journal and its logs
    master_pod     why its master does not run
    deletion       everything of it, gone

Imported only for a job that is on a cluster.
"""
