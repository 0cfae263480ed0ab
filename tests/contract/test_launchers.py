"""What every launcher must do: with workers that are processes of this machine, started plainly or forked, or of agents; what is
particular to this machine: logs, temporary files, cores; and that workers that are forked are ordinary processes, also when something
dies, can't be forked, or is not wanted any more."""

import asyncio
import json
import os
import random
import re
import subprocess
import sys
import tempfile
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import psutil
import pytest
from agent_kit import acting, place, tell

from elasticdl.common.credentials import WORKER_ID
from elasticdl.common.front_ends import python_path
from elasticdl.common.process_group import tethered
from elasticdl.job.jobdir import JobDir, MasterAddress
from elasticdl.job.spec import JobSpec, WorkerRange
from elasticdl.master.core import events
from elasticdl.master.core.events import ExitCause, StacksFound, WorkerExited, WorkerPending, WorkerPlaced
from elasticdl.master.shell.serve import LocalWorkers
from elasticdl.places.launcher import PlaceLauncher
from elasticdl.places.local import TIMES, LocalStarter, Slots
from elasticdl.places.worker_process import Spawner, judge_exit
from tests.stories import on, on_each

DEADLINE = 60.0
TESTED_BY = "TESTED_BY"  # in the environment of all that a launcher under test starts
MODULES = ("multiprocessing", "tempfile", "random", "logging", "numpy")
WAITING = "import os, time; print(os.getpid(), 'numpy' in __import__('sys').modules, flush=True); time.sleep(600)"


class Launching:
    """A launcher, and what it reports."""

    def __init__(self, make, folder, spawner=None, **options):
        self.spawner, self.reports, self.folder, self.seen = spawner, asyncio.Queue(), folder, []
        self.launcher = PlaceLauncher(*make, self.reports.put_nowait, **options)

    async def next(self, kind):
        """The next report, which must be of this kind."""
        report = await asyncio.wait_for(self.reports.get(), DEADLINE)
        self.seen.append(report)
        assert isinstance(report, kind), report
        return report

    async def placed(self, number):
        """Launch it; returns its report once it is placed."""
        await self.launcher.launch(number)
        report = await self.next(WorkerPlaced)
        assert report.worker_id == number
        return report

    async def ended(self, number):
        """How its end is reported, which is the next report."""
        report = await self.next(WorkerExited)
        assert report.worker_id == number
        return report.cause, report.code

    async def ends_of(self, count):
        """What each of so many workers printed, and how its end is reported, in the order of their numbers."""
        for number in range(count):
            await self.launcher.launch(number)
        ends = []
        while len(ends) < count:
            report = await self.next(WorkerPlaced | WorkerExited)
            ends += [report] if isinstance(report, WorkerExited) else []
        ends.sort(key=lambda end: end.worker_id)
        logs = [self.folder / f"{number}.log" for number in range(count)]  # which one that can't be started has not
        return [(log.read_text() if log.exists() else "", end) for log, end in zip(logs, ends, strict=True)]

    @property
    def template(self):
        """What workers are forked from."""
        return psutil.Process(self.spawner._template.pid)


@asynccontextmanager
async def launcher_of(argv, folder, modules=None, environ=None, slots=0):
    """With ``modules`` its workers are forked."""
    folder.mkdir(exist_ok=True)
    before = set(psutil.Process().children(recursive=True))
    environ = {**(environ or os.environ), TESTED_BY: str(os.getpid())}
    common = {**environ, **python_path(environ)}
    spawner = Spawner(argv, modules or (), "", common, folder / "master.log")

    def log(number):
        return folder / f"{number}.log"

    starter = partial(LocalStarter, spawner, lambda number, place: {**common, WORKER_ID: str(number)}, log, log)
    scene = Launching((partial(Slots, slots, (), folder), starter), folder, spawner, seconds=TIMES)
    try:
        yield scene
    finally:
        await scene.launcher.close()
    left = set(psutil.Process().children(recursive=True)) - before
    assert not (left := [each for each in left if is_of_a_launcher(each)]), left


