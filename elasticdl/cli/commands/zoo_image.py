"""``elasticdl zoo``: a model zoo's image: ``init`` writes its Dockerfile; ``build`` and ``push`` have a program do it that
is here: docker, buildah or podman."""

from __future__ import annotations

import filecmp
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

import elasticdl
from elasticdl.cli.parsing import Commands, Option, command
from elasticdl.common.errors import ElasticDLError, UserError

# That of docker/Dockerfile.cpu.
BASE_IMAGE = f"elasticdl:{elasticdl.__version__}-cpu"
REQUIREMENTS = "requirements.txt"
WHEELS = "wheels"
# A Dockerfile ends a name at white space, and takes some other characters for its own.
_PLAIN = re.compile(r"[\w./+-]+")

# Also the working directory, so that paths of a job are relative to the zoo.
ZOO_FOLDER = "/model_zoo"
# The user of docker/Dockerfile.*; a number, as Kubernetes can't tell from a name that it is not root's.
_USER = "1000:1000"

# What a zoo's image is better off without.
IGNORED = "\n".join((".git", ".venv", ".dockerignore", "Dockerfile", "**/__pycache__", "**/*.pyc", ""))
# What could be taken for an option or for two words; the rest is for the program to judge, which knows its registries.
_IMAGE = re.compile(r"[A-Za-z0-9][\w.:/@-]*", re.ASCII)
# What Kubernetes takes for a user who is not root: a number, not a name.
_NOT_ROOT = re.compile(r"0*[1-9]\d*(:.*)?", re.ASCII)
# Those of docker/Dockerfile.*: no registry has them.
_OWN_BASE = re.compile(r"^FROM (elasticdl:\S+-([cg]pu))$", re.MULTILINE)
_ANSWER_S = 20.0


def _option(name: str, metavar: str, text: str, default: str = "") -> Option:
    return Option([f"--{name}"], default=default, metavar=metavar, help=text)


def _path(metavar: str, text: str, **settings: Any) -> click.Argument:
    return click.Argument(["path"], metavar=metavar, help=text, **settings)


@command(
    _path("[PATH]", "folder of the model zoo (the current one)", required=False, default=""),
    _option(
        "base_image",
        "IMAGE",
        f"image with Python, elasticdl and Horovod ({BASE_IMAGE}, which docker/Dockerfile.cpu makes)",
        BASE_IMAGE,
    ),
    _option("model_zoo", "PATH", "the same as PATH"),
    _option("local_pkg_dir", "FOLDER", "folder of wheels that are installed in the image"),
    _option("extra_pypi_index", "URL", "URL of a further index that packages may come from"),
    help="Write a Dockerfile for a model zoo into its folder.",
)
def init(path: str, model_zoo: str, base_image: str, local_pkg_dir: str, extra_pypi_index: str) -> int:
    """Write the Dockerfile, and a .dockerignore if there is none; nothing is written if anything is wrong.

    Raises:
        UserError: a path that is not there, or another file in the place of one that would be written.
    """
    if path and model_zoo:
        raise UserError(f"the model zoo is given twice: {path} and --model_zoo {model_zoo}; leave one out")
    zoo_path = path or model_zoo or "."
    zoo = _folder("--model_zoo" if model_zoo else "PATH", zoo_path)
    wheels, copies = _wheels(zoo, local_pkg_dir) if local_pkg_dir else ("", {})
    check_image("--base_image", base_image)
    if extra_pypi_index and not re.fullmatch(r"https?://[^\s\"'\\$`;&|<>]+", extra_pypi_index):
        raise UserError(
            f"--extra_pypi_index {extra_pypi_index!r} is no URL; expected one like https://pypi.example.com/simple"
        )
    requirements = REQUIREMENTS if (zoo / REQUIREMENTS).is_file() else ""
    dockerfile, text = zoo / "Dockerfile", _render(base_image, extra_pypi_index, wheels, requirements)
    if dockerfile.exists() and dockerfile.read_text() != text:
        raise UserError(f"{dockerfile} is there and differs from what would be written: remove it first, or keep it")
    try:
        for target, source in copies.items():
            target.parent.mkdir(exist_ok=True)
            shutil.copyfile(source, target)
        if not (zoo / ".dockerignore").exists():
            (zoo / ".dockerignore").write_text(IGNORED)
        dockerfile.write_text(text)
    except OSError as error:
        raise UserError(f"{error.filename} can't be written: {error.strerror}") from None
    print(f"{dockerfile} is written; next: elasticdl zoo build {zoo_path} --image IMAGE")
    return 0


def _render(base_image: str, index: str, wheels: str, requirements: str) -> str:
    """The Dockerfile. Packages come before modules: who changes a module does not install everything again.

    Paths are relative to the zoo, and empty where there is nothing of the kind.
    """
    pip = f"RUN pip install --no-cache-dir{f' --extra-index-url {index}' if index else ''}"
    lines = [
        "# Made by `elasticdl zoo init`; change it as you like. `elasticdl zoo build` builds it.",
        f"FROM {base_image}",
        "",
        "USER root",
    ]
    if wheels:
        lines += [f"COPY {wheels}/*.whl /wheels/", f"{pip} /wheels/*.whl"]
    if requirements:
        lines += [f"COPY {requirements} /requirements/", f"{pip} -r /requirements/{requirements}"]
    # Whatever the modes of its files are, the user can read them then.
    lines += [f"COPY --chown={_USER} . {ZOO_FOLDER}"]
    return "\n".join([*lines, "", f"WORKDIR {ZOO_FOLDER}", f"USER {_USER}", ""])


