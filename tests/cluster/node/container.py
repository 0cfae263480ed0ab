"""What a container of a pod is given: its volumes as folders, its environment and its command line.

`<pod>/volumes/<name>` is a volume; `<pod>/container/root` mirrors the container's file system and holds a link for
each of its mounts.
"""

from __future__ import annotations

import base64
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

from elasticdl.kube.client import ABSENT, FORBIDDEN, ApiError
from tests.cluster.api import Api, Json
from tests.cluster.credentials import write_kubeconfig
from tests.cluster.node.status import PodRef

_SERVICE_ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
# By how a volume or a variable names them, the kinds of objects that either is filled from.
_KINDS = {"secret": "secrets", "configMap": "configmaps", "secretRef": "secrets", "configMapRef": "configmaps"}
_KINDS |= {"secretKeyRef": "secrets", "configMapKeyRef": "configmaps"}


class Unready(Exception):
    """Something that a container needs is not there yet."""


class CannotStart(Exception):
    """The container's command cannot be run, now or later."""


class Sources:
    """What volumes and environments are filled from: objects that the pod names, and the pod itself."""

    def __init__(self, api: Api, pod: Json, facts: Mapping[str, str]) -> None:
        self._api = api
        self._pod = pod
        self._in = f"/api/v1/namespaces/{PodRef.of(pod).namespace}"
        own = {f"metadata.{name}": str(pod["metadata"][name]) for name in ("name", "namespace", "uid")}
        self._facts = {**own, "spec.nodeName": str(pod["spec"].get("nodeName", "")), **facts}

    def entries(self, how: str, name: str) -> dict[str, bytes]:
        """The content of a Secret or ConfigMap."""
        kind = _KINDS[how]
        try:
            found = self._api.ask("GET", f"{self._in}/{kind}/{name}")
        except ApiError as error:
            # A node is refused what no pod of it names; it may not have been told yet that one does.
            if error.status not in (FORBIDDEN, ABSENT):
                raise
            raise Unready(f'{kind[:-1]} "{name}" not found') from error
        data = found.get("data") or {}
        return {key: base64.b64decode(value) if kind == "secrets" else value.encode() for key, value in data.items()}

    def entry(self, how: str, name: str, key: str) -> bytes:
        found = self.entries(how, name)
        if key not in found:
            raise Unready(f"couldn't find key {key} in {_KINDS[how][:-1]} {name}")
        return found[key]

    def field(self, path: str) -> str:
        """The value of a ``fieldRef``."""
        if path not in self._facts:
            raise Unready(f"this node knows no field {path!r}")
        return self._facts[path]

    def token(self, projection: Json) -> bytes:
        """A token of the pod's service account that dies with the pod."""
        ref = PodRef.of(self._pod)
        bound = {"apiVersion": "v1", "kind": "Pod", "name": ref.name, "uid": ref.uid}
        seconds = projection.get("expirationSeconds", 3600)
        spec = {"expirationSeconds": seconds, "boundObjectRef": bound, "audiences": []}
        path = f"{self._in}/serviceaccounts/{self._pod['spec'].get('serviceAccountName', 'default')}/token"
        request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec}
        return str(self._api.ask("POST", path, request)["status"]["token"]).encode()

    def claimed_path(self, claim: str) -> Path:
        """The folder behind a claim, if a volume of this machine is bound to it."""
        name = self._api.ask("GET", f"{self._in}/persistentvolumeclaims/{claim}")["spec"].get("volumeName")
        volume = self._api.ask("GET", f"/api/v1/persistentvolumes/{name}") if name else {"spec": {}}
        if "hostPath" not in volume["spec"]:
            raise Unready(f'claim "{claim}" is not bound to a volume with a hostPath')
        path = Path(volume["spec"]["hostPath"]["path"])
        path.mkdir(parents=True, exist_ok=True)
        return path


