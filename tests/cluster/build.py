"""Build the programs of a Kubernetes cluster from Debian's archive, once per user.

    python -m tests.cluster.build            # etcd, kube-apiserver, kube-scheduler, kube-controller-manager
    python -m tests.cluster.build --node     # kubelet, kube-proxy, containerd and what they need, too

Prints the folder of each part. Kubernetes 1.20.2 is the newest release whose server source is complete in Debian. The
compiler comes from there as well: packages are unpacked aside, none is installed, and root is not needed. Folders are
kept in the user's cache directory under a name that holds the hash of the recipe; two builds at once build one.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from platformdirs import user_cache_dir

from elasticdl.common.tether import tethered

KUBERNETES = "1.20.2"
SUITE = "bookworm"
SOURCE = "kubernetes"
COMPILER = ("golang-1.19-go", "golang-1.19-src")
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
# The archive's tarball lacks this generated file; the generator is part of the source.
OPENAPI = "pkg/generated/openapi"
OPENAPI_SKIPPED = re.compile(r"_examples|sample-apiserver|code-generator")
GO_TAGS = "selinux,notest"
MEGABYTE = 1 << 20


class Unavailable(Exception):
    """This machine cannot have the programs; the message says in one line what is missing."""


class BuildError(Exception):
    """The programs should have been built and were not; the message says where to look."""


@dataclass(frozen=True, slots=True)
class Part:
    """Programs that are built and cached together."""

    name: str
    programs: tuple[str, ...]
    # Debian packages that are unpacked, and the files of them to keep; none: the whole tree, as `root`.
    packages: tuple[str, ...]
    kept: tuple[str, ...] = ()
    # (file, text in the source, replacement)
    edits: tuple[tuple[str, str, str], ...] = ()

    def folder(self) -> Path:
        """Where the part is, or would be: a name that changes with everything it is made from."""
        recipe = (SUITE, SOURCE, COMPILER, GO_TAGS, self)
        digest = hashlib.sha256(repr(recipe).encode()).hexdigest()[:8]
        return cache_folder() / f"kubernetes-{KUBERNETES}-{platform.machine()}-{self.name}-{digest}"


CONTROL_PLANE = Part(
    "control-plane",
    programs=("kube-apiserver", "kube-scheduler", "kube-controller-manager"),
    packages=("etcd-server",),
    kept=("usr/bin/etcd",),
)
NODE = Part(
    "node",
    programs=("kubelet", "kube-proxy"),
    packages=(
        *("containerd", "runc", "containernetworking-plugins", "busybox-static"),
        *("iptables", "libip6tc2", "libnftnl11", "libnetfilter-conntrack3", "libnfnetlink0"),
    ),
    # A deleted pod's object goes away only after its sandbox, which only the collection of garbage removes: this takes
    # up to a minute in this release. A second makes it as quick as the releases after it.
    edits=(
        ("pkg/kubelet/kubelet.go", "ContainerGCPeriod = time.Minute", "ContainerGCPeriod = time.Second"),
        (
            "pkg/kubelet/status/status_manager.go",
            "const syncPeriod = 10 * time.Second",
            "const syncPeriod = time.Second",
        ),
    ),
)
# Collects the metrics of jobs.
PROMETHEUS = Part("prometheus", programs=(), packages=("prometheus",), kept=("usr/bin/prometheus",))
# Builds images as `docker build` does, without a daemon.
IMAGE_BUILDER = Part(
    "image-builder",
    programs=(),
    packages=(
        *("buildah", "golang-github-containers-common", "golang-github-containers-image"),
        *("libgpgme11", "libdevmapper1.02.1"),
    ),
)


def cache_folder() -> Path:
    return Path(user_cache_dir("elasticdl"))


def require(parts: Sequence[Part], say: Callable[[str], None] = print) -> None:
    """Have the folder of every part, built now if need be (about ten minutes of two cores).

    Raises:
        Unavailable: this machine lacks something that the build starts from.
        BuildError: a step of the build failed.
    """
    cache = cache_folder()
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "kubernetes-build.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        missing = [part for part in parts if not part.folder().is_dir()]
        if not missing:
            return
        check_machine()
        for leftover in cache.glob("kubernetes-build-*/"):  # of a build that was killed: we hold the lock
            shutil.rmtree(leftover)
        with tempfile.TemporaryDirectory(prefix="kubernetes-build-", dir=cache) as scratch:
            Build(Path(scratch), cache / "kubernetes-build.log", say).run(missing)


def check_machine() -> None:
    for program in ("apt-get", "dpkg-deb", "tar", "nice"):
        if shutil.which(program) is None:
            raise Unavailable(f"{program} is not found: the cluster's programs are built from Debian's packages")
    if not KEYRING.exists():
        raise Unavailable(f"{KEYRING} is not found: install debian-archive-keyring")
    free = shutil.disk_usage(cache_folder()).free // MEGABYTE
    if free < 4000:
        raise Unavailable(f"{cache_folder()} has {free} MB left: building the cluster's programs takes 4000")


class Build:
    """One build in a folder of its own; finished parts are moved out of it."""

    def __init__(self, scratch: Path, log: Path, say: Callable[[str], None]) -> None:
        self._scratch = scratch
        self._log = log
        self._say = say
        self._root = scratch / "root"
        self._source = scratch / "gopath/src/k8s.io/kubernetes"

    def run(self, parts: Sequence[Part]) -> None:
        self._log.write_text("")
        self._say(
            f"building {', '.join(part.name for part in parts)} of Kubernetes {KUBERNETES} (once; log: {self._log})"
        )
        compiled = [part for part in parts if part.programs]
        self._fetch([package for part in parts for package in part.packages], source=bool(compiled))
        if compiled:
            for part in compiled:
                self._edit(part)
            self._say("generating the API description")
            self._generate_openapi()
        for part in parts:
            out = self._scratch / part.name
            out.mkdir()
            self._compile(part, out)
            self._keep_packages(part, out)
            out.rename(part.folder())
            self._say(f"{part.name} is ready: {part.folder()}")

    def _fetch(self, packages: Sequence[str], *, source: bool) -> None:
        """``source``: what is compiled, and the compiler for it, as well."""
        self._say("fetching from Debian's archive")
        env = {**os.environ, "APT_CONFIG": str(self._write_apt_configuration())}
        self._step(["apt-get", "-qq", "update"], self._scratch, env, fetches=True)
        downloads = self._scratch / "downloads"
        downloads.mkdir()
        wanted = [*(COMPILER if source else ()), *packages]
        self._step(["apt-get", "-qq", "download", *wanted], downloads, env, fetches=True)
        if source:
            self._step(["apt-get", "-qq", "source", "--download-only", SOURCE], downloads, env, fetches=True)
            self._unpack_source(downloads)

    def _unpack_source(self, downloads: Path) -> None:
        for deb in (deb for name in COMPILER for deb in downloads.glob(f"{name}_*.deb")):
            self._step(["dpkg-deb", "-x", str(deb), str(self._root)], self._scratch)
        self._source.mkdir(parents=True)
        (tarball,) = downloads.glob("kubernetes_*.orig.tar.*")
        if KUBERNETES not in tarball.name:
            raise BuildError(f"the archive has {tarball.name}, and the recipe is for {KUBERNETES}")
        self._step(["tar", "xf", str(tarball), "-C", str(self._source), "--strip-components=1"], self._scratch)

    def _write_apt_configuration(self) -> Path:
        """An apt that knows one suite and nothing of this machine: what it fetches is the same everywhere."""
        apt = self._scratch / "apt"
        for folder in ("lists/partial", "cache/archives/partial", "sources.d"):
            (apt / folder).mkdir(parents=True)
        (apt / "status").touch()
        mirror = os.environ.get("ELASTICDL_DEBIAN_MIRROR", "http://deb.debian.org/debian")
        (apt / "sources.d/debian.sources").write_text(
            f"Types: deb deb-src\nURIs: {mirror}\nSuites: {SUITE}\nComponents: main\nSigned-By: {KEYRING}\n"
        )
        configuration = apt / "apt.conf"
        configuration.write_text(
            f'Dir::Etc::SourceList "/dev/null";\nDir::Etc::SourceParts "{apt}/sources.d";\n'
            f'Dir::State::Lists "{apt}/lists";\nDir::State::status "{apt}/status";\nDir::Cache "{apt}/cache";\n'
            # Without these apt as root becomes a user who cannot write here, and fetches translations nobody reads.
            'APT::Sandbox::User "root";\nAcquire::Languages "none";\nAcquire::Retries "3";\n'
        )
        return configuration

    def _edit(self, part: Part) -> None:
        for name, old, new in part.edits:
            path = self._source / name
            text = path.read_text()
            if old not in text:
                raise BuildError(f"{name} has no {old!r}: this is not the Kubernetes {KUBERNETES} the edits are for")
            path.write_text(text.replace(old, new, 1))

    def _generate_openapi(self) -> None:
        generator = self._scratch / "openapi-gen"
        self._go_build(["-o", str(generator), "./vendor/k8s.io/kube-openapi/cmd/openapi-gen"])
        # The generator knows a package by the path that it is imported with.
        packages = sorted(
            re.sub("^staging/src/", "vendor/", str(folder.relative_to(self._source))) for folder in self._described()
        )
        arguments = ["-i", ",".join(f"k8s.io/kubernetes/{package}" for package in packages)]
        arguments += ["-p", f"k8s.io/kubernetes/{OPENAPI}", "-O", "zz_generated.openapi", "-r", "/dev/null"]
        arguments += ["-h", "hack/boilerplate/boilerplate.generatego.txt"]
        self._step([str(generator), *arguments], self._source, self._go_environment())

    def _described(self) -> set[Path]:
        """Folders with a file that asks for its types to be described."""
        asks = re.compile(rb"^// *\+k8s:openapi-gen=", re.MULTILINE)
        files = (file for top in ("pkg", "staging") for file in (self._source / top).rglob("*.go"))
        return {
            file.parent
            for file in files
            if not OPENAPI_SKIPPED.search(str(file.relative_to(self._source)))
            and file.is_file()
            and asks.search(file.read_bytes())
        }

    def _compile(self, part: Part, out: Path) -> None:
        values = {"gitVersion": f"v{KUBERNETES}", "gitMajor": "1", "gitMinor": "20", "gitTreeState": "clean"}
        values |= {"gitCommit": "debian", "buildDate": "1970-01-01T00:00:00Z"}
        symbols = [
            f"-X k8s.io/kubernetes/vendor/k8s.io/{package}.{name}={value}"
            for package in ("component-base/version", "client-go/pkg/version")
            for name, value in values.items()
        ]
        flags = ["-trimpath", "-tags", GO_TAGS, "-ldflags", " ".join(["-s -w", *symbols])]
        for program in part.programs:
            self._say(f"compiling {program}")
            self._go_build([*flags, "-o", str(out / program), f"./cmd/{program}"])

    def _keep_packages(self, part: Part, out: Path) -> None:
        root = out / "root"
        for package in part.packages:
            (deb,) = (self._scratch / "downloads").glob(f"{package}_*.deb")
            self._step(["dpkg-deb", "-x", str(deb), str(root)], self._scratch)
        if part.kept:
            for file in part.kept:
                (root / file).rename(out / Path(file).name)
            shutil.rmtree(root)

    def _go_build(self, arguments: list[str]) -> None:
        go = str(self._root / "usr/lib/go-1.19/bin/go")
        workers = str(len(os.sched_getaffinity(0)))
        # Others use the machine, too, while this takes its ten minutes.
        self._step(["nice", "-n", "10", go, "build", "-p", workers, *arguments], self._source, self._go_environment())

    def _go_environment(self) -> dict[str, str]:
        """Everything is vendored; the old mode with a GOPATH is the one that takes the tree as it is."""
        goroot = self._root / "usr/lib/go-1.19"
        return {
            "PATH": f"{goroot / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "HOME": str(self._scratch),
            "PWD": str(self._source),
            "TMPDIR": str(self._scratch),
            "GOROOT": str(goroot),
            "GOPATH": str(self._scratch / "gopath"),
            "GOCACHE": str(self._scratch / "gocache"),
            "GO111MODULE": "off",
            "GOENV": "off",
            "GOPROXY": "off",
            "GOFLAGS": "",
            "CGO_ENABLED": "0",
        }

    def _step(
        self, command: list[str], folder: Path, env: dict[str, str] | None = None, *, fetches: bool = False
    ) -> None:
        """Run one command to its end, within the hour; ``fetches``: that it fails is not the build's fault."""
        with self._log.open("ab") as log:
            log.write(f"$ {' '.join(command)[:500]}\n".encode())
            log.flush()
            begin = log.tell()
            process = subprocess.Popen(tethered(command), cwd=folder, env=env, stdout=log, stderr=subprocess.STDOUT)
            with stopped_at_the_end(process):
                code = process.wait(timeout=3600)
        if code == 0:
            return
        tail = self._log.read_bytes()[begin:].decode(errors="replace").strip().splitlines() or ["no output"]
        if fetches:
            raise Unavailable(f"Debian's archive does not give the sources: {tail[-1]} (log: {self._log})")
        raise BuildError(f"{command[0]} ended with {code}: {tail[-1]} (log: {self._log})")


@contextlib.contextmanager
def stopped_at_the_end(process: subprocess.Popen[bytes]) -> Iterator[None]:
    try:
        yield
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def main(argv: Sequence[str] | None = None) -> int:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(prog="python -m tests.cluster.build", description=__doc__.splitlines()[0])
    parser.add_argument("--node", action="store_true", help="kubelet, kube-proxy, containerd and what they need, too")
    parts = [CONTROL_PLANE, NODE] if parser.parse_args(argv).node else [CONTROL_PLANE]
    try:
        require(parts, say=lambda line: print(f"  {line}", file=sys.stderr, flush=True))
    except (Unavailable, BuildError) as error:
        print(f"build: {error}", file=sys.stderr)
        return 1
    for part in parts:
        print(part.folder())
    return 0


if __name__ == "__main__":
    sys.exit(main())
