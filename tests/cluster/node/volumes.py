"""A pod's volumes as folders, and where a container finds them.

`<pod>/volumes/<name>` is a volume; `<pod>/<container>/root` mirrors the container's file system and holds a link for
each of its mounts.
"""

from __future__ import annotations

import base64
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

from tests.cluster.node.api import Api, ApiError, Json
from tests.cluster.node.reporter import PodRef

SERVICE_ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"


class Unready(Exception):
    """Something that a container needs is not there yet; ``reason`` is the kubelet's word for it."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Sources:
    """What volumes and environments are filled from: objects that the pod names, and the pod itself."""

    def __init__(self, api: Api, pod: Json, facts: Mapping[str, str]) -> None:
        self._api = api
        self._pod = pod
        self._facts = facts

    def entries(self, kind: str, reference: Json) -> dict[str, bytes]:
        """The content of a Secret (``secrets``) or ConfigMap (``configmaps``); empty if it may be missing and is."""
        namespace, name = PodRef.of(self._pod).namespace, reference.get("name") or reference.get("secretName")
        try:
            found = self._api.get(f"/api/v1/namespaces/{namespace}/{kind}/{name}")
        except ApiError as error:
            # A node is refused what no pod of it names; it may not have been told yet that one does.
            if error.status not in (403, 404):
                raise
            if reference.get("optional") and error.status == 404:
                return {}
            raise Unready("CreateContainerConfigError", f'{kind[:-1]} "{name}" not found') from error
        data, binary = found.get("data") or {}, found.get("binaryData") or {}
        if kind == "secrets":
            return {key: base64.b64decode(value) for key, value in data.items()}
        return {key: value.encode() for key, value in data.items()} | {
            key: base64.b64decode(value) for key, value in binary.items()
        }

    def field(self, path: str) -> str:
        """The value of a ``fieldRef``."""
        metadata = self._pod["metadata"]
        of_map = re.fullmatch(r"metadata\.(labels|annotations)\['(.+)'\]", path)
        if of_map:
            return str((metadata.get(of_map[1]) or {}).get(of_map[2], ""))
        if path in ("metadata.labels", "metadata.annotations"):
            entries = metadata.get(path.removeprefix("metadata.")) or {}
            return "\n".join(f'{key}="{value}"' for key, value in sorted(entries.items()))
        if path in ("metadata.name", "metadata.namespace", "metadata.uid"):
            return str(metadata[path.removeprefix("metadata.")])
        if path in ("spec.nodeName", "spec.serviceAccountName"):
            return str(self._pod["spec"].get(path.removeprefix("spec."), ""))
        if path in self._facts:
            return self._facts[path]
        raise Unready("CreateContainerConfigError", f"this node knows no field {path!r}")

    def token(self, projection: Json) -> bytes:
        """A token of the pod's service account that dies with the pod."""
        ref = PodRef.of(self._pod)
        bound = {"apiVersion": "v1", "kind": "Pod", "name": ref.name, "uid": ref.uid}
        spec = {"expirationSeconds": projection.get("expirationSeconds", 3600), "boundObjectRef": bound}
        spec["audiences"] = [projection["audience"]] if projection.get("audience") else []
        account = self._pod["spec"].get("serviceAccountName", "default")
        path = f"/api/v1/namespaces/{ref.namespace}/serviceaccounts/{account}/token"
        request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec}
        return str(self._api.create(path, request)["status"]["token"]).encode()

    def claimed_path(self, claim: str) -> str:
        """The folder behind a claim, if a volume of this machine is bound to it."""
        namespace = PodRef.of(self._pod).namespace
        found = self._api.get(f"/api/v1/namespaces/{namespace}/persistentvolumeclaims/{claim}")
        name = found["spec"].get("volumeName")
        volume = self._api.get(f"/api/v1/persistentvolumes/{name}") if name else {"spec": {}}
        if "hostPath" not in volume["spec"]:
            raise Unready("ContainerCreating", f'claim "{claim}" is not bound to a volume with a hostPath')
        return str(volume["spec"]["hostPath"]["path"])


def make_volume(volume: Json, folder: Path, sources: Sources) -> None:
    """Fill ``folder`` with a volume; a second call on a half-made one begins anew.

    Raises:
        Unready: what it is made from is not there.
    """
    if folder.is_symlink():
        folder.unlink()
    shutil.rmtree(folder, ignore_errors=True)
    if "hostPath" in volume or "persistentVolumeClaim" in volume:
        claim = volume.get("persistentVolumeClaim")
        path = Path(sources.claimed_path(claim["claimName"]) if claim else volume["hostPath"]["path"])
        if claim or volume["hostPath"].get("type") == "DirectoryOrCreate":
            path.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            raise Unready("ContainerCreating", f'hostPath "{path}" does not exist')
        folder.symlink_to(path)
        return
    folder.mkdir(parents=True)
    if "emptyDir" in volume:
        return
    projections = volume["projected"]["sources"] if "projected" in volume else [volume]
    for projection in projections:
        for name, content in _files(projection, sources).items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
            path.chmod(_mode(volume))


def _mode(volume: Json) -> int:
    # Another user than the node's does not exist here, and secrets do not become readable for the machine's others.
    kind = next(iter({"secret", "configMap", "projected", "downwardAPI"} & volume.keys()))
    return int(volume[kind].get("defaultMode", 0o644)) & 0o700


def _files(projection: Json, sources: Sources) -> dict[str, bytes]:
    if "serviceAccountToken" in projection:
        wanted = projection["serviceAccountToken"]
        return {wanted["path"]: sources.token(wanted)}
    if "downwardAPI" in projection:
        items = projection["downwardAPI"].get("items") or []
        return {item["path"]: sources.field(item["fieldRef"]["fieldPath"]).encode() for item in items}
    for key, kind in (("secret", "secrets"), ("configMap", "configmaps")):
        if key in projection:
            return _selected(sources.entries(kind, projection[key]), projection[key])
    raise Unready("ContainerCreating", f"this node knows no volume of the kind {sorted(projection.keys() - {'name'})}")


def _selected(entries: dict[str, bytes], reference: Json) -> dict[str, bytes]:
    items = reference.get("items")
    if not items:
        return entries
    missing = [item["key"] for item in items if item["key"] not in entries]
    if missing and not reference.get("optional"):
        raise Unready("ContainerCreating", f"references non-existent config key: {missing[0]}")
    return {item["path"]: entries[item["key"]] for item in items if item["key"] in entries}


def link_mounts(container: Json, volumes: Path, root: Path) -> dict[str, str]:
    """Make the container's view of its mounts anew; where each mount path really is."""
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    places = {}
    for mount in sorted(container.get("volumeMounts") or [], key=lambda each: len(each["mountPath"])):
        target = volumes / mount["name"] / mount.get("subPath", "")
        if mount.get("subPath") and not target.exists():
            target.mkdir(parents=True)
        place = root / mount["mountPath"].strip("/")
        if place.is_symlink() or any(parent.is_symlink() for parent in place.parents if root in parent.parents):
            raise Unready("CreateContainerError", f"this node cannot mount {mount['mountPath']} within another mount")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(os.path.relpath(target, place.parent))
        places[mount["mountPath"].rstrip("/")] = str(place)
    return places
