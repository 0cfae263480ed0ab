"""Building images from Dockerfiles: the environment in which `buildah` is the builder that is found, and finds no other.

Everything is kept in one folder; no daemon, no registry, no setting of this machine has a part in it.
"""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.build import IMAGE_BUILDER

_WITHIN_S = 120.0
_ANYTHING = {"default": [{"type": "insecureAcceptAnything"}]}


@dataclass(frozen=True, slots=True)
class ImageBuilder:
    """Images by name, in ``folder``, by the buildah below ``root``; needs to be run by root."""

    folder: Path
    root: Path

    @classmethod
    def make(cls, folder: Path, root: Path | None = None) -> ImageBuilder:
        """Without ``root`` the buildah is that of `tests.cluster.build.IMAGE_BUILDER`."""
        (folder / ".config/containers").mkdir(parents=True)
        (folder / ".config/containers/policy.json").write_text(json.dumps(_ANYTHING))
        (folder / "registries.conf").write_text("unqualified-search-registries = []\n")
        places = f'runroot = "{folder}/run"\ngraphroot = "{folder}/images"\n'
        (folder / "storage.conf").write_text(f'[storage]\ndriver = "vfs"\n{places}')
        return cls(folder, root or IMAGE_BUILDER.folder() / "root")

    @property
    def environment(self) -> dict[str, str]:
        """For a process that is to build here: to be added to its own."""
        return {
            "PATH": str(self.root / "usr/bin"),
            "LD_LIBRARY_PATH": str(self.root / "usr/lib/x86_64-linux-gnu"),
            "HOME": str(self.folder),
            "TMPDIR": str(self.folder),
            "XDG_RUNTIME_DIR": str(self.folder),
            "BUILDAH_ISOLATION": "chroot",
            "STORAGE_DRIVER": "vfs",
            "CONTAINERS_CONF": os.devnull,
            "CONTAINERS_STORAGE_CONF": str(self.folder / "storage.conf"),
            "CONTAINERS_REGISTRIES_CONF": str(self.folder / "registries.conf"),
        }

    def load(self, archive: Path) -> None:
        """Have the image of an archive here."""
        self._run("pull", f"docker-archive:{archive}")

    def save(self, image: str, archive: Path) -> None:
        self._run("push", image, f"docker-archive:{archive}:{image}")

    def _run(self, *arguments: str) -> None:
        program = self.root / "usr/bin/buildah"
        env = {**os.environ, **self.environment}
        subprocess.run([str(program), *arguments], env=env, capture_output=True, timeout=_WITHIN_S, check=True)
