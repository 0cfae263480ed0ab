"""Lightning's trainer under `elasticdl run`, with real processes: alone and elastically it makes the same steps."""

import csv
import re
import signal
from pathlib import Path

import pytest
from running_job import start

pytest.importorskip("lightning")
SCRIPTS = Path(__file__).parent / "scripts"
SCRIPT = str(SCRIPTS / "lightning_example.py")
WARM = ["torch", "torch._dynamo", "lightning.pytorch", "elasticdl.elastic.lightning"]
LOGS = {"classifier": "digits", "language_model": "words", "gan": "gan"}


def rows_of(folder):
    """Those of all workers that were rank 0, one after the other."""
    earlier = sorted(folder.glob("metrics_*.csv"), key=lambda path: int(path.stem.partition("_")[2]))
    return [row for path in (*earlier, *folder.glob("metrics.csv")) for row in csv.DictReader(path.open())]


def read_log(folder, name):
    """Of each key the rows in which it was logged: step, epoch, value."""
    found = {}
    for row in rows_of(folder / LOGS[name]):
        for key, value in row.items():
            if key not in ("step", "epoch") and value:
                found.setdefault(key, []).append((int(row["step"]), row["epoch"], float(value)))
    return found


def steps_made(folder, name):
    rows = [rows for key, rows in read_log(folder, name).items() if key.startswith("train_loss")]
    return max((row[0] for each in rows for row in each), default=0)


def ended(said):
    """What the script says at its end: steps, epochs, and metrics by name."""
    (line,) = [line for line in said.splitlines() if line.startswith("ended ")]
    _, step, epoch = line.split(" (")[0].split()
    return int(step), int(epoch), {key: float(value) for key, value in re.findall(r"\('(\w+)', ([\d.e-]+)\)", line)}


def said_by_workers(job):
    return "".join(log.read_text() for log in job.job.logs.glob("*.log"))


def require_same(ours, theirs):
    assert ours.keys() == theirs.keys()
    for key, rows in theirs.items():
        assert [row[:2] for row in ours[key]] == [row[:2] for row in rows], key
        for mine, expected in zip(ours[key], rows, strict=True):
            assert mine[2] == pytest.approx(expected[2], rel=1e-5, abs=1e-6), f"{key}, step {mine[0]}"


def checkpoints(folder):
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


@pytest.mark.parametrize(
    "name",
    ["classifier", pytest.param("language_model", marks=pytest.mark.slow), pytest.param("gan", marks=pytest.mark.slow)],
)
def test_workers_join_leave_and_are_killed(alone, tmp_path, name):
    plain, elastic, slow = tmp_path / "plain", tmp_path / "elastic", tmp_path / "slow"
    expected = ended(alone.run_well(SCRIPT, name, plain, "auto"))
    slow.touch()
    script = ["python", SCRIPT, name, str(elastic), "elastic"]
    with start(
        tmp_path, "run", "--num_workers", "2", "--collective", "torch", "--", *script, TEST_SLOW_WHILE=str(slow)
    ) as job:

        def wait_for_steps(number=3):
            made = steps_made(elastic, name)
            job.wait_for(f"{number} steps", lambda: steps_made(elastic, name) >= made + number)

        wait_for_steps()
        job.scale(4)
        joined = job.wait_for_world(size=4)
        wait_for_steps()
        job.signal(joined["members"][2], signal.SIGKILL)
        killed = job.wait_for_world_without(joined["members"][2])
        wait_for_steps()
        job.signal(killed["members"][0], signal.SIGTERM)
        job.wait_for_world_without(killed["members"][0])
        wait_for_steps()
        for workers in (3, 1):
            job.scale(workers)
            job.wait_for_world(size=workers, after=killed["world"] + 1)
            wait_for_steps()
        slow.unlink()
        assert job.finish() == 0, job.describe()
        assert {"failed", "user error"}.isdisjoint(entry.get("cause", "") for entry in job.entries("worker_left"))
        elastically = ended(said_by_workers(job))
    # A kill may come while the members agree on something, which is told.
    warnings = [each for each in job.entries("warning") if "a decision is each worker's own" not in each["message"]]
    assert not warnings
    require_same(read_log(elastic, name), read_log(plain, name))
    assert checkpoints(elastic) == checkpoints(plain)
    assert elastically[:2] == expected[:2]
    assert elastically[2] == pytest.approx(expected[2], rel=1e-5)


