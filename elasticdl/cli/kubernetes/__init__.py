"""Jobs on a Kubernetes cluster, as the command line makes, follows and removes them.

    objects       pure: what a job consists of before any worker is there
    cluster_spec  the user's module that adapts pods and the service
    kubeconfig    where a cluster is, and as whom it is asked
    api           the requests that are made of a cluster, and their failures in one line each
    submit        all of a job's objects, or none
    pods          which pods are a job's
    port_forward  a port of this machine that leads to the master
    job           a job of a cluster, as the commands see any job
    journal, logs what a job writes, as far as it can still be had
    follow        a job on the screen, from its submission to its end
    delete        everything of a job, gone

Whatever knows the package ``kubernetes`` is here, and imported only for a job that is on a cluster.
"""
