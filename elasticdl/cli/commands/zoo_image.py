"""``elasticdl zoo``: a model zoo's image. ``init`` writes its Dockerfile; ``build`` and ``push`` call docker, or buildah where there is no docker."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import click

import elasticdl
from elasticdl.cli.parsing import Commands, Option, command
from elasticdl.common.errors import ElasticDLError, UserError

# That of docker/Dockerfile.cpu.
BASE_IMAGE = f"elasticdl:{elasticdl.__version__}-cpu"
REQUIREMENTS = "requirements.txt"
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
_INSTALL = f"""\
COPY {REQUIREMENTS} /requirements/
RUN pip install --no-cache-dir -r /requirements/{REQUIREMENTS}
"""
_FOLDER: Any = click.Path(exists=True, file_okay=False, path_type=Path)


@command(
    click.Argument(["path"], type=_FOLDER, required=False, default=".", help="folder of the zoo (the current one)"),
    Option(
        ["--base_image"],
        default=BASE_IMAGE,
        metavar="IMAGE",
        help=f"image with Python, elasticdl and Horovod ({BASE_IMAGE}, which docker/Dockerfile.cpu makes)",
    ),
    Option(["--model_zoo"], type=_FOLDER, metavar="PATH", help="the same as PATH"),
    help="Write a Dockerfile for a model zoo into its folder.",
)
def init(path: Path, model_zoo: Path | None, base_image: str) -> int:
    """
    Raises:
        UserError: another Dockerfile is there.
    """
    zoo = model_zoo or path
    dockerfile, packages = zoo / "Dockerfile", _INSTALL if (zoo / REQUIREMENTS).is_file() else ""
    text = _DOCKERFILE.format(base=base_image, packages=packages, folder=ZOO_FOLDER)
    if dockerfile.exists() and dockerfile.read_text() != text:
        raise UserError(f"{dockerfile} is there and differs from what would be written: remove it first, or keep it")
    dockerfile.write_text(text)
    print(f"{dockerfile} is written; next: elasticdl zoo build {zoo} --image IMAGE")
    return 0


@command(
    click.Argument(["path"], type=_FOLDER, help="folder of the zoo, with the Dockerfile of `elasticdl zoo init`"),
    Option(["--image"], required=True, metavar="IMAGE", help="its name, as in registry.example.com/team/zoo:1"),
    help="Build the image of a model zoo, with docker, or buildah where there is no docker.",
)
def build(path: Path, image: str) -> int:
    """
    Raises:
        UserError: there is no Dockerfile, or no program to build it with.
        ElasticDLError: that program has failed.
    """
    dockerfile = path / "Dockerfile"
    if not dockerfile.is_file():
        raise UserError(f"{dockerfile} is not there: `elasticdl zoo init {path}` writes it")
    _call("build", "--tag", image, "--file", str(dockerfile), str(path))
    return 0


@command(
    click.Argument(["image"], metavar="IMAGE", help="its name, as it was given to `elasticdl zoo build`"),
    help="Push an image to its registry, with docker, or buildah where there is no docker.",
)
def push(image: str) -> int:
    """Raises as `build`."""
    _call("push", image)
    return 0


def _call(*words: str) -> None:
    """What the program prints is the user's to see. There is no deadline: how long an image takes only the user knows."""
    program = shutil.which("docker") or shutil.which("buildah")
    if program is None:
        raise UserError("neither docker nor buildah is here: install one of them, or use a machine that has it")
    print(shlex.join([program, *words]), file=sys.stderr, flush=True)
    done = subprocess.run([program, *words], stdin=subprocess.DEVNULL, check=False)
    if done.returncode != 0:
        raise ElasticDLError(f"`{Path(program).name} {words[0]}` ended with {done.returncode}; see above why")


zoo = Commands(
    "zoo",
    {
        "init": (__name__, "write a Dockerfile into a model zoo"),
        "build": (__name__, "build the image of a model zoo, with docker or buildah"),
        "push": (__name__, "push that image to its registry"),
    },
)
