"""Jobs on a Kubernetes cluster, as the command line makes, follows and removes them; imported only for such a job."""
