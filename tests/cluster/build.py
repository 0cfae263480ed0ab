"""Build the programs of a Kubernetes cluster, once per user.

    python -m tests.cluster.build            # API server, scheduler, controller manager, etcd, kubelet, kube-proxy, kubectl
    python -m tests.cluster.build --node     # containerd and what else a node with real containers needs, too

Prints the folder of each part. Kubernetes, etcd and containerd are compiled from Go's modules, what else a node needs is
unpacked from Debian's packages; nothing is installed, and root is not needed. Folders are kept in the user's cache
directory under a name that holds the hash of the recipe; two builds at once build one. What a build fetches and compiles
on its way is removed when it ends, and what a killed one has left, by the next.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import platform
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from platformdirs import user_cache_dir

from tests.cluster import recipes
from tests.cluster.recipes import BuildError, Steps, Unavailable, or_unavailable

KUBERNETES = "1.37.2"
MEGABYTE = 1 << 20


@dataclass(frozen=True, slots=True)
class Part:
    """Programs that are built and cached together."""

    name: str
    # What the disk has to have left, measured while it was built. What is built does not depend on it.
    megabytes: int = field(repr=False)
    # A folder below `go`, and how programs are built of it (`recipes.compile_module`).
    module: str = ""
    how: tuple[str, ...] = ()
    # Programs that the module's first one is, too, by its first argument.
    names: tuple[str, ...] = ()
    # Debian packages that are unpacked, as `root`.
    packages: tuple[str, ...] = ()

    def folder(self) -> Path:
        """Where the part is, or would be: a name that changes with everything it is made from."""
        files = sorted((recipes.MODULES / self.module).glob("*.*")) if self.module else []
        content = [(path.name, hashlib.sha256(path.read_bytes()).hexdigest()) for path in files]
        digest = hashlib.sha256(repr((recipes.SUITE, recipes.GO, content, self)).encode()).hexdigest()[:8]
        return cache_folder() / f"kubernetes-{platform.machine()}-{self.name}-{digest}"

    @property
    def is_built(self) -> bool:
        """False as well if that can't be seen: what is wrong with the cache is said by who builds."""
        return os.path.isdir(self.folder())

    def log(self) -> Path:
        """What its build says."""
        return cache_folder() / f"kubernetes-build-{self.name}.log"


_MAJOR, _MINOR, _ = KUBERNETES.split(".")
_VERSION = {"gitVersion": f"v{KUBERNETES}", "gitMajor": _MAJOR, "gitMinor": _MINOR, "gitTreeState": "clean"}
_SYMBOLS = (f"-X k8s.io/component-base/version.{name}={value}" for name, value in _VERSION.items())
CLUSTER = Part(
    "cluster",
    megabytes=8000,
    module="kubernetes",
    how=("-tags", "selinux,notest", "-ldflags", " ".join(["-s", "-w", *_SYMBOLS]), "."),
    names=(
        *("etcd", "kube-apiserver", "kube-scheduler", "kube-controller-manager"),
        *("kubelet", "kube-proxy", "kubectl"),
    ),
)
_CONTAINERD = "github.com/containerd/containerd/v2/cmd"
NODE = Part(
    "node",
    megabytes=4000,
    module="containerd",
    how=("-ldflags", "-s -w", *(f"{_CONTAINERD}/{name}" for name in ("containerd", "containerd-shim-runc-v2", "ctr"))),
    packages=(
        *("runc", "containernetworking-plugins", "busybox-static"),
        *("iptables", "libip6tc2", "libnftnl11", "libnetfilter-conntrack3", "libnfnetlink0"),
    ),
)
# A batch system, and the libraries that a bare machine lacks for it.
SLURM = Part(
    "slurm",
    megabytes=1000,
    packages=(
        *("slurmctld", "slurmd", "slurm-client", "slurm-wlm-basic-plugins"),
        *("libhwloc15", "libjson-c5", "liblua5.1-0", "libmunge2", "libyaml-0-2"),
    ),
)


def cache_folder() -> Path:
    return Path(user_cache_dir("elasticdl"))


def require(parts: Sequence[Part], say: Callable[[str], None] = print) -> None:
    """Have the folder of every part, built now if need be.

    Raises:
        Unavailable: this machine lacks something that the build starts from, or a place to build.
        BuildError: a step of the build failed.
    """
    with or_unavailable("the programs of a cluster can't be built"):
        for part in parts:
            if part.is_built:
                continue
            cache_folder().mkdir(parents=True, exist_ok=True)
            with (cache_folder() / f"kubernetes-build-{part.name}.lock").open("w") as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    say(f"waiting for {part.name}, which is being built (log: {part.log()})")
                    fcntl.flock(lock, fcntl.LOCK_EX)  # each step of a build has a time to be done in
                if not part.is_built:
                    _build(part, say)


def _build(part: Part, say: Callable[[str], None]) -> None:
    cache = cache_folder()
    for leftover in cache.glob(f"kubernetes-build-{part.name}-*/"):  # of a build that was killed: we hold the lock
        shutil.rmtree(leftover)
    free = shutil.disk_usage(cache).free // MEGABYTE
    if free < part.megabytes:
        raise Unavailable(f"{cache} has {free} MB left: building {part.name} takes {part.megabytes} while it lasts")
    say(f"building {part.name} (once; log: {part.log()})")
    steps, prefix = Steps(part.log(), say), f"kubernetes-build-{part.name}-"
    with tempfile.TemporaryDirectory(prefix=prefix, dir=cache, ignore_cleanup_errors=True) as name:
        scratch, out = Path(name), Path(name, "out")
        out.mkdir()
        if part.packages:
            recipes.unpack(part.packages, out / "root", scratch, steps)
        if part.module:
            recipes.compile_module(part.module, part.how, out, scratch, steps)
        for each in part.names:
            (out / each).write_text(f'#!/bin/sh\nexec "${{0%/*}}/{part.module}" {each} "$@"\n')
            (out / each).chmod(0o755)
        out.rename(part.folder())
    say(f"{part.name} is ready: {part.folder()}")


def find_programs(say: Callable[[str], None] = print) -> Path:
    """The folder of the control plane's programs, built if need be.

    Raises:
        Unavailable: there are none and they cannot be built here.
        BuildError: they could not be built.
    """
    require([CLUSTER], say)
    return CLUSTER.folder()


def main(argv: Sequence[str] | None = None) -> int:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(prog="python -m tests.cluster.build", description=__doc__.splitlines()[0])
    parser.add_argument("--node", action="store_true", help="containerd and what else a node needs, too")
    parts = [CLUSTER, NODE] if parser.parse_args(argv).node else [CLUSTER]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # by way of what removes the scratch folder
    try:
        require(parts, lambda line: print(f"  {line}", file=sys.stderr, flush=True))
    except (Unavailable, BuildError) as error:
        print(f"build: {error}", file=sys.stderr)
        return 1
    for part in parts:
        print(part.folder())
    return 0


if __name__ == "__main__":
    sys.exit(main())
