"""Programs from Debian's packages: fetched with an apt of our own and unpacked aside; nothing is installed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from tests.cluster.steps import Steps, Unavailable

SUITE = "bookworm"
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
_ARCHIVE = "Debian's archive does not give the packages"


def unpack(packages: Sequence[str], root: Path, scratch: Path, steps: Steps) -> None:
    """Have the files of ``packages`` below ``root``.

    Raises:
        Unavailable, BuildError: they are not to be had.
    """
    for program in ("apt-get", "dpkg-deb"):
        if shutil.which(program) is None:
            raise Unavailable(f"{program} is not found: some of the cluster's programs are Debian's")
    if not KEYRING.exists():
        raise Unavailable(f"{KEYRING} is not found: install debian-archive-keyring")
    steps.say(f"fetching {', '.join(packages)} from Debian's archive")
    env = {**os.environ, "APT_CONFIG": str(_write_apt_configuration(scratch / "apt"))}
    downloads = scratch / "downloads"
    downloads.mkdir()
    steps.fetch(_ARCHIVE, ["apt-get", "-qq", "update"], scratch, env)
    steps.fetch(_ARCHIVE, ["apt-get", "-qq", "download", *packages], downloads, env)
    for package in packages:
        (deb,) = downloads.glob(f"{package}_*.deb")
        steps.run(["dpkg-deb", "-x", str(deb), str(root)], scratch)


def _write_apt_configuration(apt: Path) -> Path:
    """An apt that knows one suite and nothing of this machine: what it fetches is the same everywhere."""
    for folder in ("lists/partial", "cache/archives/partial", "sources.d"):
        (apt / folder).mkdir(parents=True)
    (apt / "status").touch()
    mirror = os.environ.get("ELASTICDL_DEBIAN_MIRROR", "http://deb.debian.org/debian")
    (apt / "sources.d/debian.sources").write_text(
        f"Types: deb\nURIs: {mirror}\nSuites: {SUITE}\nComponents: main\nSigned-By: {KEYRING}\n"
    )
    configuration = apt / "apt.conf"
    configuration.write_text(
        f'Dir::Etc::SourceList "/dev/null";\nDir::Etc::SourceParts "{apt}/sources.d";\n'
        f'Dir::State::Lists "{apt}/lists";\nDir::State::status "{apt}/status";\nDir::Cache "{apt}/cache";\n'
        # Without these apt as root becomes a user who cannot write here, and fetches translations nobody reads.
        'APT::Sandbox::User "root";\nAcquire::Languages "none";\nAcquire::Retries "3";\n'
    )
    return configuration
