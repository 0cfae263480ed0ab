"""Jobs on a cluster under test, as the command line has them."""

from __future__ import annotations

import json
from contextlib import contextmanager

from kubernetes import client
from running_job import run_cli

from elasticdl.kube.client import Client
from tests.waiting import wait_until

# Nothing should take this long, even on a busy machine; a test that waits for less would only be flaky.
DEADLINE = 200.0
# What a job consists of. Every namespace has some of its own: of those only the job's are meant.
KINDS = ("Pod", "Job", "Service", "Secret", "ConfigMap", "ServiceAccount", "Role", "RoleBinding", "NetworkPolicy")


class CommandLine:
    """Runs `elasticdl ARGUMENTS` in a namespace of a cluster, to its end."""

    def __init__(self, kubeconfig, namespace, home):
        self._where, self._home = ("--namespace", namespace), home
        self.env = {"KUBECONFIG": str(kubeconfig)}

    def __call__(self, command, *argv):
        return run_cli(self._home, command, *self._where, *argv, timeout=DEADLINE, env=self.env)

    def journal(self, job, event=""):
        """All entries, or those of one kind."""
        entries = map(json.loads, self("events", job, "--json").stdout.splitlines())
        return [entry for entry in entries if event in ("", entry["event"])]

    def delete(self, job):
        done = self("delete", job)
        assert done.stdout == f"job {job} deleted\n", done.stderr


def objects_in(cluster, namespace):
    """All that is in a namespace, by kind and name."""
    place = Client(cluster.client(), namespace)
    return {f"{kind}: {each['metadata']['name']}" for kind in KINDS for each in place.list(kind)}


@contextmanager
def priority_class(cluster, name, value):
    """It belongs to no namespace."""
    scheduling = client.SchedulingV1Api(cluster.client())
    scheduling.create_priority_class({"metadata": {"name": name}, "value": value})
    try:
        yield
    finally:
        scheduling.delete_priority_class(name)


def wait_for(what, condition, describe=str, poll=0.1):
    """What ``condition`` returns, once that is true."""
    return wait_until(condition, lambda: f"{what}\n{describe()}", DEADLINE, poll)
