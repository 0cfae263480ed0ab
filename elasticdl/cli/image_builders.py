"""Building and pushing images with a program that does it here: docker, buildah or podman."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from elasticdl.common.errors import ElasticDLError, UserError

# What could be taken for an option or for two words; the rest is for the program to judge, which knows its registries.
_IMAGE = re.compile(r"[A-Za-z0-9][\w.:/@-]*", re.ASCII)
# What Kubernetes takes for a user who is not root: a number, not a name.
_NOT_ROOT = re.compile(r"0*[1-9]\d*(:.*)?", re.ASCII)
# Those of docker/Dockerfile.*: no registry has them.
_OWN_BASE = re.compile(r"^FROM (elasticdl:\S+-([cg]pu))$", re.MULTILINE)
_ANSWER_S = 20.0


@dataclass(frozen=True, slots=True)
class Builder:
    """A program that builds images and pushes them, and how it is told so; what it prints is the user's to see."""

    name: str
    build_word: str
    user: Sequence[str]
    # Fails if the program can't work here, as docker's client can't without its daemon; empty: it needs nobody.
    probe: Sequence[str] = ()
    path: str = ""

    def build(self, folder: Path, dockerfile: Path, image: str) -> None:
        """Build ``folder``, which the Dockerfile copies from, as ``image``.

        Raises:
            ElasticDLError: the program can't be run, or failed.
            UserError: the base image has to be made first, or the image would run as root, which pods of jobs may not.
        """
        base = _OWN_BASE.search(dockerfile.read_text())
        if base and self._user(base[1]) is None:
            raise UserError(
                f"{dockerfile}: {base[1]} is not here; once, in a checkout of elasticdl: "
                f"{self.name} {self.build_word} -f docker/Dockerfile.{base[2]} -t {base[1]} ."
            )
        self._run(self.build_word, "--tag", image, "--file", str(dockerfile), str(folder))
        user = self._user(image)
        if user is None:
            raise ElasticDLError(f"`{self.name} {self.build_word}` ended well, but {image} is not there")
        if not _NOT_ROOT.fullmatch(user):
            raise UserError(
                f"{image} is built, but its user is {user or 'root'}, and pods of jobs run only as a user that is a "
                f"number other than 0: end {dockerfile} with USER 1000:1000"
            )

    def push(self, image: str) -> None:
        """Raises as `build`."""
        self._run("push", image)

    def _user(self, image: str) -> str | None:
        """Whom ``image`` runs as; None if it is not here."""
        return _ask([self.path, *self.user, image])

    def _run(self, *arguments: str) -> None:
        print(shlex.join([self.path, *arguments]), file=sys.stderr, flush=True)
        try:
            # No deadline: somebody waits before it who can end it, and how long an image takes only they know.
            done = subprocess.run([self.path, *arguments], stdin=subprocess.DEVNULL, check=False)
        except OSError as error:
            raise ElasticDLError(f"{self.path} can't be run: {error.strerror}") from None
        if done.returncode != 0:
            raise ElasticDLError(
                f"`{self.name} {arguments[0]}` ended with {done.returncode}; what it printed above says why"
            )


# In the order of preference.
_BUILDERS = (
    Builder("docker", "build", ("image", "inspect", "--format", "{{.Config.User}}"), ("version",)),
    # Older releases know no other word for it.
    Builder("buildah", "bud", ("inspect", "--type", "image", "--format", "{{.OCIv1.Config.User}}")),
    Builder("podman", "build", ("image", "inspect", "--format", "{{.Config.User}}"), ("version",)),
)


def find_builder() -> Builder:
    """The first that is there and works.

    Raises:
        UserError: there is none.
    """
    mute = []
    for builder in _BUILDERS:
        path = shutil.which(builder.name)
        if path and (not builder.probe or _ask([path, *builder.probe]) is not None):
            return replace(builder, path=path)
        mute += [builder.name] if path else []
    names = ", ".join(builder.name for builder in _BUILDERS[:-1]) + f" nor {_BUILDERS[-1].name}"
    found = f"; {' and '.join(mute)} is there, but `{mute[0]} version` fails: does its daemon run?" if mute else ""
    raise UserError(f"neither {names} works here: install one of them, or use a machine that has it{found}")


def check_image(option: str, image: str) -> str:
    """Raises UserError for what can't be the name of an image."""
    if not _IMAGE.fullmatch(image):
        raise UserError(f"{option} {image!r} is no name of an image; expected one like registry.example.com/team/zoo:1")
    return image


def _ask(command: Sequence[str]) -> str | None:
    """What a command answers; None if it fails, or says nothing in time."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_ANSWER_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
