"""``elasticdl zoo``: the Dockerfile that is written, and what docker, buildah or podman is asked to do."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import pytest
from dockerfile_kit import read

from elasticdl.cli.__main__ import dispatch, main
from elasticdl.cli.commands import zoo_image as zoo
from elasticdl.common.errors import ElasticDLError, UserError

IMAGE = "registry.example.com:5000/team/zoo:1"


def zoo_command(argv):
    return dispatch(["zoo", *argv])


@pytest.fixture
def folder(tmp_path):
    """A model zoo with one module."""
    made = tmp_path / "zoo"
    made.mkdir()
    (made / "cnn.py").write_text("")
    return made


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """An empty folder that is all of PATH."""
    made = tmp_path / "bin"
    made.mkdir()
    monkeypatch.setenv("PATH", str(made))
    return made


def fake(
    programs: Path, name: str, code: int = 0, user: str = "1000:1000", answers: bool = True, lacks: str = ""
) -> Path:
    """A program that builds and pushes nothing, but keeps the arguments in the file that is returned, and ends with ``code``.

    Its images run as ``user``, and it has all but ``lacks``; with ``answers`` False it is like docker without its daemon.
    """
    record = programs.parent / f"{name}.json"
    program = programs / name
    program.write_text(
        f"""#!{sys.executable} -IS
import json, sys
if sys.argv[1] == "version":
    sys.exit({not answers:d})
if "inspect" in sys.argv:
    if sys.argv[-1] == {lacks!r}:
        sys.exit(1)
    print({user!r})
    sys.exit(0)