def make_volume(volume: Json, folder: Path, sources: Sources) -> None:
    """Fill ``folder`` with a volume; a second call on a half-made one begins anew.

    Raises:
        Unready: what it is made from is not there.
    """
    shutil.rmtree(folder, ignore_errors=True)
    if claim := volume.get("persistentVolumeClaim"):
        folder.symlink_to(sources.claimed_path(claim["claimName"]))
        return
    if host := volume.get("hostPath"):
        path = Path(host["path"])
        if host.get("type") == "DirectoryOrCreate":
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
    how = "secret" if "secret" in projection else "configMap"
    reference = projection[how]
    name = reference.get("name") or reference["secretName"]
    if items := reference.get("items"):
        return {item["path"]: sources.entry(how, name, item["key"]) for item in items}
    return sources.entries(how, name)


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


def invocation(
    container: Json, sources: Sources, given: Mapping[str, str], places: Mapping[str, str], root: Path
) -> tuple[list[str], dict[str, str], Path]:
    """Command, environment and folder of the container's process, with ``given`` as the image's and the node's own environment.

    Raises:
        Unready: a Secret or ConfigMap of the environment is not there.
        CannotStart: there is no such program.
    """

    def real(text: str) -> str:
        """With the real places of mounts."""
        longest_first = sorted(places, key=len, reverse=True)
        path = r"(?<![\w./-])(" + "|".join(map(re.escape, longest_first)) + r")(?![\w.-])"
        return re.sub(path, lambda found: places[found[1]], text) if places else text

    env = {**given, "ELASTICDL_POD_ROOT": str(root)}
    if _SERVICE_ACCOUNT in places:  # the files that a client has at a fixed path in a real container
        account = Path(places[_SERVICE_ACCOUNT])
        server = f"https://{given['KUBERNETES_SERVICE_HOST']}:{given['KUBERNETES_SERVICE_PORT']}"
        namespace, user = (account / "namespace").read_text(), {"tokenFile": str(account / "token")}
        file = write_kubeconfig(root.parent / "kubeconfig", server, account / "ca.crt", "pod", user, namespace)
        env["KUBECONFIG"] = str(file)
    env |= {name: real(value) for name, value in _declared(container, sources).items()}
    command = [real(_expanded(word, env)) for word in (container.get("command") or []) + (container.get("args") or [])]
    if not command:
        raise CannotStart("no command specified")
    if shutil.which(command[0], path=env.get("PATH")) is None:
        raise CannotStart(f'exec: "{command[0]}": executable file not found in $PATH')
    folder = Path(real(container.get("workingDir") or "/"))
    return command, env, folder if folder.is_dir() and str(folder) != "/" else root


def _declared(container: Json, sources: Sources) -> dict[str, str]:
    """`envFrom` and `env` of the manifest; later ones see earlier ones."""
    env: dict[str, str] = {}
    for source in container.get("envFrom") or []:
        how = "secretRef" if "secretRef" in source else "configMapRef"
        entries = sources.entries(how, source[how]["name"])
        env |= {source.get("prefix", "") + key: value.decode() for key, value in entries.items()}
    for entry in container.get("env") or []:
        if origin := entry.get("valueFrom"):
            ((how, what),) = origin.items()
            if how == "fieldRef":
                env[entry["name"]] = sources.field(what["fieldPath"])
            elif how in _KINDS:
                env[entry["name"]] = sources.entry(how, what["name"], what["key"]).decode()
            else:
                raise Unready(f"this node knows no value from {how}")
        else:
            env[entry["name"]] = _expanded(entry.get("value", ""), env)
    return env


def _expanded(text: str, env: Mapping[str, str]) -> str:
    """`$(NAME)` replaced as Kubernetes does: unknown names stay, `$$` is a dollar."""

    def replacement(found: re.Match[str]) -> str:
        return "$" if found[0] == "$$" else env.get(found[1], found[0])

    return re.sub(r"\$\$|\$\(([\w.-]+)\)", replacement, text)