def is_of_a_launcher(process):
    """Not multiprocessing's, nor what a cluster of other tests starts meanwhile."""
    try:
        return process.environ().get(TESTED_BY) == str(os.getpid())
    except psutil.ZombieProcess:  # nothing is left of its environment: it is whose who has not waited for it
        parent = process.parent()
        return parent is not None and (parent.pid == os.getpid() or is_of_a_launcher(parent))
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False


def forking(tmp_path, modules=MODULES, code=WAITING):
    """Its workers are forked from what has imported these modules, which may be files in this folder."""
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    return launcher_of([sys.executable, "-P", "-c", code], tmp_path, modules, environ)


def run_all(argv, folder, modules=None, environ=None, count=1):
    async def run():
        async with launcher_of(argv, folder, modules, environ) as scene:
            return await scene.ends_of(count)

    return asyncio.run(run())


def both(argv, tmp_path, caplog, **more):
    """`run_all` of workers that are started plainly, and of such that are forked."""
    plain = run_all(argv, tmp_path / "plain", **more)
    forked = run_all(argv, tmp_path / "forked", MODULES, **more)
    assert caplog.records == [], (tmp_path / "forked" / "master.log").read_text()
    return plain, forked


def written(tmp_path, text, name="program.py"):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return path


PLACES = 2
ENDS_WHEN_TOLD = """
import os, sys, time
told = os.path.join(os.environ["WORK"], os.environ["ELASTICDL_WORKER_ID"])
while not os.path.exists(told):
    time.sleep(0.02)
print("ends")
sys.exit(int(open(told).read()))
"""


# Each is a launcher with room for two workers, each of which ends when the test says so: ``end(worker_id, code)``.


@asynccontextmanager
async def local_bench(tmp_path, modules=None):
    environ = {"PATH": "/usr/bin:/bin", "WORK": str(tmp_path)}
    async with launcher_of((sys.executable, "-c", ENDS_WHEN_TOLD), tmp_path, modules, environ, PLACES) as bench:
        bench.end = partial(tell, tmp_path)
        yield bench
    assert not [r for r in bench.seen if isinstance(r, WorkerPlaced) and psutil.pid_exists(r.pid)]


@asynccontextmanager
async def agent_bench(tmp_path):
    async with acting(tmp_path, ENDS_WHEN_TOLD) as scene:
        master = await scene.master()
        bench = Launching((partial(Slots, PLACES, (), tmp_path), master.agents.reporting_to), tmp_path)
        bench.end = scene.tell
        names = [f"slot-{number}" for number in range(PLACES)]
        for name in names:
            await scene.agent(master.port, name)
        await master.agents.found([place(name) for name in names], {-1: ""})
        yield bench
        await bench.launcher.close()


BENCHES = {"plain": local_bench, "forked": partial(local_bench, modules=["json"]), "agents": agent_bench}


contract = on_each(BENCHES)


@contract
async def test_a_worker_is_placed_and_its_end_is_told_once(bench):
    assert (await bench.placed(0)).pid > 0
    with pytest.raises(ValueError, match="0"):
        await bench.launcher.launch(0)
    bench.end(0, 0)
    assert await bench.ended(0) == (ExitCause.CLEAN, 0)
    await bench.placed(1)
    bench.end(1, 3)
    assert await bench.ended(1) == (ExitCause.CRASHED, 3)
    bench.launcher.kill(0)
    await bench.launcher.close()
    assert bench.reports.empty()


@contract
async def test_terminate_and_kill_end_a_worker_from_outside(bench):
    for worker_id, end in enumerate([bench.launcher.terminate, bench.launcher.kill]):
        await bench.placed(worker_id)
        end(worker_id)
        assert (await bench.ended(worker_id))[0] is ExitCause.KILLED


