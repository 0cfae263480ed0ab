"""Building and pushing images with the program that is there for it: docker or buildah."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from elasticdl.common.errors import ElasticDLError, UserError

# In the order of preference: the verb with which each builds. buildah's older releases know no other.
_VERBS = {"docker": "build", "buildah": "bud"}
# What could be taken for an option or for two words; the rest is for the program to judge, which knows its registries.
_IMAGE = re.compile(r"[A-Za-z0-9][\w.:/@-]*", re.ASCII)


@dataclass(frozen=True, slots=True)
class Builder:
    """A program that builds images and pushes them; what it prints is the user's to see."""

    program: str
    verb: str

    def build(self, folder: Path, dockerfile: Path, image: str) -> None:
        """Build ``folder``, which the Dockerfile copies from, as ``image``.

        Raises:
            ElasticDLError: the program can't be run, or failed.
        """
        self._run(self.verb, "--tag", image, "--file", str(dockerfile), str(folder))

    def push(self, image: str) -> None:
        """Raises as `build`."""
        self._run("push", image)

    def _run(self, *arguments: str) -> None:
        name = f"{Path(self.program).name} {arguments[0]}"
        try:
            # No deadline: somebody waits before it who can end it, and how long an image takes only they know.
            done = subprocess.run([self.program, *arguments], stdin=subprocess.DEVNULL, check=False)
        except OSError as error:
            raise ElasticDLError(f"{self.program} can't be run: {error.strerror}") from None
        if done.returncode != 0:
            raise ElasticDLError(f"`{name}` ended with {done.returncode}; what it printed above says why")


def find_builder() -> Builder:
    """
    Raises:
        UserError: neither program is there.
    """
    for name, verb in _VERBS.items():
        program = shutil.which(name)
        if program:
            return Builder(program, verb)
    raise UserError(f"neither {' nor '.join(_VERBS)} is on PATH: install one of them, or use a machine that has it")


def check_image(option: str, image: str) -> str:
    """
    Raises:
        UserError: ``image`` can't be the name of one.
    """
    if not _IMAGE.fullmatch(image):
        raise UserError(f"{option} {image!r} is no name of an image; expected one like registry.example.com/team/zoo:1")
    return image
