"""Why a container can't begin because of its image or its user, from its status: pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# After which a kubelet goes on trying: the registry may be back soon, or the image be pushed.
_MAY_PASS = ("ErrImagePull", "ImagePullBackOff", "ImageInspectError", "RegistryUnavailable")
_WILL_NOT = ("InvalidImageName", "ErrImageNeverPull")
_AS_ROOT = ("runAsNonRoot", "non-root policy")
_REMEDY = "end the image's Dockerfile with `USER 1000`, or give such a spec.securityContext.runAsUser in --pod_template"


@dataclass(frozen=True, slots=True)
class ImageTrouble:
    """``lasting``: it takes a change by a person."""

    reason: str
    lasting: bool


def image_trouble(waiting: Mapping[str, Any]) -> ImageTrouble | None:
    """What the ``waiting`` state of a container says of its image; None if that is not what it waits for."""
    kind, message = str(waiting.get("reason") or ""), " ".join(str(waiting.get("message") or "").split())
    if kind in _MAY_PASS or kind in _WILL_NOT:
        return ImageTrouble(f"the image can't be pulled: {message or kind}", kind in _WILL_NOT)
    if any(words in message for words in _AS_ROOT):  # also for a user whose number the node does not know
        said, _, _ = message.partition(" (pod: ")
        return ImageTrouble(f"nothing may run as root here: {said}; {_REMEDY}", lasting=True)
    return None