def log_of(folder, key):
    return [float(row[key]) for row in rows_of(folder / "log") if row.get(key)]


def test_a_checkpoint_of_two_workers_is_resumed_by_three(alone, tmp_path):
    script = str(SCRIPTS / "lightning_resumes.py")

    def run_alone(folder, *arguments):
        said = alone.run_well(script, folder, "auto", *arguments)
        return [line for line in said.splitlines() if line.startswith("predicted")]

    run_alone(tmp_path / "first", "2")
    expected = run_alone(tmp_path / "second", "4", str(tmp_path / "first" / "epoch=1.ckpt"))
    ours, slow = tmp_path / "ours", tmp_path / "slow"

    def run(number, workers, *arguments, kills=False):
        folder = ours / number
        command = ["python", script, str(folder), "elastic", *arguments]
        options = ["--num_workers", workers, "--collective", "torch", "--", *command]
        with start(tmp_path / number, "run", *options, TEST_SLOW_WHILE=str(slow)) as job:
            if kills:
                job.wait_for("a step", lambda: (folder / "log" / "metrics.csv").exists() and log_of(folder, "loss"))
                job.signal(1, signal.SIGKILL)
                job.wait_for("its heir", lambda: any(3 in each["members"] for each in job.entries("world_formed")))
                slow.unlink()
            assert job.finish() == 0, job.describe()
            return [line for line in said_by_workers(job).splitlines() if line.startswith("predicted")]

    run("1", "2", "2")
    slow.touch()
    said = run("2", "3", "4", str(ours / "1" / "epoch=1.ckpt"), kills=True)
    assert said == expected
    for key in ("loss", "val_loss"):
        assert log_of(ours / "1", key) == pytest.approx(log_of(tmp_path / "first", key), rel=1e-5)
        assert log_of(ours / "2", key) == pytest.approx(log_of(tmp_path / "second", key), rel=1e-5)


WORDS = 'Trainer(strategy="elastic"): LBFGS evaluates its closure several times a step'


@pytest.mark.parametrize("engine", ["torch", pytest.param("horovod", marks=pytest.mark.slow)])
def test_what_one_worker_decides_all_do_as_one_device_does(alone, tmp_path, engine):
    script = str(SCRIPTS / "lightning_decides.py")
    (expected,) = [line for line in alone.run_well(script, "auto").splitlines() if line.startswith("decided ")]
    assert expected.split()[1:4] == ["2", "5", "11"]  # it stops in the fifth batch of the second epoch
    command = ["run", "--num_workers", "2", "--collective", engine, "--", "python", script, "elastic"]
    with start(tmp_path, *command) as job:
        assert job.finish() == 0, job.describe()
        said = [line for line in said_by_workers(job).splitlines() if line.startswith("decided ")]
    assert said == [expected] * 2


@pytest.fixture
def refused(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import lightning, torch, elasticdl.elastic.lightning\n"
        "class Module(lightning.LightningModule):\n"
        "    layer = None\n"
        "    def training_step(self, batch): ...\n"
        "    def configure_optimizers(self):\n"
        "        return torch.optim.LBFGS([torch.nn.Parameter(torch.zeros(1))])\n"
        "trainer = lightning.Trainer(strategy='elastic', accelerator='cpu', logger=False, enable_checkpointing=False)\n"
        "trainer.fit(Module(), torch.utils.data.DataLoader(torch.zeros(4, 3)))\n"
    )
    return script


def test_what_cant_be_had_is_one_line(alone, refused):
    done = alone.run(refused)
    assert done.returncode == 2
    assert WORDS in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


@pytest.mark.slow  # of a plain loop's script in test_plain_loop.py
def test_it_is_what_a_job_ends_with(tmp_path, refused):
    with start(tmp_path, "run", "--num_workers", "1", "--", "python", str(refused)) as job:
        assert job.finish() == 1
    assert WORDS in job.output
