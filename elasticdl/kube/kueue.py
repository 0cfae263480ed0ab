"""The end of a gang that Kueue has admitted: without it Kueue keeps pods that have failed, and their quota, for others to come."""

from __future__ import annotations

from collections.abc import Iterable

from elasticdl.kube.api_error import ABSENT, NotDoneError
from elasticdl.kube.client import Client, Object
from elasticdl.kube.manifests import kueue_group


def end_group(client: Client, pods: Iterable[Object]) -> None:
    """No others will come. Pods of no such group are let be, and those of which this is said already.

    Raises:
        ApiError: the cluster does not take it.
    """
    for pod in filter(kueue_group.is_kept, pods):
        try:
            client.patch("Pod", pod["metadata"]["name"], kueue_group.OVER)
        except NotDoneError as error:
            if error.status != ABSENT:
                raise