json.dump(sys.argv[1:], open({str(record)!r}, "w"))
sys.exit({code})
"""
    )
    program.chmod(0o755)
    return record


def init(folder: Path, *options: str) -> str:
    assert zoo_command(["init", "--model_zoo", str(folder), *options]) == 0
    return (folder / "Dockerfile").read_text()


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_fullest_dockerfile(folder, tmp_path):
    (folder / "requirements.txt").write_text("scikit-learn==1.9.1\n")
    (tmp_path / "dist").mkdir()
    (tmp_path / "dist" / "mine-1-py3-none-any.whl").write_bytes(b"wheel")
    text = init(
        folder,
        "--base_image=python:3.11.14",
        f"--local_pkg_dir={tmp_path / 'dist'}",
        "--extra_pypi_index=https://pypi.example.com/simple",
    )
    pip = "pip install --no-cache-dir --extra-index-url https://pypi.example.com/simple"
    assert [(line.word, line.rest) for line in read(text)] == [
        ("FROM", "python:3.11.14"),
        ("USER", "root"),
        ("COPY", "wheels/*.whl /wheels/"),
        ("RUN", f"{pip} /wheels/*.whl"),
        ("COPY", "requirements.txt /requirements/"),
        ("RUN", f"{pip} -r /requirements/requirements.txt"),
        ("COPY", "--chown=1000:1000 . /model_zoo"),
        ("WORKDIR", "/model_zoo"),
        ("USER", "1000:1000"),
    ]
    assert (folder / "wheels" / "mine-1-py3-none-any.whl").read_bytes() == b"wheel"


def test_the_least_dockerfile_and_that_the_folder_may_be_an_argument(folder, capsys):
    assert main(["zoo", "init", str(folder)]) == 0
    lines = [(line.word, line.rest) for line in read((folder / "Dockerfile").read_text())]
    assert lines[:3] == [("FROM", zoo.BASE_IMAGE), ("USER", "root"), ("COPY", "--chown=1000:1000 . /model_zoo")]
    assert "Dockerfile" in (folder / ".dockerignore").read_text().splitlines()
    assert f"next: elasticdl zoo build {folder} --image IMAGE" in capsys.readouterr().out
    written = contents(folder)
    assert main(["zoo", "init", str(folder)]) == 0
    assert contents(folder) == written
    with pytest.raises(UserError, match=r"given twice: .*zoo and --model_zoo \.;"):
        zoo_command(["init", str(folder), "--model_zoo", "."])


def test_another_dockerfile_is_not_overwritten(folder, tmp_path):
    (folder / "Dockerfile").write_text("FROM mine:1\n")
    before = contents(folder)
    with pytest.raises(UserError, match="Dockerfile is there and differs"):
        init(folder)
    assert contents(folder) == before


@pytest.mark.parametrize(
    ("option", "line"),
    [
        ("--model_zoo=nowhere", "--model_zoo nowhere is not a folder"),
        ("--local_pkg_dir=nowhere", "--local_pkg_dir nowhere: "),
        ("--base_image=a b", "--base_image 'a b' is no name of an image"),
        ("--extra_pypi_index=https://a/$(id)", "is no URL"),
    ],
)
def test_a_mistake_is_one_line_and_nothing_is_written(folder, option, line):
    before = contents(folder)
    with pytest.raises(UserError) as raised:
        init(folder, option)
    assert line in str(raised.value)
    assert "\n" not in str(raised.value)
    assert contents(folder) == before


def test_a_wheel_of_before_is_told_and_a_name_that_a_dockerfile_can_not_hold(folder, tmp_path):
    for name in ("dist", "zoo/wheels"):
        (tmp_path / name).mkdir()
    (tmp_path / "dist" / "mine-2-py3-none-any.whl").touch()
    (folder / "wheels" / "mine-1-py3-none-any.whl").touch()
    (folder / "my wheels").mkdir()
    (folder / "my wheels" / "mine-2-py3-none-any.whl").touch()
    with pytest.raises(UserError, match="can't be named in a Dockerfile"):
        init(folder, f"--local_pkg_dir={folder / 'my wheels'}")
    with pytest.raises(UserError, match=r"has mine-1-py3-none-any\.whl, too"):
        init(folder, f"--local_pkg_dir={tmp_path / 'dist'}")


@pytest.mark.parametrize(("name", "verb"), [("docker", "build"), ("buildah", "bud"), ("podman", "build")])
def test_build_and_push(folder, programs, name, verb, capfd):
    record = fake(programs, name)
    init(folder)
    assert main(["zoo", "build", str(folder), "--image", IMAGE]) == 0
    arguments = [verb, "--tag", IMAGE, "--file", str(folder / "Dockerfile"), str(folder)]
    assert json.loads(record.read_text()) == arguments
    assert capfd.readouterr().err == f"{shlex.join([str(programs / name), *arguments])}\n"
    assert main(["zoo", "push", IMAGE]) == 0
    assert json.loads(record.read_text()) == ["push", IMAGE]


@pytest.mark.parametrize(("mute", "found"), [((), "docker"), (("docker",), "buildah"), (("podman",), "docker")])
def test_the_first_that_works_is_taken(programs, mute, found):
    for name in ("podman", "buildah", "docker"):
        fake(programs, name, answers=name not in mute)
    assert zoo.find_builder().name == found


def test_docker_without_its_daemon_is_told_and_that_none_works(programs):
    with pytest.raises(UserError, match=r"neither docker, buildah nor podman works here: install one of them"):
        zoo_command(["push", IMAGE])
    fake(programs, "docker", answers=False)
    with pytest.raises(UserError, match=r"docker is there, but `docker version` fails: does its daemon run\?"):
        zoo_command(["push", IMAGE])


@pytest.mark.parametrize("user", ["", "0", "0:1000", "elasticdl", "1000", "10:elasticdl"])
def test_an_image_that_may_run_as_root_is_refused(folder, programs, user):
    fake(programs, "docker", user=user)
    init(folder)
    if user[:1].strip("0").isdigit():
        assert zoo_command(["build", str(folder), "--image", IMAGE]) == 0
        return
    with pytest.raises(UserError, match=rf"its user is {user or 'root'}, and .*: end .*Dockerfile with USER 1000:1000"):
        zoo_command(["build", str(folder), "--image", IMAGE])


@pytest.mark.parametrize(("base", "kind"), [(zoo.BASE_IMAGE, "cpu"), (zoo.BASE_IMAGE.replace("cpu", "gpu"), "gpu")])
def test_a_base_image_that_nobody_made_is_told_before_anything_is_built(folder, programs, base, kind):
    record = fake(programs, "buildah", lacks=base)
    init(folder, f"--base_image={base}")
    with pytest.raises(UserError) as raised:
        zoo_command(["build", str(folder), "--image", IMAGE])
    command = f"buildah bud -f docker/Dockerfile.{kind} -t {base} ."
    assert str(raised.value) == f"{folder}/Dockerfile: {base} is not here; once, in a checkout of elasticdl: {command}"
    assert not record.exists()


def test_a_failure_of_the_program_is_told(programs, capsys):
    fake(programs, "docker", code=3)
    assert main(["zoo", "push", IMAGE]) == 1
    told = "elasticdl zoo: `docker push` ended with 3; what it printed above says why"
    assert capsys.readouterr().err.splitlines()[1:] == [told]
    (programs / "docker").unlink()
    fake(programs, "buildah")
    (programs / "buildah").write_text("#!/nowhere/at/all\n")
    with pytest.raises(ElasticDLError, match="can't be run: No such file"):
        zoo_command(["push", IMAGE])


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["build", "docs", "--image=a"], "elasticdl zoo init docs"),
        (["build", ".", "--image=-x"], "is no name of an image"),
        (["build", "nowhere", "--image=a"], "PATH nowhere is not a folder"),
    ],
)
def test_mistakes_do_not_reach_the_program(programs, argv, line):
    record = fake(programs, "docker")
    with pytest.raises(UserError) as raised:
        zoo_command(argv)
    assert line in str(raised.value)
    assert not record.exists()
