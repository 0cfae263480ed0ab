"""Where a job's cluster is: a kubeconfig's context or, within a pod that has none, the pod's own service account, as for kubectl."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from elasticdl.common.errors import UserError
from elasticdl.common.reason import flat

if TYPE_CHECKING:
    from kubernetes import client

DEFAULT_NAMESPACE = "default"
ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


@dataclass(frozen=True, slots=True)
class ClusterTarget:
    """Where jobs are, as people say it; empty is what the kubeconfig says."""

    namespace: str = ""
    context: str = ""
    file: str = ""  # instead of $KUBECONFIG; for programs

    @property
    def flags(self) -> str:
        """To be added to a command so that it finds the same place."""
        given = (("--namespace", self.namespace), ("--kube_context", self.context))
        return "".join(f" {flag} {value}" for flag, value in given if value)


def load(configuration: client.Configuration, place: ClusterTarget, *, own_account: bool) -> str:
    """Fill the configuration; returns the namespace that goes with it. ``own_account``: as in `client.connect`.

    Raises:
        UserError: there is no kubeconfig, it can't be used, or there is no such context in it.
    """
    from kubernetes import config  # here: whether a cluster is configured is asked where the package is not needed

    files = _files(place)
    shown = f"kubeconfig {files}"
    try:
        if not place.context and _has_account() and (own_account or not _exists(place)):
            config.load_incluster_config(client_configuration=configuration)
            return (ACCOUNT / "namespace").read_text().strip()
        if not _exists(place):
            raise UserError(f"no cluster is configured: there is no {shown}; KUBECONFIG can name another")
        contexts, active = config.list_kube_config_contexts(files)
        names = [each["name"] for each in contexts]
        if place.context and place.context not in names:
            has = ", ".join(names) or "none"
            raise UserError(f"there is no context {place.context} in the kubeconfig: it has {has}")
        config.load_kube_config(files, context=place.context or None, client_configuration=configuration)
        chosen = next(each for each in contexts if each["name"] == place.context) if place.context else active
        namespace = str((chosen.get("context") or {}).get("namespace") or DEFAULT_NAMESPACE)
    except UserError:
        raise
    except config.ConfigException as error:
        raise UserError(f"no cluster is configured: {flat(error)}") from None
    except Exception as error:  # the client trips in any way over a file that is not what it takes it for
        raise UserError(f"the {shown} can't be read: {flat(error)}") from error
    return namespace


def is_configured(place: ClusterTarget) -> bool:
    """Whether there is a kubeconfig or an account, valid or not."""
    return bool(place.context) or _has_account() or _exists(place)


def _exists(place: ClusterTarget) -> bool:
    return any(Path(each).expanduser().is_file() for each in _files(place).split(os.pathsep))


def _files(place: ClusterTarget) -> str:
    """The client itself looks at the variable only when it is imported."""
    return place.file or os.environ.get("KUBECONFIG") or str(Path("~/.kube/config").expanduser())


def _has_account() -> bool:
    return (ACCOUNT / "token").exists()
