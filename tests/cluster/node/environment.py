"""The command line and the environment of a container."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.api import Json
from tests.cluster.credentials import write_kubeconfig
from tests.cluster.node.volumes import SERVICE_ACCOUNT, Sources, Unready


class CannotStart(Exception):
    """The container's command cannot be run, now or later."""


@dataclass(frozen=True, slots=True)
class Invocation:
    """All that is needed to start a container's process."""

    command: list[str]
    env: dict[str, str]
    folder: Path


def invocation(
    container: Json, sources: Sources, given: Mapping[str, str], places: Mapping[str, str], root: Path
) -> Invocation:
    """What to run, with ``given`` as the image's and the node's own environment.

    Raises:
        Unready: a Secret or ConfigMap of the environment is not there.
        CannotStart: there is no such program.
    """
    real = _replacer(places)
    env = {**given, "ELASTICDL_POD_ROOT": str(root)}
    if SERVICE_ACCOUNT in places:  # the files that a client has at a fixed path in a real container
        account = Path(places[SERVICE_ACCOUNT])
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
    return Invocation(command, env, folder if folder.is_dir() and str(folder) != "/" else root)


def _replacer(places: Mapping[str, str]) -> Callable[[str], str]:
    """A function that puts the real places of mounts into a text."""
    if not places:
        return lambda text: text
    longest_first = sorted(places, key=len, reverse=True)
    path = re.compile(r"(?<![\w./-])(" + "|".join(map(re.escape, longest_first)) + r")(?![\w.-])")
    return lambda text: path.sub(lambda found: places[found[1]], text)


def _declared(container: Json, sources: Sources) -> dict[str, str]:
    """`envFrom` and `env` of the manifest; later ones see earlier ones."""
    env: dict[str, str] = {}
    for source in container.get("envFrom") or []:
        kind, reference = ("secrets", "secretRef") if "secretRef" in source else ("configmaps", "configMapRef")
        entries = sources.entries(kind, source[reference])
        env |= {source.get("prefix", "") + key: value.decode() for key, value in entries.items()}
    for entry in container.get("env") or []:
        if "valueFrom" in entry:
            value = _value_from(entry["valueFrom"], sources)
        else:
            value = _expanded(entry.get("value", ""), env)
        if value is not None:
            env[entry["name"]] = value
    return env


def _value_from(origin: Json, sources: Sources) -> str | None:
    if "fieldRef" in origin:
        return sources.field(origin["fieldRef"]["fieldPath"])
    for name, kind in (("secretKeyRef", "secrets"), ("configMapKeyRef", "configmaps")):
        if name in origin:
            reference = origin[name]
            value = sources.entries(kind, reference).get(reference["key"])
            if value is None and not reference.get("optional"):
                raise Unready(f"couldn't find key {reference['key']} in {kind[:-1]} {reference['name']}")
            return None if value is None else value.decode()
    raise Unready(f"this node knows no value from {sorted(origin)}")


def _expanded(text: str, env: Mapping[str, str]) -> str:
    """`$(NAME)` replaced as Kubernetes does: unknown names stay, `$$` is a dollar."""

    def replacement(found: re.Match[str]) -> str:
        return "$" if found[0] == "$$" else env.get(found[1], found[0])

    return re.sub(r"\$\$|\$\(([\w.-]+)\)", replacement, text)
