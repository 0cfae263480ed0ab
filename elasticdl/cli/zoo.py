"""``elasticdl zoo``: a model zoo's image: `init` writes its Dockerfile, `build` builds it, `push` pushes it."""

from __future__ import annotations

import filecmp
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import elasticdl
from elasticdl.cli.images import check_image, find_builder
from elasticdl.cli.nearest import did_you_mean
from elasticdl.cli.parser import Parser
from elasticdl.cli.zoo_dockerfile import IGNORED, Recipe, render
from elasticdl.common.errors import UserError

# That of docker/Dockerfile.cpu.
BASE_IMAGE = f"elasticdl:{elasticdl.__version__}-cpu"
REQUIREMENTS = "requirements.txt"
WHEELS = "wheels"
# A Dockerfile ends a name at white space, and takes some other characters for its own.
_PLAIN = re.compile(r"[\w./+-]+")

USAGE = """usage: elasticdl zoo init|build|push [OPTIONS]

  init   write a Dockerfile into a model zoo
  build  build the image of a model zoo, with docker, buildah or podman
  push   push that image to its registry

`elasticdl zoo init --help` shows the options of init."""


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


def command(argv: Sequence[str]) -> int:
    commands = {"init": init, "build": build, "push": push}
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(USAGE)
        return 0 if argv else 2
    name, *rest = argv
    if name not in commands:
        raise UserError(f"unknown command {name}: {did_you_mean(name, commands)}")
    commands[name](rest)
    return 0


def init(argv: Sequence[str]) -> None:
    """Write the Dockerfile, and a .dockerignore if there is none; nothing is written if anything is wrong.

    Raises:
        UserError: a path that is not there, or another file in the place of one that would be written.
    """
    given = _init_parser().parse(argv)
    if given.path and given.model_zoo:
        raise UserError(f"the model zoo is given twice: {given.path} and --model_zoo {given.model_zoo}; leave one out")
    path = given.path or given.model_zoo or "."
    zoo = _folder("--model_zoo" if given.model_zoo else "PATH", path)
    wheels, copies = _wheels(zoo, given.local_pkg_dir)
    cluster_spec, more = _cluster_spec(zoo, given.cluster_spec)
    recipe = Recipe(
        base_image=check_image("--base_image", given.base_image),
        requirements=REQUIREMENTS if (zoo / REQUIREMENTS).is_file() else "",
        wheels=wheels,
        cluster_spec=cluster_spec,
        extra_pypi_index=_url("--extra_pypi_index", given.extra_pypi_index),
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
    print(f"{dockerfile} is written; next: elasticdl zoo build {path} --image IMAGE")


def build(argv: Sequence[str]) -> None:
    """
    Raises:
        UserError: no Dockerfile, no program to build it with, or the image would run as root.
        ElasticDLError: that program failed.
    """
    parser = Parser(
        "zoo build", "Build the image of a model zoo, with docker, buildah or podman, whichever works here."
    )
    parser.add_argument("path", help="folder of the model zoo, in which `elasticdl zoo init` has written a Dockerfile")
    parser.add_argument("--image", required=True, help="name of the image, as in registry.example.com/team/zoo:1")
    given = parser.parse(argv)
    image = check_image("--image", given.image)
    zoo = _folder("PATH", given.path)
    dockerfile = zoo / "Dockerfile"
    if not dockerfile.is_file():
        raise UserError(f"{dockerfile} is not there: `elasticdl zoo init {given.path}` writes it")
    find_builder().build(zoo, dockerfile, image)


def push(argv: Sequence[str]) -> None:
    """Raises as `build`."""
    parser = Parser("zoo push", "Push an image to its registry, with docker, buildah or podman, whichever works here.")
    parser.add_argument("image", help="name of the image, as it was given to `elasticdl zoo build`")
    given = parser.parse(argv)
    find_builder().push(check_image("IMAGE", given.image))


def _init_parser() -> Parser:
    parser = Parser("zoo init", "Write a Dockerfile for a model zoo into its folder.")
    parser.add_argument("path", nargs="?", default="", help="folder of the model zoo (the current one)")
    parser.add_argument(
        "--base_image",
        default=BASE_IMAGE,
        help=f"image with Python, elasticdl and Horovod ({BASE_IMAGE}, which docker/Dockerfile.cpu makes)",
    )
    parser.add_argument("--model_zoo", default="", help="the same as PATH")
    parser.add_argument("--local_pkg_dir", default="", help="folder of wheels that are installed in the image")
    parser.add_argument("--cluster_spec", default="", help="Python file that the image has in /cluster_spec")
    parser.add_argument("--extra_pypi_index", default="", help="URL of a further index that packages may come from")
    return parser


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
