"""What tests on a cluster say often: make this pod, wait until that is so."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import urllib3
from kubernetes import client

Result = TypeVar("Result")
# A `V1Pod`, whose fields are all optional to the type checker and all there in a pod that exists.
Pod = Any

_PATIENCE_S = 60.0
_POLL_S = 0.1
_PASSING = {410, 429, 500, 502, 503, 504}


def until(
    ready: Callable[[dict[str, Any]], Result], what: str, listing: Callable[..., Any], *where: Any, **query: Any
) -> Result:
    """Look at what ``listing`` lists, by name, until ``ready`` returns something true; return that.

    Raises:
        AssertionError: it did not within a minute; the message has ``what`` and the last state.
    """
    deadline = time.monotonic() + _PATIENCE_S
    seen: dict[str, Any] = {}
    while time.monotonic() < deadline:
        try:
            seen = {each.metadata.name: each for each in listing(*where, **query).items}
            if result := ready(seen):
                return result
        except client.ApiException as error:
            if error.status not in _PASSING:
                raise
        except urllib3.exceptions.HTTPError:
            pass  # the server is being started again
        time.sleep(_POLL_S)
    there = {name: getattr(getattr(each, "status", None), "phase", None) for name, each in seen.items()}
    raise AssertionError(f"not in {_PATIENCE_S:g} s: {what}; there is: {there}")


def is_running(pod: Pod | None) -> bool:
    return pod is not None and pod.status.phase == "Running" and not pod.metadata.deletion_timestamp


def shell(script: str) -> dict[str, Any]:
    """The part of a container that runs ``script``."""
    return {"command": ["bash", "-c", script]}


@contextlib.contextmanager
def new_namespace(api: client.ApiClient) -> Iterator[str]:
    """A namespace in which pods can be created; all of it goes at the end."""
    core = client.CoreV1Api(api)
    name = f"test-{secrets.token_hex(4)}"
    core.create_namespace(client.V1Namespace(metadata=client.V1ObjectMeta(name=name)))
    try:
        until(lambda found: "default" in found, "default service account", core.list_namespaced_service_account, name)
        yield name
    finally:
        core.delete_collection_namespaced_pod(name, grace_period_seconds=0)
        core.delete_namespace(name)


@dataclass(frozen=True, slots=True)
class Pods:
    """The pods of one namespace."""

    core: client.CoreV1Api
    namespace: str
    image: str

    def create(
        self, name: str, main: dict[str, Any], *, gpus: int = 0, labels: dict[str, str] | None = None, **spec: Any
    ) -> None:
        """A pod with one container, ``main``, that is not restarted; ``spec`` adds to the pod's."""
        one = {"name": "main", "image": self.image, **main}
        if gpus:
            one["resources"] = {"limits": {"nvidia.com/gpu": str(gpus)}}
        metadata = {"name": name, "labels": labels or {}}
        pod: Pod = {"metadata": metadata, "spec": {"restartPolicy": "Never", "containers": [one], **spec}}
        self.core.create_namespaced_pod(self.namespace, pod)

    def delete(self, name: str, **options: Any) -> None:
        self.core.delete_namespaced_pod(name, self.namespace, **options)

    def running(self, name: str) -> Pod:
        """The pod, once it runs."""

        def ready(seen: dict[str, Pod]) -> Pod:
            return seen[name] if is_running(seen.get(name)) else None

        return until(ready, f"{name} running", self.core.list_namespaced_pod, self.namespace)

    def gone(self, name: str) -> None:
        until(lambda seen: name not in seen, f"{name} gone", self.core.list_namespaced_pod, self.namespace)

    def said(self, name: str, words: str) -> None:
        """Wait until a container that runs has written ``words``; its log is followed meanwhile."""
        self.running(name)
        how: Any = {"follow": True, "_preload_content": False, "_request_timeout": _PATIENCE_S}
        stream: Any = self.core.read_namespaced_pod_log(name, self.namespace, **how)
        text = b""
        with contextlib.closing(stream):
            while words.encode() not in text:
                chunk = stream.read1()
                assert chunk, f"{name} ended and did not say {words!r} but {text!r}"
                text += chunk
