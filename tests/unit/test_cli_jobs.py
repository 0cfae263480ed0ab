"""Jobs in the folder of jobs: whether one runs, which give way to others, and what shells and programs are told of them; and what is
checked before one starts, on this machine, on a cluster whose answers are given, and with Slurm, whose programs are scripts."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import yaml
from cli_kit import DEADLINE, CalledMaster, ended_job, new_job, run, scene_in, serving
from refusal_kit import refused
from test_common_manifests import parts

from elasticdl.cli import folder_run
from elasticdl.cli.__main__ import main
from elasticdl.cli.cluster_run import Submission
from elasticdl.cli.folder_job import KEPT_STATES, Life, handle_of, prune_jobs
from elasticdl.cli.job_handle import CALL_TIMEOUT
from elasticdl.common.errors import UnreachableError, UserError
from elasticdl.common.reason import shown
from elasticdl.job import jobdir
from elasticdl.job.jobdir import JobDir, MasterAddress, jobs_root, kept_states, list_jobs, write_aside
from elasticdl.job.spec import JobSpec
from elasticdl.kube.client import FORBIDDEN, NoAnswerError, NotDoneError

COMMAND = [sys.executable, "-m", "elasticdl.cli"]


@pytest.fixture(autouse=True)
def scene(tmp_path, monkeypatch):
    with scene_in(tmp_path, monkeypatch) as made:
        yield made


def anew(**options):
    """A command makes a job that is named `one`."""
    return folder_run.new_job(JobSpec(job_name="one", **options))


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


MASTER = '"address": "127.0.0.1:1", "token": "secret"'
# What stands in the folder, and where in its life the job is then. `dead` and `own` are numbers of processes.
LIVES = [
    ("", Life.STARTING),
    ("aged", Life.LOST),  # its start was cut off long ago
    (f"starter {{{MASTER}, 'pid': dead}}", Life.LOST),
    (f"starter {{{MASTER}, 'pid': own}}; aged", Life.STARTING),  # its check takes long
    (f"master {{{MASTER}, 'pid': own}}", Life.RUNNING),
    (f"master {{{MASTER}, 'pid': dead}}", Life.LOST),
    (f"master {{{MASTER}, 'pid': dead}}; starter {{{MASTER}, 'pid': own}}", Life.LOST),
    (f"master {{{MASTER}, 'pid': dead, 'host': 'another'}}", Life.RUNNING),
    (f"master {{{MASTER}, 'pid': own, 'started': 1}}", Life.LOST),  # its number is another's by now
    *((f"master {{{MASTER}, 'pid': {pid}}}; aged", Life.LOST) for pid in ("'1'", 0, -1, 10**30)),
    *((f"master {text}; aged", Life.LOST) for text in ("{", "[]", "{'address': '127.0.0.1:1', 'of_next_year': 1}")),
    (f"master {{{MASTER}, 'pid': own}}; status {{}}", Life.ENDED),
]


@pytest.mark.parametrize(("stands", "life"), LIVES)
def test_the_life_of_a_job(scene, stands, life):
    job = new_job("one")
    for step in filter(None, stands.split("; ")):
        name, _, text = step.partition(" ")
        if name == "aged":
            os.utime(job.path, (1e9, 1e9))
        else:
            scene.lost("another")
            dead = json.loads((jobs_root() / "another" / "master.json").read_text())["pid"]
            numbered = text.replace("'", '"').replace("dead", str(dead)).replace("own", str(os.getpid()))
            (job.path / f"{name}.json").write_text(numbered)
    assert handle_of(job).life() is life
    prune_jobs(keep=0)
    assert job.path.exists() == (life in (Life.STARTING, Life.RUNNING))


@pytest.mark.parametrize("full", [True, False])
def test_where_a_job_can_not_be_made_the_one_that_gave_way_comes_back(monkeypatch, full):
    old = ended_job("one", phase="stopped")
    (old.path / "stopped-0000000007.state").write_text("the training")
    before = files(old.path)

    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left") if full else UserError("the job is wrong")

    if full:
        monkeypatch.setattr(folder_run, "write_aside", fail)
    for _ in range(2):
        with pytest.raises((OSError, UserError), match="No space left" if full else "is wrong"), anew():
            fail()
        assert files(old.path) == before
        assert [path.name for path in jobs_root().iterdir()] == ["one"]


def test_of_two_commands_that_make_a_job_of_one_name_at_once_one_has_it(monkeypatch):
    """What has given way to the first does not give way to the other."""
    old, found, refused, ended = ended_job("one", phase="stopped"), [], [], threading.Event()
    (old.path / "stopped-0000000007.state").write_text("the training")

    def goes_on_slowly(job):
        goes_on = handle_of(job).over() == ""
        time.sleep(0.1)
        return goes_on

    def make():
        try:
            with anew() as (job, _):
                found.extend(path.name for path in kept_states(job.path))
                ended.wait(DEADLINE)
        except UserError as error:
            refused.append(str(error))
            ended.set()

    monkeypatch.setattr(folder_run, "goes_on", goes_on_slowly)
    threads = [threading.Thread(target=make) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == ["stopped-0000000007.state"]
    assert [text.partition(" already")[0] for text in refused] == ["there is a job named one"]


def test_old_jobs_go_and_of_older_ones_what_they_were_stopped_with(scene):
    """Running ones stay, and do not count."""
    scene.deaf("live")
    for number in range(KEPT_STATES + 4):
        (ended_job(f"old-{number}").path / "stopped-0000000040.state").touch()
        scene.aged(f"old-{number} {1000 + number}")
    prune_jobs(keep=KEPT_STATES + 2)
    names = ["live", *(f"old-{number}" for number in range(KEPT_STATES + 3, 1, -1))]
    assert {job.name for job in list_jobs()} == {*names}
    assert {job.name for job in list_jobs() if kept_states(job.path)} == {*names[1 : KEPT_STATES + 1]}


def test_a_file_is_written_whole_where_a_process_of_the_same_number_has_left_a_part(tmp_path):
    """As each master in a pod has the number 1."""
    file = tmp_path / "alone" / "status.json"
    file.parent.mkdir()
    file.with_name(f".status.json.{os.getpid()}").write_text("{")
    write_aside(file, "{}")
    assert files(file.parent) == {"status.json": b"{}"}


COMPLETED = {"st": ["status", "stop"], "status li": ["live"], "run --num": ["--num_workers"], "run -- python tr": []}


@pytest.mark.parametrize(("words", "found"), COMPLETED.items())
def test_a_shell_completes_commands_options_and_names(capsys, monkeypatch, words, found):
    new_job("live")
    typed = {"COMP_WORDS": f"elasticdl {words}", "COMP_CWORD": str(words.count(" ") + 1)}
    for name, value in {"_ELASTICDL_COMPLETE": "bash_complete", **typed}.items():
        monkeypatch.setenv(name, value)
    code, out, err = run(capsys)
    shown = [line.partition(",")[2] for line in out.split()]
    assert (code, err, shown[: len(found)], bool(shown)) == (0, "", found, bool(found))


def test_logs_are_followed_to_the_end_of_the_job(scene):
    scene.deaf("live")
    (job,) = list_jobs()
    job.master_log.write_text("first\n")
    lines = handle_of(job).logs(None, follow=True)
    assert next(lines) == "master    | first"
    job.worker_log(4).write_text("hello\n")
    assert next(lines) == "worker-4  | hello"
    write_aside(job.status, "{}")
    assert list(lines) == []


# ---- who reads ----


FULL = b"elasticdl status: No space left on device: neither what it prints nor its files can be written\n"


@pytest.mark.parametrize(("full", "ends"), [(False, (141, b"")), (True, (1, FULL))])
def test_what_nobody_reads_ends_with_the_code_of_a_broken_pipe_and_a_full_disk_is_told(full, ends):
    reader, writer = os.pipe()
    os.close(reader)
    with open("/dev/full" if full else writer, "w") as stdout:
        done = subprocess.run([*COMMAND, "status"], stdout=stdout, stderr=subprocess.PIPE, timeout=DEADLINE)
    assert (done.returncode, done.stderr) == ends


def test_who_is_interrupted_does_not_wait_for_masters_that_do_not_answer():
    asked, over, master = threading.Event(), threading.Event(), CalledMaster("any")
    master.Status = lambda request, context: asked.set() or over.wait(DEADLINE)
    with serving(master) as address:
        for name in ("one", "two"):
            address.write(new_job(name).master)
        with subprocess.Popen([*COMMAND, "status"], stderr=subprocess.PIPE) as process:
            assert asked.wait(DEADLINE)
            process.send_signal(signal.SIGINT)
            assert (process.communicate(timeout=CALL_TIMEOUT / 2)[1], process.returncode) == (b"", 130)
        over.set()


# ---- what is checked before a job starts: on this machine ----


def test_a_present_directory_that_is_gone_is_told_in_one_line(tmp_path, monkeypatch):
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    assert shown(tmp_path / "train.py") == str(tmp_path / "train.py")
    told = "the folder in which this was typed is gone: change to one that is there"
    refused(told, lambda: folder_run.checked_here(JobSpec(command=("true",))))


def test_folders_become_absolute_and_a_bare_python_the_one_that_has_elasticdl(tmp_path):
    (tmp_path / "train.csv").touch()
    spec = JobSpec(model_zoo="zoo", output="../out", training_data="train.csv", validation_data="synthetic:8")
    absolute = folder_run.with_absolute_paths(spec, tmp_path)
    assert (absolute.model_zoo, absolute.output) == (str(tmp_path / "zoo"), str(tmp_path.parent / "out"))
    assert (absolute.training_data, absolute.checkpoint_dir) == (str(tmp_path / "train.csv"), "")
    assert absolute.validation_data == "synthetic:8", "not a file, so dataset() has to know what it means"
    described = {name for name, field in JobSpec.model_fields.items() if str(field.description).startswith("folder")}
    assert described == {*folder_run.FOLDERS_READ, *jobdir.WRITTEN}
    assert folder_run.with_this_python(("python", "train.py")) == (sys.executable, "train.py")
    for command in (("/usr/bin/python", "train.py"), ("sh", "-c", "python train.py")):
        assert folder_run.with_this_python(command) == command


# ---- on a cluster ----


def cluster(**answers):
    """It takes everything, and has nothing of what may be there, if it does not answer otherwise."""
    usual = {"may": lambda *_: True, "serves": lambda group: True, "find": lambda *_: None}
    usual["create"] = lambda manifest, dry_run=False: manifest
    return SimpleNamespace(**{"namespace": "lab", **usual, **answers})


@pytest.mark.parametrize("there", [True, False, None], ids=["there", "missing", "whoever may not look can use it"])
def test_a_queue_that_volcano_does_not_have_is_refused(there):
    def find(kind, name):
        if kind == "Queue" and there is None:
            raise NotDoneError(FORBIDDEN, f'queues "{name}" is forbidden: User "you" cannot get resource "queues"')
        return {"metadata": {"name": name}} if kind == "Queue" and there else None

    check = Submission(cluster(find=find), parts(queue="volcano=team"), pytest.fail).check
    check() if there is not False else refused(r"^--queue: there is no Queue team in the cluster$", check)


def test_what_a_cluster_that_fails_does_not_delete_is_told_with_what_does():
    def fail(*_):
        raise NoAnswerError(503, "the cluster failed")

    submission = Submission(cluster(create=fail, delete=fail), parts(), (said := []).append)
    refused("the cluster failed", submission.make, UnreachableError)
    line = "warning: Job digits-master could not be deleted again: the cluster failed; `elasticdl delete digits --namespace lab` removes"
    assert said == [f"{line} what is left"]


def test_manifests_are_written_for_others_to_apply_and_only_for_the_owner_to_read(tmp_path, capsys):
    file = tmp_path / "job.yaml"
    file.write_text("old")
    file.chmod(0o644)
    argv = ["train", "--image", "i", "--model_def", "m", "--job_name", "digits", "--namespace", "lab"]
    assert main([*argv, "--yaml", str(file)]) == 0
    told = capsys.readouterr().out
    assert told.startswith(f"job digits written to {file}, with its secret keys: ")
    assert file.stat().st_mode & 0o777 == 0o600
    made = list(yaml.safe_load_all(file.read_text()))
    assert (made[-1]["kind"], made[-1]["spec"]["parallelism"]) == ("Job", 1)
    assert {each["metadata"]["namespace"] for each in made} == {"lab"}
    assert [each["immutable"] for each in made if each["kind"] == "Secret"] == [True] * 4
    (spec,) = [each for each in made if each["metadata"]["name"] == "digits-spec"]
    assert JobSpec.from_json(spec["data"]["job.json"]).model_def == "m"


# ---- with Slurm; its sessions: `test_cli_sessions.py` ----


@pytest.fixture
def slurm(scene):
    for name in ("sbatch", "squeue", "scancel"):
        scene.program(name)
    scene.batch("mine")
    return scene


def job() -> JobDir:
    return JobDir(jobs_root() / "mine")


def submit(**options):
    return lambda: folder_run.submit(job(), JobSpec(launcher="slurm", **options))


def test_what_is_wrong_with_slurm_or_the_arguments_for_workers_is_told_before_a_master_is_submitted(slurm, monkeypatch):
    slurm.program("sbatch printf 'sbatch: error: no such partition\\nallocation failure: bad\\n' >&2; exit 1")
    told = r"^--slurm_args: Slurm refuses sbatch: no such partition; allocation failure: bad$"
    refused(told, submit(slurm_args="--partition=x"))
    assert len(slurm.asked()) == 1
    monkeypatch.setenv("PATH", "")
    refused(r"^--launcher slurm: can't run sbatch: No such file or directory; is this ", submit())


def test_before_a_lost_job_gives_way_its_workers_are_cancelled(slurm):
    slurm.program("squeue echo 'FAILED|None'")
    with folder_run.new_job(JobSpec(job_name="mine", launcher="slurm")):
        assert slurm.asked()[-1:] == ["scancel --quiet --me --name=elasticdl-mine-7-worker"]


@pytest.mark.parametrize("scancel", ["", "echo 'scancel: error: no controller' >&2; exit 1"])
def test_a_batch_job_whose_number_can_not_be_kept_is_cancelled(slurm, monkeypatch, capsys, scancel):
    """As on a full disk: the job's folder goes then."""

    def full(path, text):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    slurm.program("sbatch echo 7")
    slurm.program(f"scancel {scancel}")
    monkeypatch.setattr(folder_run, "write_aside", full)
    refused("No space left", submit(), OSError)
    assert slurm.asked()[2:] == ["scancel --quiet 7"]
    assert ("warning: Slurm's job 7 could not be cancelled: " in capsys.readouterr().err) == bool(scancel)


@pytest.mark.parametrize(
    ("squeue", "over"),
    [("echo 'RUNNING|None'", ""), ("echo 'CANCELLED|None'", "it has ended"), ("exit 1", "it has ended")],
)
def test_a_job_goes_on_while_its_master_closes_its_places(slurm, squeue, over):
    slurm.program(f"squeue {squeue}")
    job().status.write_text('{"phase": "stopped"}')
    MasterAddress("host:1", "", 1).write(job().master)
    assert handle_of(job()).over() == over
    job().master.unlink()
    assert handle_of(job()).over() == "it has ended"
