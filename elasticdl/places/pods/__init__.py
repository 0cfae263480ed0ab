"""Workers as pods of a Kubernetes cluster; the rest of the master does not know that there is one."""
