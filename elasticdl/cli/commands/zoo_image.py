"""``elasticdl zoo``: a model zoo's image: ``init`` writes its Dockerfile; ``build`` and ``push`` have a program do it that
is here: docker, buildah or podman."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click

import elasticdl
from elasticdl.cli.parsing import Commands, Option, command
from elasticdl.common.errors import ElasticDLError, UserError

# That of docker/Dockerfile.cpu.
BASE_IMAGE = f"elasticdl:{elasticdl.__version__}-cpu"
# What a zoo's image is better off without.
IGNORED = "\n".join((".git", ".venv", ".dockerignore", "Dockerfile", "**/__pycache__", "**/*.pyc", ""))
WHEELS, REQUIREMENTS = "wheels", "requirements.txt"
ZOO_FOLDER = "/model_zoo"
# Packages come before modules: who changes a module does not install everything again. The user is that of docker/Dockerfile.*,
# a number, as Kubernetes can't tell from a name that it is not root's. The working directory is the zoo: paths of a job begin there.
_DOCKERFILE = """\
# Made by `elasticdl zoo init`; change it as you like. `elasticdl zoo build` builds it.
FROM {base}

USER root
{packages}COPY --chown=1000:1000 . {folder}

WORKDIR {folder}
USER 1000:1000
"""
# What could be taken for an option or for two words; the rest is for the program to judge, which knows its registries.
_IMAGE = re.compile(r"[A-Za-z0-9][\w.:/@-]*", re.ASCII)
_URL = re.compile(r"https?://[^\s\"'\\$`;&|<>]+")
# A Dockerfile ends a name at white space, and takes some other characters for its own.
_PLAIN = re.compile(r"[\w./+-]+")
# What Kubernetes takes for a user who is not root.
_NOT_ROOT = re.compile(r"0*[1-9]\d*(:.*)?", re.ASCII)
# Those of docker/Dockerfile.*: no registry has them.
_OWN_BASE = re.compile(r"^FROM (elasticdl:\S+-([cg]pu))$", re.MULTILINE)
_ANSWER_S = 20.0


@command(
    click.Argument(
        ["path"], metavar="[PATH]", help="folder of the model zoo (the current one)", required=False, default=""
    ),
    Option(
        ["--base_image"],
        default=BASE_IMAGE,
        metavar="IMAGE",
        help=f"image with Python, elasticdl and Horovod ({BASE_IMAGE}, which docker/Dockerfile.cpu makes)",
    ),
    Option(["--model_zoo"], default="", metavar="PATH", help="the same as PATH"),
    Option(["--local_pkg_dir"], default="", metavar="FOLDER", help="folder of wheels that are installed in the image"),
    Option(
        ["--extra_pypi_index"], default="", metavar="URL", help="URL of a further index that packages may come from"
    ),
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
    _check_image("--base_image", base_image)
    if extra_pypi_index and not _URL.fullmatch(extra_pypi_index):
        raise UserError(
            f"--extra_pypi_index {extra_pypi_index!r} is no URL; expected one like https://pypi.example.com/simple"
        )
    wheels, copied = _wheels(zoo, local_pkg_dir) if local_pkg_dir else ("", [])
    pip = f"RUN pip install --no-cache-dir{f' --extra-index-url {extra_pypi_index}' if extra_pypi_index else ''}"
    packages = f"COPY {wheels}/*.whl /wheels/\n{pip} /wheels/*.whl\n" if wheels else ""
    if (zoo / REQUIREMENTS).is_file():
        packages += f"COPY {REQUIREMENTS} /requirements/\n{pip} -r /requirements/{REQUIREMENTS}\n"
    dockerfile, text = zoo / "Dockerfile", _DOCKERFILE.format(base=base_image, packages=packages, folder=ZOO_FOLDER)
    if dockerfile.exists() and dockerfile.read_text() != text:
        raise UserError(f"{dockerfile} is there and differs from what would be written: remove it first, or keep it")
    try:
        for wheel in copied:
            (zoo / WHEELS).mkdir(exist_ok=True)
            shutil.copyfile(wheel, zoo / WHEELS / wheel.name)
        if not (zoo / ".dockerignore").exists():
            (zoo / ".dockerignore").write_text(IGNORED)
        dockerfile.write_text(text)
    except OSError as error:
        raise UserError(f"{error.filename} can't be written: {error.strerror}") from None
    print(f"{dockerfile} is written; next: elasticdl zoo build {zoo_path} --image IMAGE")
    return 0


def _wheels(zoo: Path, path: str) -> tuple[str, list[Path]]:
    """The folder of wheels as the Dockerfile names it, and those that are to be copied there, as an image has only what is in the zoo."""
    folder = Path(path)
    found = sorted(folder.glob("*.whl"))
    if not found:
        raise UserError(f"--local_pkg_dir {path}: there is no folder of that name with *.whl in it")
    if zoo.resolve() in folder.resolve().parents:
        inside = folder.resolve().relative_to(zoo.resolve()).as_posix()
        if not _PLAIN.fullmatch(inside):
            raise UserError(f"{inside!r} can't be named in a Dockerfile: rename it to letters, digits and . _ - +")
        return inside, []
    others = {wheel.name for wheel in (zoo / WHEELS).glob("*.whl")} - {wheel.name for wheel in found}
    if others:
        raise UserError(f"--local_pkg_dir {path}: {zoo / WHEELS} has {min(others)}, too: remove it first")
    return WHEELS, found


@command(
    click.Argument(["path"], help="folder of the model zoo, in which `elasticdl zoo init` has written a Dockerfile"),
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
    _check_image("--image", image)
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
    _check_image("IMAGE", image)
    find_builder().run("push", image)
    return 0


def _folder(option: str, path: str) -> Path:
    if not Path(path).is_dir():
        raise UserError(f"{option} {path} is not a folder; expected that of the model zoo")
    return Path(path)


def _check_image(option: str, image: str) -> None:
    if not _IMAGE.fullmatch(image):
        raise UserError(f"{option} {image!r} is no name of an image; expected one like registry.example.com/team/zoo:1")


@dataclass(frozen=True, slots=True)
class Builder:
    """A program that builds images and pushes them; what it prints is the user's to see."""

    name: str

    @property
    def build_word(self) -> str:
        return "bud" if self.name == "buildah" else "build"  # older releases of it know no other word

    def works(self) -> bool:
        """Docker's client is of no use without its daemon; buildah needs nobody."""
        return bool(shutil.which(self.name)) and (self.name == "buildah" or self._ask("version") is not None)

    def user_of(self, image: str) -> str | None:
        """Whom ``image`` runs as; None if it is not here."""
        if self.name == "buildah":
            return self._ask("inspect", "--type", "image", "--format", "{{.OCIv1.Config.User}}", image)
        return self._ask("image", "inspect", "--format", "{{.Config.User}}", image)

    def run(self, *arguments: str) -> None:
        path = shutil.which(self.name) or self.name
        print(shlex.join([path, *arguments]), file=sys.stderr, flush=True)
        try:
            # No deadline: somebody waits before it who can end it, and how long an image takes only they know.
            done = subprocess.run([path, *arguments], stdin=subprocess.DEVNULL, check=False)
        except OSError as error:
            raise ElasticDLError(f"{path} can't be run: {error.strerror}") from None
        if done.returncode != 0:
            raise ElasticDLError(
                f"`{self.name} {arguments[0]}` ended with {done.returncode}; what it printed above says why"
            )

    def _ask(self, *arguments: str) -> str | None:
        """What it answers; None if it fails, or says nothing in time."""
        try:
            done = subprocess.run(
                [self.name, *arguments],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=_ANSWER_S,
                check=True,
            )
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout.strip()


BUILDERS: Sequence[Builder] = (Builder("docker"), Builder("buildah"), Builder("podman"))


def find_builder() -> Builder:
    """The first that is there and works.

    Raises:
        UserError: there is none.
    """
    for builder in BUILDERS:
        if builder.works():
            return builder
    mute = [builder.name for builder in BUILDERS if shutil.which(builder.name)]
    found = f"; {' and '.join(mute)} is there, but `{mute[0]} version` fails: does its daemon run?" if mute else ""
    raise UserError(
        f"neither docker, buildah nor podman works here: install one of them, or use a machine that has it{found}"
    )


zoo = Commands(
    "zoo",
    {
        "init": (__name__, "write a Dockerfile into a model zoo"),
        "build": (__name__, "build the image of a model zoo, with docker, buildah or podman"),
        "push": (__name__, "push that image to its registry"),
    },
)
