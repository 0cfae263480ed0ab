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
from pathlib import Path
from typing import Any

TEST_IMAGE = "local.test/elasticdl:1"
PAUSE_IMAGE = "local.test/pause:1"
REPOSITORY = Path(__file__).resolve().parents[3]
# Not below /tmp, over which jobs have a volume.
REPOSITORY_INSIDE = "/opt/elasticdl"
ENVIRONMENT_INSIDE = "/opt/venv"
_PASSWD = b"root:x:0:0:root:/root:/bin/sh\ntrainer:x:1000:1000::/tmp:/bin/sh\n"


def write_pause_image(path: Path, busybox: Path) -> None:
    """The process that holds a pod's namespaces: it waits."""
    config = {"Entrypoint": ["/busybox", "sleep", "2147483647"]}
    _write(path, PAUSE_IMAGE, config, [_entry("busybox", busybox.read_bytes())])


def write_elasticdl_image(path: Path) -> None:
    """A shell and a Python with this repository in it, for a user who is not root."""
    programs = f"{ENVIRONMENT_INSIDE}/bin:{Path(sys.base_prefix) / 'bin'}:/usr/local/bin:/usr/bin:/bin"
    variables = {"PATH": programs, "PYTHONPATH": REPOSITORY_INSIDE, "LANG": "C.UTF-8"}
    config = {"User": "1000:1000", "Env": [f"{name}={value}" for name, value in variables.items()], "WorkingDir": "/"}
    files = {
        "etc/passwd": _PASSWD,
        "etc/group": b"root:x:0:\ntrainer:x:1000:\n",
        "etc/nsswitch.conf": b"hosts: files dns\n",
        "etc/ld.so.cache": Path("/etc/ld.so.cache").read_bytes(),
    }
    links = [name for name in ("bin", "lib", "lib64", "sbin") if Path(f"/{name}").is_symlink()]
    folders = [_entry(name, kind=tarfile.DIRTYPE) for name in ("usr", "proc", "sys", "dev", "etc", "opt", "root")]
    layer = [*folders, _entry("tmp", kind=tarfile.DIRTYPE, mode=0o1777)]
    layer += [_entry(name, kind=tarfile.SYMTYPE, target=f"usr/{name}") for name in links]
    _write(path, TEST_IMAGE, config, [*layer, *(_entry(*file) for file in files.items())])


Entry = tuple[tarfile.TarInfo, bytes]


def _entry(
    name: str, content: bytes = b"", kind: bytes = tarfile.REGTYPE, mode: int = 0o755, target: str = ""
) -> Entry:
    entry = tarfile.TarInfo(name)
    entry.type, entry.mode, entry.linkname, entry.size = kind, mode, target, len(content)
    return entry, content


def _archive(entries: Sequence[Entry]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for entry, content in entries:
            archive.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


def _write(path: Path, name: str, config: Mapping[str, Any], entries: Sequence[Entry]) -> None:
    layer = _archive(entries)
    digest = hashlib.sha256(layer).hexdigest()
    layers = {"type": "layers", "diff_ids": [f"sha256:{digest}"]}
    content = json.dumps({"architecture": "amd64", "os": "linux", "config": config, "rootfs": layers}).encode()
    identity, place = f"{hashlib.sha256(content).hexdigest()}.json", f"{digest}/layer.tar"
    listed = json.dumps([{"Config": identity, "RepoTags": [name], "Layers": [place]}]).encode()
    path.write_bytes(_archive([_entry(identity, content), _entry(place, layer), _entry("manifest.json", listed)]))


def runtime_spec(default: dict[str, Any], files_limit: int) -> dict[str, Any]:
    """containerd's default for every container, with the machine's own Python in it.

    ``files_limit``: how many files a container may open; more than this process may is refused.
    """
    default["linux"].pop("cgroupsPath", None)
    own = {sys.prefix: ENVIRONMENT_INSIDE, str(REPOSITORY): REPOSITORY_INSIDE}
    for source, destination in {"/usr": "/usr", sys.base_prefix: sys.base_prefix, **own}.items():
        mount = {"destination": destination, "source": source, "type": "bind", "options": ["rbind", "ro"]}
        default["mounts"].append(mount)
    default["process"]["rlimits"] = [{"type": "RLIMIT_NOFILE", "hard": files_limit, "soft": files_limit}]
    return default