@command(
    _path("PATH", "folder of the model zoo, in which `elasticdl zoo init` has written a Dockerfile"),
    Option(["--image"], required=True, metavar="IMAGE", help="its name, as in registry.example.com/team/zoo:1"),
    help="Build the image of a model zoo, with docker, buildah or podman, whichever works here.",
)
def build(path: str, image: str) -> int:
    """
    Raises:
        UserError: no Dockerfile, no program to build it with, the base image has to be made first, or the image would run as root,
            which pods of jobs may not.
        ElasticDLError: that program can't be run, or failed.
    """
    check_image("--image", image)
    folder = _folder("PATH", path)
    dockerfile = folder / "Dockerfile"
    if not dockerfile.is_file():
        raise UserError(f"{dockerfile} is not there: `elasticdl zoo init {path}` writes it")
    builder = find_builder()
    base = _OWN_BASE.search(dockerfile.read_text())
    if base and builder.user_of(base[1]) is None:
        raise UserError(
            f"{dockerfile}: {base[1]} is not here; once, in a checkout of elasticdl: "
            f"{builder.name} {builder.build_word} -f docker/Dockerfile.{base[2]} -t {base[1]} ."
        )
    builder.run(builder.build_word, "--tag", image, "--file", str(dockerfile), str(folder))
    user = builder.user_of(image)
    if user is None:
        raise ElasticDLError(f"`{builder.name} {builder.build_word}` ended well, but {image} is not there")
    if not _NOT_ROOT.fullmatch(user):
        raise UserError(
            f"{image} is built, but its user is {user or 'root'}, and pods of jobs run only as a user that is a "
            f"number other than 0: end {dockerfile} with USER 1000:1000"
        )
    return 0


@command(
    click.Argument(["image"], metavar="IMAGE", help="its name, as it was given to `elasticdl zoo build`"),
    help="Push an image to its registry, with docker, buildah or podman, whichever works here.",
)
def push(image: str) -> int:
    """Raises as `build`."""
    check_image("IMAGE", image)
    find_builder().run("push", image)
    return 0


def _folder(option: str, path: str) -> Path:
    folder = Path(path)
    if not folder.is_dir():
        raise UserError(f"{option} {path} is not a folder; expected that of the model zoo")
    return folder


def _wheels(zoo: Path, path: str) -> tuple[str, dict[Path, Path]]:
    """The folder of wheels as the Dockerfile names it, and what is to be copied into the zoo, by its place there."""
    found = sorted(Path(path).glob("*.whl"))
    if not found:
        raise UserError(f"--local_pkg_dir {path}: there is no folder of that name with *.whl in it")
    if inside := _inside(zoo, Path(path)):
        return inside, {}
    others = {wheel.name for wheel in (zoo / WHEELS).glob("*.whl")} - {wheel.name for wheel in found}
    if others:
        raise UserError(f"--local_pkg_dir {path}: {zoo / WHEELS} has {min(others)}, too: remove it first")
    return WHEELS, _copies("--local_pkg_dir", found, zoo / WHEELS)


def _copies(option: str, files: Sequence[Path], folder: Path) -> dict[Path, Path]:
    """What is to be copied, as an image is made only of what is in the zoo. Another file in its place is a UserError."""
    made = {folder / file.name: file for file in files}
    for target, source in made.items():
        if target.exists() and not filecmp.cmp(source, target, shallow=False):
            raise UserError(f"{option}: {target} is there and differs from {source}: remove one of them")
    return made


def _inside(zoo: Path, path: Path) -> str:
    """``path`` relative to the zoo; empty if it lies elsewhere, or is the zoo itself."""
    zoo, path = zoo.resolve(), path.resolve()
    return _plain(path.relative_to(zoo).as_posix()) if zoo in path.parents else ""


def _plain(name: str) -> str:
    if not _PLAIN.fullmatch(name):
        raise UserError(f"{name!r} can't be named in a Dockerfile: rename it to letters, digits and . _ - +")
    return name


@dataclass(frozen=True, slots=True)
class Builder:
    """A program that builds images and pushes them, and how it is told so; what it prints is the user's to see."""

    name: str
    build_word: str
    user: Sequence[str]
    # Fails if the program can't work here, as docker's client can't without its daemon; empty: it needs nobody.
    probe: Sequence[str] = ()
    path: str = ""

    def user_of(self, image: str) -> str | None:
        """Whom ``image`` runs as; None if it is not here."""
        return _ask([self.path, *self.user, image])

    def run(self, *arguments: str) -> None:
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


def check_image(option: str, image: str) -> None:
    """Raises UserError for what can't be the name of an image."""
    if not _IMAGE.fullmatch(image):
        raise UserError(f"{option} {image!r} is no name of an image; expected one like registry.example.com/team/zoo:1")


def _ask(command: Sequence[str]) -> str | None:
    """What a command answers; None if it fails, or says nothing in time."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_ANSWER_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


zoo = Commands(
    "zoo",
    {
        "init": (__name__, "write a Dockerfile into a model zoo"),
        "build": (__name__, "build the image of a model zoo, with docker, buildah or podman"),
        "push": (__name__, "push that image to its registry"),
    },
)
