"""Images without a registry or a builder: archives as `docker save` writes them, with one small layer.

The layer of the test image holds hardly more than names. Its Python, the packages and this repository are the machine's
own, which `runtime_spec` has the containers see, read-only.
"""

from __future__ import annotations

import hashlib
import io
import json
import sys
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TEST_IMAGE = "local.test/elasticdl:1"
PAUSE_IMAGE = "local.test/pause:1"
REPOSITORY = Path(__file__).resolve().parents[3]
# Not below /tmp, over which jobs have a volume.
REPOSITORY_INSIDE = "/opt/elasticdl"
ENVIRONMENT_INSIDE = "/opt/venv"
_USER = "1000:1000"
_PASSWD = "root:x:0:0:root:/root:/bin/sh\ntrainer:x:1000:1000::/tmp:/bin/sh\n"
_MODE = 0o755
_SHARED_MODE = 0o1777


@dataclass(frozen=True, slots=True)
class Image:
    """What an archive is made of: paths in the image are relative to its root."""

    name: str
    config: Mapping[str, Any]
    folders: Sequence[str] = ()
    links: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, bytes] = field(default_factory=dict)

    def write(self, path: Path) -> None:
        layer = self._layer()
        digest = hashlib.sha256(layer).hexdigest()
        layers = {"type": "layers", "diff_ids": [f"sha256:{digest}"]}
        config = {"architecture": "amd64", "os": "linux", "config": self.config, "rootfs": layers}
        content = json.dumps(config).encode()
        identity = f"{hashlib.sha256(content).hexdigest()}.json"
        listed = [{"Config": identity, "RepoTags": [self.name], "Layers": [f"{digest}/layer.tar"]}]
        with tarfile.open(path, "w") as archive:
            _add(archive, identity, content=content)
            _add(archive, f"{digest}/layer.tar", content=layer)
            _add(archive, "manifest.json", content=json.dumps(listed).encode())

    def _layer(self) -> bytes:
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as layer:
            for folder in self.folders:
                _add(layer, folder, tarfile.DIRTYPE, _SHARED_MODE if folder == "tmp" else _MODE)
            for place, target in self.links.items():
                _add(layer, place, tarfile.SYMTYPE, target=target)
            for place, content in self.files.items():
                _add(layer, place, content=content)
        return buffer.getvalue()


def _add(
    archive: tarfile.TarFile,
    name: str,
    kind: bytes = tarfile.REGTYPE,
    mode: int = _MODE,
    *,
    target: str = "",
    content: bytes = b"",
) -> None:
    entry = tarfile.TarInfo(name)
    entry.type, entry.mode, entry.linkname, entry.size = kind, mode, target, len(content)
    archive.addfile(entry, io.BytesIO(content))


def pause_image(busybox: Path) -> Image:
    """The process that holds a pod's namespaces: it waits."""
    config = {"Entrypoint": ["/busybox", "sleep", "2147483647"]}
    return Image(PAUSE_IMAGE, config, files={"busybox": busybox.read_bytes()})


def elasticdl_image() -> Image:
    """A shell and a Python with this repository in it, for a user who is not root."""
    path = f"{ENVIRONMENT_INSIDE}/bin:{Path(sys.base_prefix) / 'bin'}:/usr/local/bin:/usr/bin:/bin"
    variables = {"PATH": path, "PYTHONPATH": REPOSITORY_INSIDE, "LANG": "C.UTF-8"}
    config = {"User": _USER, "Env": [f"{name}={value}" for name, value in variables.items()], "WorkingDir": "/"}
    return Image(
        TEST_IMAGE,
        config,
        folders=["usr", "tmp", "proc", "sys", "dev", "etc", "opt", "root"],
        links={place: f"usr/{place}" for place in ("bin", "lib", "lib64", "sbin") if Path(f"/{place}").is_symlink()},
        files={
            "etc/passwd": _PASSWD.encode(),
            "etc/group": b"root:x:0:\ntrainer:x:1000:\n",
            "etc/nsswitch.conf": b"hosts: files dns\n",
            "etc/ld.so.cache": Path("/etc/ld.so.cache").read_bytes(),
        },
    )


def runtime_spec(default: dict[str, Any], files_limit: int) -> dict[str, Any]:
    """containerd's default for every container, with the machine's own Python in it.

    ``files_limit``: how many files a container may open; more than this process may is refused.
    """
    default["linux"].pop("cgroupsPath", None)
    own = {sys.prefix: ENVIRONMENT_INSIDE, str(REPOSITORY): REPOSITORY_INSIDE}
    seen = {"/usr": "/usr", sys.base_prefix: sys.base_prefix, **own}
    for source, destination in seen.items():
        mount = {"destination": destination, "source": source, "type": "bind", "options": ["rbind", "ro"]}
        default["mounts"].append(mount)
    default["process"]["rlimits"] = [{"type": "RLIMIT_NOFILE", "hard": files_limit, "soft": files_limit}]
    return default