@contract
async def test_close_ends_everything_and_tells_each_end_and_of_who_is_gone_nothing_is_told(bench):
    await bench.placed(0)
    bench.launcher.read_stacks(0)
    stacks = await bench.next(StacksFound)
    assert (stacks.worker_id, "does not answer" in stacks.state) == (0, False)
    bench.end(0, 0)
    await bench.ended(0)
    for worker_id in (0, 7):  # gone, and unknown
        for ask in (bench.launcher.read_stacks, bench.launcher.kill, bench.launcher.terminate):
            ask(worker_id)
    for worker_id in range(1, PLACES + 1):
        await bench.placed(worker_id)
    await bench.launcher.launch(PLACES + 1)
    await bench.next(WorkerPending)
    await bench.launcher.close()
    assert {(await bench.next(WorkerExited)).worker_id for _ in range(PLACES + 1)} == {1, 2, 3}
    assert bench.reports.empty()


# ---- this machine ----


@pytest.mark.parametrize(
    ("code", "cause"),
    [(0, "clean"), (1, "crashed"), (-9, "killed"), (-11, "crashed"), (128 + 9, "killed"), (128 + 6, "crashed")],
)
def test_exit_codes_are_judged_and_a_crash_by_the_order_of_imports_is_told_with_what_to_change(code, cause):
    stacks = "Segmentation fault\n  File '/venv/site-packages/triton/__init__.py', line 8 in <module>"
    assert judge_exit(code)[0] == cause
    assert ("put `import triton` above" in judge_exit(code, stacks)[1]) == (code in (-11, 128 + 6))
    assert "triton" not in judge_exit(code, "step 1")[1]


def run_worker(tmp_path, script):
    """Run one worker to its end; returns the report of it."""
    ((_, report),) = run_all([sys.executable, "-u", "-c", script], tmp_path)
    return report


@pytest.mark.parametrize(
    ("script", "told"),
    [
        ("import sys; [print(n) for n in range(1000)]; sys.exit('the last word')", "exit code 1"),
        ("1 / 0", "exit code 1: ZeroDivisionError: division by zero"),
        ("import sys; print('no', file=sys.stderr); sys.exit(2)", "exit code 2: no"),
    ],
)
def test_what_a_worker_prints_is_in_its_log_and_why_it_has_ended_in_the_report(tmp_path, script, told):
    report, log = run_worker(tmp_path, script), tmp_path / "0.log"
    assert report.detail == f"{told}; its log: {log}"
    assert log.read_text().splitlines()[-1] == report.output.splitlines()[-1]


@on(partial(forking, modules=None))
async def test_a_mistake_of_our_own_ends_the_job_and_is_not_waited_for(scene):
    scene.launcher._starter._environment = lambda number, place: {}["a"]
    await scene.launcher.launch(0)
    assert (await scene.next(events.LauncherFailed)).reason == "workers are looked after no longer: KeyError: 'a'"


def test_the_temporary_files_of_a_worker_that_is_killed_go_with_it(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr(tempfile, "tempdir", None)  # it keeps the first answer
    (tmp_path / "tmp").mkdir()
    script = "import os, tempfile; print(tempfile.mkstemp()[1]); os.kill(os.getpid(), 9)"
    report = run_worker(tmp_path, script)
    assert report.output.startswith(str(tmp_path / "tmp" / "elasticdl-0-"))
    assert list((tmp_path / "tmp").iterdir()) == []


def test_a_worker_that_gets_no_temporary_folder_says_which(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "file"))
    report = run_worker(tmp_path, "pass")
    assert report.cause is ExitCause.CRASHED
    assert report.detail.startswith(f"can't start it: {tmp_path}/file/elasticdl-0-"), report.detail
    assert report.detail.endswith(": Not a directory")


def test_a_process_tethered_to_another_parent_does_not_start():
    command = tethered(["echo", "started"])
    command[command.index(str(psutil.Process().pid))] = "1"
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stdout) == (1, "")


