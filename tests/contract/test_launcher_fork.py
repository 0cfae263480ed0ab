"""Workers that are forked are ordinary processes: the same program, started plainly and forked, sees the same."""

import json
import os
import re
import sys
import textwrap

import pytest
from fork_kit import MODULES, both, run_all, written

LOOK = """
import gc, inspect, json, locale, os, resource, signal, sys, tempfile, threading

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
        "place": [os.getcwd(), os.umask(0o22), sorted(os.sched_getaffinity(0)), os.nice(0)],
        "env": {name: value for name, value in os.environ.items() if name not in ("TMPDIR", "ELASTICDL_STACKS")},
        "C sees it": os.popen("echo $ELASTICDL_WORKER_ID").read(),
        "temporary": tempfile.gettempdir() == os.environ["TMPDIR"],
        "handlers": [str(signal.getsignal(number)).split(" at ")[0] for number in sorted(signal.valid_signals())],
        "mask": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        "kernel": [signals(line) for line in open("/proc/self/status") if line.startswith(("SigB", "SigI", "SigC"))],
        "family": [os.getppid(), os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid()],
        "command": open("/proc/self/cmdline").read().split("\\0"),
        "name": open("/proc/self/comm").read(),
        "files": FILES,
        "stdout": [*map(str, stdout.values()), os.isatty(1)],
        "stack": [str(frame.function) for frame in inspect.stack()],
        "threads": [threading.active_count(), len(os.listdir("/proc/self/task"))],
        "thread": threading.get_native_id() == os.getpid() and threading.main_thread() is threading.current_thread(),
        "gc": [gc.isenabled(), gc.get_threshold()],
        "frozen": gc.get_freeze_count() > 0,
        "limits": [resource.getrlimit(getattr(resource, each)) for each in ("RLIMIT_NOFILE", "RLIMIT_CORE")],
        "locale": locale.setlocale(locale.LC_ALL),
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
        ["script.py", "--a", "b c"],
        ["-u", "script.py"],
        ["-m", "package", "x"],
        ["-u", "-m", "package.module"],
        ["-c", PROBE, "x", "-c"],
    ],
    ids=["script", "unbuffered", "package", "module", "command"],
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


@pytest.mark.parametrize("hook", ["import sys; sys.hooked = __name__", "1 / 0"])
def test_what_a_hook_of_the_user_s_does_at_start_up_is_the_same(tmp_path, caplog, hook):
    written(tmp_path, hook, "sitecustomize.py")
    command = [sys.executable, "-c", "import sys; print(sys.hooked if hasattr(sys, 'hooked') else 'no')"]
    plain, forked = both(command, tmp_path, caplog, environ={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert forked == plain


COUNTS = """
import os

class Counted:
    def __del__(self):
        os.write(1, b"collected")

counted = Counted()
counted.itself = counted
"""


@pytest.mark.parametrize(("library", "printed"), [("nanobind", "collected"), ("another", "")])
def test_a_library_that_counts_what_is_left_at_the_end_finds_nothing(tmp_path, monkeypatch, library, printed):
    written(tmp_path, f"{COUNTS}\nBound = type('nb_type_0', (type,), {{'__module__': {library!r}}})", "counting.py")
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    ((text, exited),) = run_all([sys.executable, "-c", "import counting"], tmp_path / "forked", ("counting",), environ)
    assert (text, exited.code) == (printed, 0)


# Each worker is one of them, by its number.
ENDS = {
    "returns": "print('out')",
    "status": "import sys; print('out'); sys.exit(3)",
    "message": "import sys; print('out', end=''); sys.exit('why')",
    "exception": "def f():\n    raise ValueError('x')\ntry:\n    f()\nexcept ValueError as e:\n    raise KeyError('y') from e",
    "interrupt": "raise KeyboardInterrupt",
    "killed": "import os; print('out', flush=True); os.kill(os.getpid(), 9)",
    "terminated": "import os, signal; os.kill(os.getpid(), signal.SIGTERM); signal.pause()",
    "at once": "import os; print('lost'); os._exit(4)",
    "aborts": "import os; os.abort()",
    "exit functions": "import atexit, sys; atexit.register(print, 'last'); sys.stdout.write('first '); sys.exit(0)",
    "threads": "import threading, time\nthreading.Thread(target=lambda: (time.sleep(0.2), print('joined'))).start()",
    "broken exit": "import atexit; atexit.register(lambda: 1 / 0)",
    "closed": "import sys; print('out'); sys.stdout.flush(); sys.stdout.close()",
    "own hook": "import sys; sys.excepthook = lambda *a: print('hook', a[0].__name__, sys.last_value is a[1]); 1 / 0",
    "stdin": "print(repr(input()))",
}


def branches():
    texts = (
        f"if NUMBER == '{number}':\n{textwrap.indent(text, '    ')}\n" for number, text in enumerate(ENDS.values())
    )
    return "import os\nNUMBER = os.environ['ELASTICDL_WORKER_ID']\n" + "".join(texts)


@pytest.mark.parametrize(
    "text", [branches(), "this is no Python", "import no_such_module"], ids=["runs", "syntax", "missing"]
)
def test_forked_workers_end_as_plain_ones(tmp_path, caplog, text):
    def told(log, end, folder):
        return re.sub(" at 0x[0-9a-f]+", "", log), end.code, end.cause, end.detail.replace(str(folder), "")

    argv = [sys.executable, str(written(tmp_path, text))]
    found = both(argv, tmp_path, caplog, count=len(ENDS) if text == branches() else 1)
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
    import concurrent.futures
    with concurrent.futures.ProcessPoolExecutor(1) as pool:
        print(pool.submit(name, 5).result())
"""


