"""``elasticdl zoo``: a model zoo's image: ``init`` writes its Dockerfile, ``build`` builds it, ``push`` pushes it."""

from __future__ import annotations

import filecmp
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import click

import elasticdl
from elasticdl.cli.image_builders import check_image, find_builder
from elasticdl.cli.parsing import Command, Commands, Option
from elasticdl.common.errors import UserError

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


@dataclass(frozen=True, slots=True)
class Recipe:
    """What the image is made of. Paths are relative to the zoo, and empty where there is nothing of the kind."""

    base_image: str
    requirements: str = ""
    wheels: str = ""
    cluster_spec: str = ""
    extra_pypi_index: str = ""


def render(recipe: Recipe) -> str:
    """Packages come before modules: who changes a module does not install everything again."""
    pip = "RUN pip install --no-cache-dir"
    if recipe.extra_pypi_index:
        pip += f" --extra-index-url {recipe.extra_pypi_index}"
    lines = [
        "# Made by `elasticdl zoo init`; change it as you like. `elasticdl zoo build` builds it.",
        f"FROM {recipe.base_image}",
        "",
        "USER root",
    ]
    if recipe.wheels:
        lines += [f"COPY {recipe.wheels}/*.whl /wheels/", f"{pip} /wheels/*.whl"]
    if recipe.requirements:
        lines += [f"COPY {recipe.requirements} /requirements/", f"{pip} -r /requirements/{recipe.requirements}"]
    # Whatever the modes of its files are, the user can read them then.
    lines += [f"COPY --chown={_USER} . {ZOO_FOLDER}"]
    if recipe.cluster_spec:
        lines += [f"COPY --chown={_USER} {recipe.cluster_spec} /cluster_spec/"]
    lines += ["", f"WORKDIR {ZOO_FOLDER}", f"USER {_USER}", ""]
    return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Copy:
    """A file to be copied into the zoo, because an image is made only of what is there."""

    source: Path
    target: Path

    def check(self, option: str) -> None:
        """
        Raises:
            UserError: another file has that place.
        """
        if self.target.exists() and not filecmp.cmp(self.source, self.target, shallow=False):
            raise UserError(f"{option}: {self.target} is there and differs from {self.source}: remove one of them")

    def carry_out(self) -> None:
        if not self.target.exists():
            self.target.parent.mkdir(exist_ok=True)
            shutil.copyfile(self.source, self.target)


def _init(
    path: str, model_zoo: str, base_image: str, local_pkg_dir: str, cluster_spec: str, extra_pypi_index: str
) -> int:
    """Write the Dockerfile, and a .dockerignore if there is none; nothing is written if anything is wrong.

    Raises:
        UserError: a path that is not there, or another file in the place of one that would be written.
    """
    if path and model_zoo:
        raise UserError(f"the model zoo is given twice: {path} and --model_zoo {model_zoo}; leave one out")
    zoo_path = path or model_zoo or "."
    zoo = _folder("--model_zoo" if model_zoo else "PATH", zoo_path)
    wheels, copies = _wheels(zoo, local_pkg_dir)
    spec_file, more = _cluster_spec(zoo, cluster_spec)
    recipe = Recipe(
        base_image=check_image("--base_image", base_image),
        requirements=REQUIREMENTS if (zoo / REQUIREMENTS).is_file() else "",
        wheels=wheels,
        cluster_spec=spec_file,
        extra_pypi_index=_url("--extra_pypi_index", extra_pypi_index),
    )
    dockerfile, text = zoo / "Dockerfile", render(recipe)
    if dockerfile.exists() and dockerfile.read_text() != text:
        raise UserError(f"{dockerfile} is there and differs from what would be written: remove it first, or keep it")
    try:
        for copy in (*copies, *more):
            copy.carry_out()
        if not (zoo / ".dockerignore").exists():
            (zoo / ".dockerignore").write_text(IGNORED)
        dockerfile.write_text(text)
    except OSError as error:
        raise UserError(f"{error.filename} can't be written: {error.strerror}") from None
    print(f"{dockerfile} is written; next: elasticdl zoo build {zoo_path} --image IMAGE")
    return 0


def _build(path: str, image: str) -> int:
    """
    Raises:
        UserError: no Dockerfile, no program to build it with, or the image would run as root.
        ElasticDLError: that program failed.
    """
    name = check_image("--image", image)
    folder = _folder("PATH", path)
    dockerfile = folder / "Dockerfile"
    if not dockerfile.is_file():
        raise UserError(f"{dockerfile} is not there: `elasticdl zoo init {path}` writes it")
    find_builder().build(folder, dockerfile, name)
    return 0


