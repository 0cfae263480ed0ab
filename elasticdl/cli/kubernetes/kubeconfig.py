"""Where a job's cluster is: a kubeconfig's context or, within a pod, the pod's own service account."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kubernetes import client, config

from elasticdl.common.errors import UserError

DEFAULT_NAMESPACE = "default"
ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


@dataclass(frozen=True, slots=True)
class Place:
    """Where jobs are, as people say it; empty is what the kubeconfig says."""

    namespace: str = ""
    context: str = ""

    def __bool__(self) -> bool:
        return bool(self.namespace or self.context)

    @property
    def flags(self) -> str:
        """To be added to a command so that it finds the same place."""
        given = (("--namespace", self.namespace), ("--kube_context", self.context))
        return "".join(f" {flag} {value}" for flag, value in given if value)


def load(configuration: client.Configuration, context: str) -> str:
    """Fill the configuration; returns the namespace that goes with it.

    Raises:
        UserError: there is no kubeconfig, it can't be used, or there is no such context in it.
    """
    with _one_line_errors():
        namespace = _load(configuration, context)
    if not configuration.host.startswith(("https://", "http://")):
        raise UserError(f"the kubeconfig {_shown()} names the server {configuration.host}: it must begin with https://")
    return namespace


def is_configured(place: Place) -> bool:
    """Whether anything names a cluster, be it wrong."""
    return bool(place.context) or _in_a_pod() or _exists()


def _load(configuration: client.Configuration, context: str) -> str:
    if not context and _in_a_pod():
        config.load_incluster_config(client_configuration=configuration)
        return (ACCOUNT / "namespace").read_text().strip()
    if not _exists():
        raise UserError(f"no cluster is configured: there is no kubeconfig {_shown()}; KUBECONFIG can name another")
    contexts, active = config.list_kube_config_contexts(_kubeconfig())
    names = [each["name"] for each in contexts]
    if context and context not in names:
        raise UserError(f"there is no context {context} in the kubeconfig: it has {', '.join(names) or 'none'}")
    config.load_kube_config(_kubeconfig(), context=context or None, client_configuration=configuration)
    chosen = next(each for each in contexts if each["name"] == context) if context else active
    return str((chosen.get("context") or {}).get("namespace") or DEFAULT_NAMESPACE)


@contextlib.contextmanager
def _one_line_errors() -> Iterator[None]:
    try:
        yield
    except UserError:
        raise
    except config.ConfigException as error:
        raise UserError(f"no cluster is configured: {_one_line(error)}") from None
    except Exception as error:  # the client trips in any way over a file that is not what it takes it for
        raise UserError(f"the kubeconfig {_shown()} can't be read: {_one_line(error)}") from error


def _exists() -> bool:
    return any(Path(each).expanduser().is_file() for each in _shown().split(os.pathsep))


def _kubeconfig() -> str | None:
    """The client itself looks at the variable only when it is imported."""
    return os.environ.get("KUBECONFIG") or None


def _shown() -> str:
    return _kubeconfig() or str(Path("~/.kube/config").expanduser())


def _in_a_pod() -> bool:
    return _kubeconfig() is None and (ACCOUNT / "token").exists()


def _one_line(what: object) -> str:
    return " ".join(str(what).split())
