"""A pod's volumes as folders, and where a container finds them.

`<pod>/volumes/<name>` is a volume; `<pod>/<container>/root` mirrors the container's file system and holds a link for
each of its mounts.
"""

from __future__ import annotations

import base64
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from elasticdl.kube.client import ABSENT, FORBIDDEN, ApiError
from tests.cluster.api import Api, Json
from tests.cluster.node.status import PodRef

SERVICE_ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"


class Unready(Exception):
    """Something that a container needs is not there yet."""


class Sources:
    """What volumes and environments are filled from: objects that the pod names, and the pod itself."""

    def __init__(self, api: Api, pod: Json, facts: Mapping[str, str]) -> None:
        self._api = api
        self._pod = pod
        self._in = f"/api/v1/namespaces/{PodRef.of(pod).namespace}"
        own = {f"metadata.{name}": str(pod["metadata"][name]) for name in ("name", "namespace", "uid")}
        self._facts = {**own, "spec.nodeName": str(pod["spec"].get("nodeName", "")), **facts}

    def entries(self, kind: str, reference: Json) -> dict[str, bytes]:
        """The content of a Secret (``secrets``) or ConfigMap (``configmaps``); empty if it may be missing and is."""
        name = reference.get("name") or reference.get("secretName")
        try:
            found = self._api.ask("GET", f"{self._in}/{kind}/{name}")
        except ApiError as error:
            # A node is refused what no pod of it names; it may not have been told yet that one does.
            if error.status not in (FORBIDDEN, ABSENT):
                raise
            if reference.get("optional") and error.status == ABSENT:
                return {}
            raise Unready(f'{kind[:-1]} "{name}" not found') from error
        data = found.get("data") or {}
        return {key: base64.b64decode(value) if kind == "secrets" else value.encode() for key, value in data.items()}

    def field(self, path: str) -> str:
        """The value of a ``fieldRef``."""
        if path not in self._facts:
            raise Unready(f"this node knows no field {path!r}")
        return self._facts[path]

    def token(self, projection: Json) -> bytes:
        """A token of the pod's service account that dies with the pod."""
        ref = PodRef.of(self._pod)
        bound = {"apiVersion": "v1", "kind": "Pod", "name": ref.name, "uid": ref.uid}
        spec = {"expirationSeconds": projection.get("expirationSeconds", 3600), "boundObjectRef": bound}
        spec["audiences"] = [projection["audience"]] if projection.get("audience") else []
        path = f"{self._in}/serviceaccounts/{self._pod['spec'].get('serviceAccountName', 'default')}/token"
        request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec}
        return str(self._api.ask("POST", path, request)["status"]["token"]).encode()

    def claimed_path(self, claim: str) -> str:
        """The folder behind a claim, if a volume of this machine is bound to it."""
        name = self._api.ask("GET", f"{self._in}/persistentvolumeclaims/{claim}")["spec"].get("volumeName")
        volume = self._api.ask("GET", f"/api/v1/persistentvolumes/{name}") if name else {"spec": {}}
        if "hostPath" not in volume["spec"]:
            raise Unready(f'claim "{claim}" is not bound to a volume with a hostPath')
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
            raise Unready(f'hostPath "{path}" does not exist')
        folder.symlink_to(path)
        return
    folder.mkdir(parents=True)
    if "emptyDir" in volume:
        return
    whole = next(volume[kind] for kind in ("secret", "configMap", "projected", "downwardAPI") if kind in volume)
    # Another user than the node's does not exist here, and secrets do not become readable for the machine's others.
    mode = int(whole.get("defaultMode", 0o644)) & 0o700
    for projection in whole["sources"] if "projected" in volume else [volume]:
        for name, content in _files(projection, sources).items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
            path.chmod(mode)


def _files(projection: Json, sources: Sources) -> dict[str, bytes]:
    if wanted := projection.get("serviceAccountToken"):
        return {wanted["path"]: sources.token(wanted)}
    if wanted := projection.get("downwardAPI"):
        return {item["path"]: sources.field(item["fieldRef"]["fieldPath"]).encode() for item in wanted["items"]}
    name, kind = ("secret", "secrets") if "secret" in projection else ("configMap", "configmaps")
    entries, items = sources.entries(kind, projection[name]), projection[name].get("items")
    if not items:
        return entries
    if missing := [item["key"] for item in items if item["key"] not in entries]:
        raise Unready(f"references non-existent config key: {missing[0]}")
    return {item["path"]: entries[item["key"]] for item in items}


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
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(os.path.relpath(target, place.parent))
        places[mount["mountPath"].rstrip("/")] = str(place)
    return places
