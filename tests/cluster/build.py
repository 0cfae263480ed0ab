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
import contextlib
import fcntl
import hashlib
import json
import platform
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from platformdirs import user_cache_dir

from tests.cluster import debian
from tests.cluster.golang import GO, GoModule
from tests.cluster.steps import BuildError, Steps, Unavailable

__all__ = ["BuildError", "Unavailable"]

KUBERNETES = "1.37.2"
MEGABYTE = 1 << 20
# A build of two cores takes 6 minutes, on a machine that others use a multiple of that.
_BUILT_WITHIN_S = 7200.0
_POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class Part:
    """Programs that are built and cached together."""

    name: str
    # What the disk has to have left, measured while it was built.
    megabytes: int
    module: GoModule | None = None
    # Programs that the module's first one is, too, by its first argument.
    names: tuple[str, ...] = ()
    # Debian packages that are unpacked, and the files of them to keep; none: the whole tree, as `root`.
    packages: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()

    def folder(self) -> Path:
        """Where the part is, or would be: a name that changes with everything it is made from."""
        recipe = (debian.SUITE, GO, self.module and self.module.digest(), self)
        digest = hashlib.sha256(repr(recipe).encode()).hexdigest()[:8]
        return cache_folder() / f"kubernetes-{KUBERNETES}-{platform.machine()}-{self.name}-{digest}"

    def log(self) -> Path:
        """What its build says."""
        return cache_folder() / f"kubernetes-build-{self.name}.log"


_MAJOR, _MINOR, _ = KUBERNETES.split(".")
_VERSION = {"gitVersion": f"v{KUBERNETES}", "gitMajor": _MAJOR, "gitMinor": _MINOR, "gitTreeState": "clean"}
CLUSTER = Part(
    "cluster",
    megabytes=8000,
    module=GoModule(
        "kubernetes",
        packages=(".",),
        flags=("-tags", "selinux,notest"),
        values=tuple((f"k8s.io/component-base/version.{name}", value) for name, value in _VERSION.items()),
    ),
    names=(
        *("etcd", "kube-apiserver", "kube-scheduler", "kube-controller-manager"),
        *("kubelet", "kube-proxy", "kubectl"),
    ),
)
_CONTAINERD = "github.com/containerd/containerd/v2/cmd"
NODE = Part(
    "node",
    megabytes=4000,
    module=GoModule(
        "containerd",
        packages=tuple(f"{_CONTAINERD}/{name}" for name in ("containerd", "containerd-shim-runc-v2", "ctr")),
    ),
    packages=(
        *("runc", "containernetworking-plugins", "busybox-static"),
        *("iptables", "libip6tc2", "libnftnl11", "libnetfilter-conntrack3", "libnfnetlink0"),
    ),
)
# Collects the metrics of jobs.
PROMETHEUS = Part("prometheus", megabytes=1000, packages=("prometheus",), kept=("usr/bin/prometheus",))
# Builds images as `docker build` does, without a daemon.
IMAGE_BUILDER = Part(
    "image-builder",
    megabytes=1000,
    packages=(
        *("buildah", "golang-github-containers-common", "golang-github-containers-image"),
        *("libgpgme11", "libdevmapper1.02.1"),
    ),
)


def cache_folder() -> Path:
    return Path(user_cache_dir("elasticdl"))


def require(parts: Sequence[Part], say: Callable[[str], None] = print, run: str = "") -> None:
    """Have the folder of every part, built now if need be.

    ``run``: whose builds these are; what has failed in a run is not tried again in it.

    Raises:
        Unavailable: this machine lacks something that the build starts from.
        BuildError: a step of the build failed.
    """
    cache_folder().mkdir(parents=True, exist_ok=True)
    for part in (part for part in parts if not part.folder().is_dir()):
        with _alone(part, say):
            if not part.folder().is_dir():
                with _remembered(part, run):
                    _build(part, say)


def _build(part: Part, say: Callable[[str], None]) -> None:
    cache = cache_folder()
    for leftover in cache.glob(f"kubernetes-build-{part.name}-*/"):  # of a build that was killed: we hold the lock
        shutil.rmtree(leftover)
    free = shutil.disk_usage(cache).free // MEGABYTE
    if free < part.megabytes:
        raise Unavailable(f"{cache} has {free} MB left: building {part.name} takes {part.megabytes} while it lasts")
    say(f"building {part.name} of Kubernetes {KUBERNETES} (once; log: {part.log()})")
    steps = Steps(part.log(), say)
    with tempfile.TemporaryDirectory(
        prefix=f"kubernetes-build-{part.name}-", dir=cache, ignore_cleanup_errors=True
    ) as name:
        scratch = Path(name)
        out = scratch / "out"
        out.mkdir()
        if part.packages:
            root = out / "root"
            debian.unpack(part.packages, root, scratch, steps)
            if part.kept:
                for file in part.kept:
                    (root / file).rename(out / Path(file).name)
                shutil.rmtree(root)
        if part.module:
            part.module.build(out, scratch, steps)
            for each in part.names:
                (out / each).write_text(f'#!/bin/sh\nexec "${{0%/*}}/{part.module.name}" {each} "$@"\n')
                (out / each).chmod(0o755)
        out.rename(part.folder())
    say(f"{part.name} is ready: {part.folder()}")


@contextlib.contextmanager
def _alone(part: Part, say: Callable[[str], None]) -> Iterator[None]:
    """Nobody else builds the part meanwhile.

    Raises:
        BuildError: somebody has been building it for hours.
    """
    with (cache_folder() / f"kubernetes-build-{part.name}.lock").open("w") as lock:
        deadline = time.monotonic() + _BUILT_WITHIN_S
        told = False
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise BuildError(
                        f"somebody else has been building {part.name} for {_BUILT_WITHIN_S:g} s (log: {part.log()})"
                    ) from None
                if not told:
                    say(f"waiting for {part.name}, which is being built (log: {part.log()})")
                    told = True
                time.sleep(_POLL_S)
        yield


@contextlib.contextmanager
def _remembered(part: Part, run: str) -> Iterator[None]:
    """If it fails, who tries it in the same run is told the same at once."""
    file = cache_folder() / f"kubernetes-build-{part.name}.failed"
    kinds = {kind.__name__: kind for kind in (Unavailable, BuildError)}
    if run and file.exists():
        failed_in, kind, message = json.loads(file.read_text())
        if failed_in == run:
            raise kinds[kind](message)
    try:
        yield
    except (Unavailable, BuildError) as error:
        whole = file.with_suffix(".new")
        whole.write_text(json.dumps([run, type(error).__name__, str(error)]))
        whole.replace(file)
        raise
    file.unlink(missing_ok=True)


def main(argv: Sequence[str] | None = None) -> int:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(prog="python -m tests.cluster.build", description=__doc__.splitlines()[0])
    parser.add_argument("--node", action="store_true", help="containerd and what else a node needs, too")
    parser.add_argument("--run", default="", metavar="NAME", help="what has failed in a run is not tried again in it")
    options = parser.parse_args(argv)
    parts = [CLUSTER, NODE] if options.node else [CLUSTER]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # by way of what removes the scratch folder
    try:
        require(parts, lambda line: print(f"  {line}", file=sys.stderr, flush=True), options.run)
    except (Unavailable, BuildError) as error:
        print(f"build: {error}", file=sys.stderr)
        return 1
    for part in parts:
        print(part.folder())
    return 0


if __name__ == "__main__":
    sys.exit(main())