def _push(image: str) -> int:
    """Raises as `_build`."""
    find_builder().push(check_image("IMAGE", image))
    return 0


def _folder(option: str, path: str) -> Path:
    folder = Path(path)
    if not folder.is_dir():
        raise UserError(f"{option} {path} is not a folder; expected that of the model zoo")
    return folder


def _wheels(zoo: Path, path: str) -> tuple[str, list[Copy]]:
    """The folder of wheels as the Dockerfile names it, and what is to be copied there."""
    if not path:
        return "", []
    folder = Path(path)
    found = sorted(folder.glob("*.whl"))
    if not found:
        raise UserError(f"--local_pkg_dir {path}: there is no folder of that name with *.whl in it")
    inside = _inside(zoo, folder)
    if inside:
        return inside, []
    copies = [Copy(wheel, zoo / WHEELS / wheel.name) for wheel in found]
    others = {wheel.name for wheel in (zoo / WHEELS).glob("*.whl")} - {wheel.name for wheel in found}
    if others:
        raise UserError(f"--local_pkg_dir {path}: {zoo / WHEELS} has {min(others)}, too: remove it first")
    for copy in copies:
        copy.check("--local_pkg_dir")
    return WHEELS, copies


def _cluster_spec(zoo: Path, path: str) -> tuple[str, list[Copy]]:
    """The file as the Dockerfile names it, and its copy if it lies elsewhere."""
    if not path:
        return "", []
    file = Path(path)
    if not file.is_file():
        raise UserError(f"--cluster_spec {path} is not a file")
    inside = _inside(zoo, file)
    if inside:
        return inside, []
    copy = Copy(file, zoo / _plain(file.name))
    copy.check("--cluster_spec")
    return file.name, [copy]


def _inside(zoo: Path, path: Path) -> str:
    """``path`` relative to the zoo; empty if it lies elsewhere, or is the zoo itself."""
    zoo, path = zoo.resolve(), path.resolve()
    return _plain(path.relative_to(zoo).as_posix()) if zoo in path.parents else ""


def _plain(name: str) -> str:
    if not _PLAIN.fullmatch(name):
        raise UserError(f"{name!r} can't be named in a Dockerfile: rename it to letters, digits and . _ - +")
    return name


def _url(option: str, url: str) -> str:
    if url and not re.fullmatch(r"https?://[^\s\"'\\$`;&|<>]+", url):
        raise UserError(f"{option} {url!r} is no URL; expected one like https://pypi.example.com/simple")
    return url


def _option(name: str, metavar: str, text: str, default: str = "") -> Option:
    return Option([f"--{name}"], default=default, metavar=metavar, help=text)


init = Command(
    "init",
    params=[
        click.Argument(
            ["path"], required=False, default="", metavar="[PATH]", help="folder of the model zoo (the current one)"
        ),
        _option(
            "base_image",
            "IMAGE",
            f"image with Python, elasticdl and Horovod ({BASE_IMAGE}, which docker/Dockerfile.cpu makes)",
            BASE_IMAGE,
        ),
        _option("model_zoo", "PATH", "the same as PATH"),
        _option("local_pkg_dir", "FOLDER", "folder of wheels that are installed in the image"),
        _option("cluster_spec", "FILE", "Python file that the image has in /cluster_spec"),
        _option("extra_pypi_index", "URL", "URL of a further index that packages may come from"),
    ],
    callback=_init,
    help="Write a Dockerfile for a model zoo into its folder.",
)
build = Command(
    "build",
    params=[
        click.Argument(
            ["path"],
            metavar="PATH",
            help="folder of the model zoo, in which `elasticdl zoo init` has written a Dockerfile",
        ),
        Option(["--image"], required=True, metavar="IMAGE", help="its name, as in registry.example.com/team/zoo:1"),
    ],
    callback=_build,
    help="Build the image of a model zoo, with docker, buildah or podman, whichever works here.",
)
push = Command(
    "push",
    params=[click.Argument(["image"], metavar="IMAGE", help="its name, as it was given to `elasticdl zoo build`")],
    callback=_push,
    help="Push an image to its registry, with docker, buildah or podman, whichever works here.",
)
zoo = Commands(
    "zoo",
    {
        "init": (__name__, "write a Dockerfile into a model zoo"),
        "build": (__name__, "build the image of a model zoo, with docker, buildah or podman"),
        "push": (__name__, "push that image to its registry"),
    },
)