def test_a_forked_worker_starts_processes_by_every_method(tmp_path, caplog):
    """What is forked from it has what was imported before."""
    found = both([sys.executable, str(written(tmp_path, POOL))], tmp_path, caplog)
    ((plain, exited),), ((forked, forked_exited),) = found
    assert (exited.code, forked_exited.code) == (0, 0), forked
    first, *others, last = plain.splitlines()
    assert forked.splitlines() == [first.replace("NoneType", "module"), *others, last.replace("NoneType", "module")]


LIBRARIES = {
    "pyarrow.compute": "print(pyarrow.compute.sum(pyarrow.array(range(10**6)).cast('float64')).as_py())",
    "lightning.pytorch": "print(lightning.pytorch.Trainer(accelerator='cpu', logger=False).world_size)",
    "elasticdl.elastic.transformers": "import torch; print(torch.ones(300, 300).mm(torch.ones(300, 300)).sum().item())",
}


@pytest.mark.parametrize("modules", [["pyarrow.compute"], pytest.param([*LIBRARIES], marks=pytest.mark.slow)])
def test_libraries_that_start_threads_when_they_are_imported_do_not_hinder_forks(tmp_path, caplog, modules):
    for module in modules:
        pytest.importorskip(module)
    code = "\n".join(f"import {module}; {LIBRARIES[module]}" for module in modules)
    ((printed, exited),) = run_all([sys.executable, "-c", code], tmp_path, (*MODULES, *modules, "not_installed"))
    assert exited.code == 0, printed
    assert caplog.records == []


NUMBERS = {
    "numpy": "multiprocessing.current_process().authkey.hex(), random.random(), numpy.random.rand()",
    "torch": "random.random(), numpy.random.rand(), torch.initial_seed(), torch.rand(1).item(), torch.randperm(10**6)[0].item()",
    "keras": "tensorflow.random.uniform([]).numpy(), float(keras.random.uniform([])), keras.layers.Dense(1).kernel_initializer.seed",
}


@pytest.mark.parametrize(
    ("module", "numbers"),
    [pytest.param(*each, id=each[0], marks=[pytest.mark.slow] * (each[0] == "keras")) for each in NUMBERS.items()],
)
def test_forked_workers_draw_numbers_of_their_own(tmp_path, caplog, module, numbers):
    imports = "multiprocessing, random, numpy" + {"torch": ", torch", "keras": ", tensorflow, keras"}.get(module, "")
    argv = [sys.executable, "-c", f"import {imports}; print({numbers})"]
    ends = run_all(argv, tmp_path, (*MODULES, module), count=3)
    assert {end.code for _, end in ends} == {0}
    drawn = [log.splitlines()[-1].split() for log, _ in ends]
    assert caplog.records == []
    assert all(len(set(column)) == 3 for column in zip(*drawn, strict=True)), drawn


THREADS = """
import os, sys, numpy, torch
before = len(os.listdir("/proc/self/task"))
big = numpy.ones((600, 600)); big @ big
of_blas = len(os.listdir("/proc/self/task"))
torch.ones(600, 600) @ torch.ones(600, 600)
(torch.ones(4_000_000) * 2).sum()
print(torch.get_num_threads(), torch.get_num_interop_threads(), of_blas, len(os.listdir("/proc/self/task")))
print(sys.getrecursionlimit(), torch.__config__.parallel_info())
"""


def test_forked_workers_compute_with_as_many_threads(tmp_path, caplog):
    environ = {k: v for k, v in os.environ.items() if "NUM_THREADS" not in k}
    environ |= {"OMP_NUM_THREADS": "3", "OPENBLAS_NUM_THREADS": "2"}
    argv = [sys.executable, str(written(tmp_path, THREADS))]
    ((plain, _),) = run_all(argv, tmp_path / "plain", None, environ)
    ((forked, _),) = run_all(argv, tmp_path / "forked", ("torch", "torch._dynamo", "grpc"), environ)
    assert caplog.records == []
    assert forked == plain
    assert "at::get_num_threads()" in plain