def test_workers_share_the_cores_by_the_range_that_the_job_has_now(tmp_path, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    spec = JobSpec(command=["sh", "-c", "echo $OMP_NUM_THREADS"], num_workers="1-2", start_method="spawn")
    job_dir, ranges = JobDir(tmp_path), [WorkerRange(minimum=1, maximum=most) for most in (2, 2, 8, 20)]
    job_dir.logs.mkdir()

    async def run():
        ended, make = asyncio.Queue(), LocalWorkers(spec, job_dir, MasterAddress("127.0.0.1:1", "token", 1)).launcher
        launcher = make(lambda event: isinstance(event, WorkerExited) and ended.put_nowait(event), lambda: ranges[0])
        for worker_id in range(3):
            ranges.pop(0)
            await launcher.launch(worker_id)
            await asyncio.wait_for(ended.get(), 30)
        await launcher.close()

    asyncio.run(run())
    assert [job_dir.worker_log(each).read_text().strip() for each in range(3)] == ["4", "1", "1"]


# ---- forked workers are ordinary processes: the same program, started plainly and forked, sees the same ----

LOOK = """
import gc, inspect, json, locale, os, signal, sys, tempfile, threading

FILES = {each: os.readlink(f"/proc/self/fd/{each}") for each in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{each}")}

def signals(line):
    name, mask = line.split()
    return name, int(mask, 16) & ~(3 << 31)  # two of them are glibc's own, for threads

def look():
    main = vars(sys.modules["__main__"])
    stdout = {name: getattr(sys.stdout, name) for name in ("encoding", "errors", "line_buffering", "write_through")}
    return {
        "argv": [sys.argv, sys.orig_argv, sys.path, sys.executable, sys.prefix, list(sys.flags), sys.warnoptions],
        "main": {name: str(main.get(name)) for name in ("__file__", "__name__", "__package__", "__cached__", "__doc__")},
        "spec": [str(getattr(main["__spec__"], each, None)) for each in ("name", "origin", "parent")],
        "loader": getattr(main["__loader__"], "__name__", type(main["__loader__"]).__name__),
        "place": [os.getcwd(), os.umask(0o22), sorted(os.sched_getaffinity(0)), os.nice(0), locale.setlocale(locale.LC_ALL)],
        "env": {name: value for name, value in os.environ.items() if name not in ("TMPDIR", "ELASTICDL_STACKS")},
        "C sees it": os.popen("echo $ELASTICDL_WORKER_ID").read(),
        "temporary": tempfile.gettempdir() == os.environ["TMPDIR"],
        "handlers": [str(signal.getsignal(number)).split(" at ")[0] for number in sorted(signal.valid_signals())],
        "kernel": [signals(line) for line in open("/proc/self/status") if line.startswith(("SigB", "SigI", "SigC"))],
        "family": [os.getppid(), os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid()],
        "command": open("/proc/self/cmdline").read().split("\\0"),
        "files": FILES,
        "stdout": [*map(str, stdout.values()), os.isatty(1)],
        "stack": [str(frame.function) for frame in inspect.stack()],
        "threads": [threading.active_count(), len(os.listdir("/proc/self/task"))],
        "thread": threading.get_native_id() == os.getpid() and threading.main_thread() is threading.current_thread(),
        "frozen": gc.get_freeze_count() > 0,
        "finders": [getattr(each, "__name__", type(each).__name__) for each in sys.meta_path],
    }
"""
PROBE = LOOK + '"""no docstring"""\nprint(json.dumps(look()))\n'


def package(tmp_path):
    written(tmp_path, "", "package/__init__.py")
    written(tmp_path, "VALUE = 1", "package/beside.py")
    written(tmp_path, PROBE, "script.py")
    for name in ("__main__", "module"):
        written(tmp_path, "from .beside import VALUE\n" + PROBE, f"package/{name}.py")


@pytest.mark.parametrize(
    "arguments",
    [
        ["-u", "script.py", "--a", "b c"],
        ["-m", "package", "x"],
        ["-u", "-m", "package.module"],
        ["-c", PROBE, "x", "-c"],
    ],
    ids=["script", "package", "module", "command"],
)
def test_a_forked_program_sees_what_a_plain_one_sees(tmp_path, caplog, monkeypatch, arguments):
    package(tmp_path)
    monkeypatch.chdir(tmp_path)
    ((plain, _),), ((forked, _),) = both([sys.executable, *arguments], tmp_path, caplog)
    expected, seen = json.loads(plain), json.loads(forked)
    # What was imported is no garbage: looking for it takes half a second at the end of each worker with PyTorch.
    assert (expected.pop("frozen"), seen.pop("frozen")) == (False, True)
    for each in (expected, seen):
        each["files"] = {number: path.replace("/plain/", "/forked/") for number, path in each["files"].items()}
    for name in expected:
        assert seen[name] == expected[name], name


# Each worker is one of them, by its number.
ENDS = {
    "message": "import sys; print('out', end=''); sys.exit('why')",
    "exception": "def f():\n    raise ValueError('x')\ntry:\n    f()\nexcept ValueError as e:\n    raise KeyError('y') from e",
    "interrupt": "raise KeyboardInterrupt",
    "killed": "import os; print('out', flush=True); os.kill(os.getpid(), 9)",
    "terminated": "import os, signal; os.kill(os.getpid(), signal.SIGTERM); signal.pause()",
    "at once": "import os; print('lost'); os._exit(4)",
    "exit functions": "import atexit, sys; atexit.register(print, 'last'); sys.stdout.write('first '); sys.exit(0)",
    "threads": "import threading, time\nthreading.Thread(target=lambda: (time.sleep(0.2), print('joined'))).start()",
    "broken exit": "import atexit; atexit.register(lambda: 1 / 0)",
    "closed": "import sys; print('out'); sys.stdout.flush(); sys.stdout.close()",
    "own hook": "import sys; sys.excepthook = lambda *a: print('hook', a[0].__name__, sys.last_value is a[1]); 1 / 0",
    "stdin": "print(repr(input()))",
}


EACH = f"import os\nexec({list(ENDS.values())!r}[int(os.environ['ELASTICDL_WORKER_ID'])])"


@pytest.mark.parametrize(
    ("text", "count"),
    [(EACH, len(ENDS)), ("no Python", 1), ("import no_such_module", 1)],
    ids=["runs", "syntax", "missing"],
)
def test_forked_workers_end_as_plain_ones(tmp_path, caplog, text, count):
    def told(log, end, folder):
        return re.sub(" at 0x[0-9a-f]+", "", log), end.code, end.cause, end.detail.replace(str(folder), "")

    found = both([sys.executable, str(written(tmp_path, text))], tmp_path, caplog, count=count)
    plain, forked = (
        dict(zip(ENDS, (told(*each, tmp_path / kind) for each in ends), strict=False))
        for kind, ends in zip(("plain", "forked"), found, strict=True)
    )
    assert forked == plain


POOL = """
import multiprocessing, os, sys

def name(number):
    return [number, __name__, type(sys.modules.get("numpy")).__name__, "ELASTICDL_WORKER_ID" in os.environ]

if __name__ == "__main__":
    for method in ("fork", "spawn", "forkserver"):
        with multiprocessing.get_context(method).Pool(2) as pool:
            print(method, pool.map(name, range(2)))
"""


def test_a_forked_worker_starts_processes_by_every_method(tmp_path, caplog):
    """What is forked from it has what was imported before."""
    found = both([sys.executable, str(written(tmp_path, POOL))], tmp_path, caplog)
    ((plain, exited),), ((forked, forked_exited),) = found
    assert (exited.code, forked_exited.code) == (0, 0), forked
    first, *others = plain.splitlines()
    assert forked.splitlines() == [first.replace("NoneType", "module"), *others]


NUMBERS = {
    "torch": "multiprocessing.current_process().authkey.hex(), random.random(), numpy.random.rand(), torch.initial_seed(), torch.rand(1)[0]",
    "keras": "tensorflow.random.uniform([]).numpy(), float(keras.random.uniform([])), keras.layers.Dense(1).kernel_initializer.seed",
}


@pytest.mark.parametrize("module", ["torch", pytest.param("keras", marks=pytest.mark.slow)])
def test_forked_workers_draw_numbers_of_their_own(tmp_path, caplog, module):
    imports = {"torch": "multiprocessing, random, numpy, torch", "keras": "tensorflow, keras"}[module]
    argv = [sys.executable, "-c", f"import {imports}; print({NUMBERS[module]})"]
    ends = run_all(argv, tmp_path, (*MODULES, module), count=3)
    assert ({end.code for _, end in ends}, caplog.records) == ({0}, [])
    drawn = [log.splitlines()[-1].split() for log, _ in ends]
    assert all(len(set(column)) == 3 for column in zip(*drawn, strict=True)), drawn


THREADS = """
import os, sys, numpy, torch
big = numpy.ones((600, 600)); big @ big
of_blas = len(os.listdir("/proc/self/task"))
torch.ones(600, 600) @ torch.ones(600, 600)
print(torch.get_num_threads(), torch.get_num_interop_threads(), of_blas, len(os.listdir("/proc/self/task")))
print(sys.getrecursionlimit(), torch.__config__.parallel_info())
"""


def test_forked_workers_compute_with_as_many_threads(tmp_path, caplog):
    environ = {k: v for k, v in os.environ.items() if "NUM_THREADS" not in k}
    environ |= {"OMP_NUM_THREADS": "3", "OPENBLAS_NUM_THREADS": "2"}
    argv = [sys.executable, str(written(tmp_path, THREADS))]
    ((plain, _),) = run_all(argv, tmp_path / "plain", None, environ)
    ((forked, _),) = run_all(argv, tmp_path / "forked", ("torch", "torch._dynamo", "grpc"), environ)
    assert (forked, caplog.records) == (plain, [])
    assert "at::get_num_threads()" in plain


# ---- what dies, can't be forked, or is not wanted any more ----

MASTER = """
import asyncio, sys
from pathlib import Path
from test_launchers import forking

async def run():
    async with forking(Path(sys.argv[1])) as scene:
        print((await scene.placed(0)).pid, scene.template.pid, flush=True)
        await asyncio.sleep(600)

asyncio.run(run())
"""


@on(forking)
async def test_workers_outlive_the_process_they_were_forked_from_and_another_takes_its_place(scene, tmp_path, caplog):
    worker, first = psutil.Process((await scene.placed(0)).pid), scene.template
    first.kill()
    await asyncio.to_thread(psutil.wait_procs, [first], DEADLINE)
    await scene.placed(1)  # nobody had noticed
    assert scene.template.pid != first.pid, "it imports before the next worker is launched"
    await scene.placed(2)
    assert worker.is_running()
    while not (tmp_path / "2.log").read_text().endswith("\n"):
        await asyncio.sleep(0.02)
    assert (tmp_path / "2.log").read_text().split()[1] == "True"
    scene.launcher.kill(0)
    assert await scene.ended(0) == (ExitCause.KILLED, -9)
    assert ["is gone" in record.message for record in caplog.records] == [True]


@on(forking)
async def test_workers_of_another_environment_are_forked_from_what_has_it(scene, tmp_path):
    await scene.placed(0)
    environment, templates = {**scene.spawner._environment, "OMP_NUM_THREADS": "3"}, []
    with (tmp_path / "log").open("ab") as log:
        for _ in range(2):
            made = await scene.spawner.spawn(environment, log.fileno(), log.fileno(), lambda: True)
            templates.append((scene.template.pid, scene.template.environ()["OMP_NUM_THREADS"]))
            made.kill()
            await made.wait()
    assert templates == [(scene.template.pid, "3")] * 2, "as where the job was scaled"


def test_nothing_outlives_a_master_that_is_killed(tmp_path):
    here = Path(__file__).parent
    env = {**os.environ, "PYTHONPATH": str(here.parents[1]), "TMPDIR": str(tmp_path)}  # its worker's folder is left
    words = [sys.executable, "-c", MASTER, str(tmp_path)]
    master = subprocess.Popen(words, cwd=here, env=env, stdout=subprocess.PIPE, text=True)
    left = [psutil.Process(int(pid)) for pid in master.stdout.readline().split()]
    assert len(left) == 2
    master.kill()
    master.wait(DEADLINE)
    _, alive = psutil.wait_procs(left, DEADLINE)
    assert alive == []


@on(partial(forking, modules=["this"]))
async def test_a_worker_that_is_killed_does_not_wait_for_a_process_to_fork_from_that_hangs(scene):
    """Its end is told at once, and the next is started once there is something to fork from again."""
    first, template = await scene.placed(0), scene.template
    template.suspend()
    await scene.launcher.launch(1)
    await asyncio.sleep(0.3)
    scene.launcher.kill(1)
    assert await scene.ended(1) == (ExitCause.KILLED, -9)
    template.resume()
    await scene.placed(2)
    assert psutil.pid_exists(first.pid)
    template.suspend()
    await scene.launcher.launch(3)
    await asyncio.sleep(0.1)
    await scene.launcher.close()
    assert {(await scene.next(WorkerExited)).worker_id for _ in range(3)} == {0, 2, 3}
    assert scene.reports.empty()


# What a module does that is imported before workers are forked, and what is told of it, once.
THREAD = "import threading, time; threading.Thread(target=time.sleep, args=(60,), daemon=True).start()"
UNSAFE = {"threads": (THREAD, "threads"), "ends": ("import os; os._exit(1)", "is gone"), "raises": ("1 / 0", "is gone")}


@pytest.mark.parametrize(("text", "reason"), UNSAFE.values(), ids=UNSAFE)
def test_where_forks_are_not_safe_workers_start_plainly_and_it_is_not_tried_again(tmp_path, caplog, text, reason):
    count = f"import pathlib; pathlib.Path({str(tmp_path / 'count')!r}).open('a').write('x')\n"
    written(tmp_path, count + text, "unsafe.py")
    argv = [sys.executable, "-P", "-c", "import sys; print('unsafe' in sys.modules)"]
    ends = run_all(argv, tmp_path / "work", ["unsafe"], {**os.environ, "PYTHONPATH": str(tmp_path)}, count=3)
    assert [(log, end.code) for log, end in ends] == [("False\n", 0)] * 3
    assert (tmp_path / "count").read_text() == "x"
    assert [reason in record.message for record in caplog.records] == [True], caplog.text


def test_a_module_beside_the_script_with_the_name_of_an_imported_one_is_the_script_s(tmp_path, caplog):
    written(tmp_path, "MINE = True", "colorsys.py")
    path = written(tmp_path, "import colorsys; print(colorsys.MINE)")
    ((printed, exited),) = run_all([sys.executable, str(path)], tmp_path / "work", ["colorsys"])
    assert (printed, exited.code) == ("True\n", 0)
    assert f"{tmp_path / 'colorsys.py'} beside the program" in caplog.text


SLEEPS = "import subprocess, sys, time; subprocess.Popen(['sleep', '600']); time.sleep(float(sys.argv[1])); sys.exit(5)"


def test_random_ends_are_each_told_once_and_leave_nothing(tmp_path):
    """Workers, their children, and the process they are forked from are killed at any moment."""
    rng = random.Random(1)

    async def run():
        async with launcher_of((sys.executable, "-c", SLEEPS, "0.05"), tmp_path, ["random"]) as scene:
            for number in range(40):
                await scene.launcher.launch(number)
                await asyncio.sleep(rng.random() * 0.03)
                if rng.random() < 0.3:
                    rng.choice([scene.launcher.kill, scene.launcher.terminate])(number)
                elif rng.random() < 0.2 and scene.spawner._template:
                    scene.spawner._template.kill()
        ends = [scene.reports.get_nowait() for _ in range(scene.reports.qsize())]
        assert sorted(end.worker_id for end in ends if isinstance(end, WorkerExited)) == list(range(40))

    asyncio.run(run())
