#!/usr/bin/env python3
"""Build the Horovod wheel against the installed frameworks, torch and TensorFlow, once per user.

Horovod 0.28.1 ships only as source and predates today's frameworks; a few edits are
enough (``EDITS`` says why each is needed). The wheel is kept in the user's cache
directory under a name that holds every version it depends on, so a second call only prints
its path. Variables of Horovod's own change what is built: ``HOROVOD_GPU_OPERATIONS=NCCL`` for CUDA,
``HOROVOD_WITHOUT_TENSORFLOW=1`` or ``HOROVOD_WITHOUT_PYTORCH=1`` for one framework alone.

    python scripts/build_horovod.py          # prints the path of the wheel on stdout
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

HOROVOD_VERSION = "0.28.1"

# (file, text in the source distribution, replacement)
EDITS = (
    # Gloo built as C++14 does not link with C++17/20 objects (a constexpr static is defined twice).
    ("CMakeLists.txt", "set(CMAKE_CXX_STANDARD 14)", "set(CMAKE_CXX_STANDARD 17)"),
    # torch >= 2.12 headers need C++20.
    ("horovod/torch/CMakeLists.txt", "set(CMAKE_CXX_STANDARD 14)", "set(CMAKE_CXX_STANDARD 20)"),
    # These XLA ops serve CUDA only, and TensorFlow wheels no longer ship all their headers.
    (
        "horovod/tensorflow/CMakeLists.txt",
        'list(APPEND TF_SOURCES "${PROJECT_SOURCE_DIR}/horovod/tensorflow/xla_mpi_ops.cc")',
        "",
    ),
    # When a reduction fails, Horovod reports it and goes on to negotiate the next one over the same connections. What a
    # peer still sends of the failed one then arrives in place of a negotiation, and Gloo aborts the process: a survivor
    # of somebody else's death dies too, now and then. With these the background loop ends instead.
    (
        "horovod/common/operations.cc",
        "  Status status;\n  try {\n    // process_set is passed here only",
        "  Status status;\n  std::exception_ptr failure;\n  try {\n    // process_set is passed here only",
    ),
    (
        "horovod/common/operations.cc",
        '        << "ExecuteOperation Failed";\n',
        '        << "ExecuteOperation Failed";\n    failure = std::current_exception();\n',
    ),
    (
        "horovod/common/operations.cc",
        "      e.FinishWithCallback(status);\n    }\n  }\n}\n\n#if HAVE_MPI\nvoid EnrichProcessSetWithMPIController",
        "      e.FinishWithCallback(status);\n    }\n  }\n  if (failure) {\n    std::rethrow_exception(failure);\n  }\n}\n\n"
        "#if HAVE_MPI\nvoid EnrichProcessSetWithMPIController",
    ),
    # When a peer dies while a world is being connected, Gloo's exception leaves the background thread and aborts the
    # process. With these `hvd.init()` raises instead, and may be called again.
    (
        "horovod/common/operations.cc",
        "    horovod_global.initialization_done = false;\n    horovod_global.background_thread =\n"
        "        std::thread(BackgroundThreadLoop, std::ref(horovod_global));\n",
        "    horovod_global.initialization_done = false;\n    horovod_global.initialization_failed = false;\n"
        "    horovod_global.background_thread = std::thread([](HorovodGlobalState& state) {\n"
        "      try {\n        BackgroundThreadLoop(state);\n      } catch (const std::exception& ex) {\n"
        '        LOG(ERROR) << "Horovod could not be initialized: " << ex.what();\n'
        "        state.shut_down = true;\n#if HAVE_GLOO\n"
        "        state.process_set_table.Finalize(global_gloo_context, SHUT_DOWN_ERROR);\n"
        "        global_gloo_context.Finalize();\n#endif\n"
        "        state.initialization_failed = true;\n      }\n    }, std::ref(horovod_global));\n",
    ),
    # The store answers 410 for a world that is broken: asking again, each 500 ms, is for servers that are busy.
    (
        "horovod/common/gloo/http_store.cc",
        "      if (response.status != HTTP_OK && response.status != HTTP_NOT_FOUND) {\n",
        "      if (response.status == 410) {\n        break;\n      }\n"
        "      if (response.status != HTTP_OK && response.status != HTTP_NOT_FOUND) {\n",
    ),
    # When a connection ends, Gloo wakes who waits for an operation that has not begun, but not who waits for one of which a
    # part was sent or received: after a peer froze in the middle of it a survivor waited out the timeout of 30 s.
    (
        "third_party/gloo/gloo/transport/tcp/pair.cc",
        "      op.buf->signalException(ex);\n    }\n  }\n",
        "      op.buf->signalException(ex);\n    }\n    NonOwningPtr<UnboundBuffer> sent(op.ubuf);\n    if (sent) {\n"
        "      sent->signalException(ex);\n    }\n  }\n  NonOwningPtr<UnboundBuffer> received(rx_.ubuf);\n"
        "  if (received) {\n    received->signalException(ex);\n  }\n",
    ),
    # A process set, and the one of all processes is one, looked for its address by the host's name and not by the interface
    # that was asked for: it may be another network's, and Gloo crashes where the name does not resolve.
    (
        "horovod/common/gloo/gloo_context.cc",
        "  device_attr.iface = gloo_iface_;\n  device_attr.ai_family = AF_UNSPEC;\n  auto dev = CreateDevice(device_attr);\n\n"
        "  global_ctx = global_context.ctx;\n",
        "  gloo_iface_ = global_context.gloo_iface_;\n  device_attr.iface = gloo_iface_;\n"
        "  device_attr.ai_family = AF_UNSPEC;\n  auto dev = CreateDevice(device_attr);\n\n"
        "  global_ctx = global_context.ctx;\n",
    ),
    # The process set of all had connections of its own, beside those of the same processes in the same order; the next
    # `init` closed them, which now `shutdown` does.
    (
        "horovod/common/gloo/gloo_context.cc",
        "  assert(global_context.IsEnabled());\n\n",
        "  assert(global_context.IsEnabled());\n\n  if (registered_ranks.empty()) {\n    *this = global_context;\n"
        "    return;\n  }\n\n",
    ),
    # Who is alone in its group, here among those of a host and of a local rank, has nobody to ask the store for.
    (
        "horovod/common/gloo/gloo_context.cc",
        "  if (server_addr_env != nullptr) {\n",
        "  if (server_addr_env != nullptr && size > 1) {\n",
    ),
    # Each rank waited for the names of all hosts before it published its addresses. Nothing uses what they are for.
    (
        "third_party/gloo/gloo/rendezvous/context.cc",
        "  store.set(localKey, value);\n\n  for (int i = 0; i < size; i++) {\n    if (i == rank) {\n      break;\n    }\n\n"
        '    std::string key("rank_" + std::to_string(i));\n    auto val = store.get(key);\n'
        "    auto hostName = std::string((const char*)val.data(), val.size());\n\n"
        "    if (hostName == localHostName) {\n      localRank++;\n    }\n  }\n",
        "",
    ),
    # What has been waited for is there: the store was asked for it a second time.
    (
        "horovod/common/gloo/http_store.h",
        "  int rank_;\n",
        "  int rank_;\n  std::map<std::string, std::vector<char>> found_;\n",
    ),
    (
        "horovod/common/gloo/http_store.cc",
        "    if (!HTTP_GET(key, result)) {\n      return false;\n    }\n",
        "    if (!HTTP_GET(key, result)) {\n      return false;\n    }\n    found_[key] = result;\n",
    ),
    (
        "horovod/common/gloo/http_store.cc",
        "  std::vector<char> result;\n  HTTP_GET(key, result);\n",
        "  auto found = found_.find(key);\n  if (found != found_.end()) {\n    return found->second;\n  }\n"
        "  std::vector<char> result;\n  HTTP_GET(key, result);\n",
    ),
    # Gloo's thread looks up each 10 ms, and who takes a socket from it, for each connection to a peer, or ends it, waited for
    # that. These wake it.
    (
        "third_party/gloo/gloo/transport/tcp/loop.cc",
        "    cv_.wait(lock);\n",
        "    defer([] {});\n    cv_.wait(lock);\n",
    ),
    (  # never between those two lines
        "third_party/gloo/gloo/transport/tcp/loop.cc",
        "    cv_.notify_all();\n",
        "    { std::lock_guard<std::mutex> guard(m_); }\n    cv_.notify_all();\n",
    ),
    (
        "third_party/gloo/gloo/transport/tcp/loop.cc",
        "    done_ = true;\n",
        "    done_ = true;\n    defer([] {});\n",
    ),
    # Horovod's background thread meets those of all other ranks each millisecond, also when there is nothing to sum: with small
    # steps a fifth of a core. With HOROVOD_IDLE_CYCLE_TIME (ms; 0, the default, changes nothing) it waits that long for work.
    (
        "horovod/common/tensor_queue.h",
        "#include <iostream>\n#include <mutex>\n",
        "#include <atomic>\n#include <chrono>\n#include <condition_variable>\n#include <iostream>\n#include <mutex>\n",
    ),
    (
        "horovod/common/tensor_queue.h",
        "  void RemoveJoinTensor();\n\nprotected:\n",
        "  void RemoveJoinTensor();\n\n  // Until there is an entry, `stop` is set and Wake called, or this time is over.\n"
        "  void WaitForEntry(std::chrono::microseconds longest, const std::atomic_bool& stop);\n\n  void Wake();\n\n"
        "protected:\n  std::condition_variable added_;\n\n",
    ),
    (
        "horovod/common/tensor_queue.cc",
        "  message_queue_.push(std::move(message));\n  return Status::OK();\n",
        "  message_queue_.push(std::move(message));\n  added_.notify_all();\n  return Status::OK();\n",
    ),
    (
        "horovod/common/tensor_queue.cc",
        "    message_queue_.push(std::move(messages[i]));\n  }\n  return Status::OK();\n",
        "    message_queue_.push(std::move(messages[i]));\n  }\n  added_.notify_all();\n  return Status::OK();\n",
    ),
    (
        "horovod/common/tensor_queue.cc",
        "// Execute callback for each tensor and clear tensor queue\n",
        "void TensorQueue::WaitForEntry(std::chrono::microseconds longest,\n"
        "                               const std::atomic_bool& stop) {\n"
        "  std::unique_lock<std::mutex> lock(mutex_);\n"
        "  added_.wait_for(lock, longest, [&] { return stop || !tensor_table_.empty(); });\n}\n\n"
        "void TensorQueue::Wake() {\n  std::lock_guard<std::mutex> guard(mutex_);\n  added_.notify_all();\n}\n\n"
        "// Execute callback for each tensor and clear tensor queue\n",
    ),
    (
        "horovod/common/operations.cc",
        "    std::this_thread::sleep_for(sleep_duration);\n  }\n  state.last_cycle_start = std::chrono::steady_clock::now();\n",
        "    std::this_thread::sleep_for(sleep_duration);\n  }\n"
        "  if (state.idle_cycle_time.count() > 0 && state.process_set_table.Ids().size() == 1) {\n"
        "    state.process_set_table.Get(0).tensor_queue.WaitForEntry(state.idle_cycle_time, state.shut_down);\n  }\n"
        "  state.last_cycle_start = std::chrono::steady_clock::now();\n",
    ),
    (
        "horovod/common/operations.cc",
        "  // Override response cache capacity, if it's set.\n",
        "  state.idle_cycle_time =\n"
        '      std::chrono::microseconds(long(GetDoubleEnvOrDefault("HOROVOD_IDLE_CYCLE_TIME", 0.0) * 1000.));\n\n'
        "  // Override response cache capacity, if it's set.\n",
    ),
    (
        "horovod/common/global_state.h",
        "  std::chrono::steady_clock::time_point last_cycle_start;\n",
        "  std::chrono::steady_clock::time_point last_cycle_start;\n\n"
        "  // How long to wait for something to reduce, beyond the cycle; 0: not at all.\n"
        "  std::chrono::microseconds idle_cycle_time{0};\n",
    ),
    (
        "horovod/common/operations.cc",
        "    horovod_global.shut_down = true;\n    horovod_global.background_thread.join();\n",
        "    horovod_global.shut_down = true;\n    horovod_global.process_set_table.Get(0).tensor_queue.Wake();\n"
        "    horovod_global.background_thread.join();\n",
    ),
    # With NCCL, a world that is broken while its sums are under way on the GPU: its communicators are aborted, by which the
    # GPU comes to the end of the sums, and whoever waited took them for complete. So all who wait are told before, those in
    # the queue included, and nobody looks at a communicator that is gone.
    (
        "horovod/common/ops/nccl_operations.cc",
        "void NCCLOpContext::AsyncErrorCheck() {\n",
        "void NCCLOpContext::AsyncErrorCheck() {\n  if (nccl_context_->elastic && global_state_->shut_down) {\n"
        '    throw std::logic_error("Horovod has been shut down");\n  }\n',
    ),
    (
        "horovod/common/operations.cc",
        "  // Finalize all contexts\n#if HAVE_NCCL\n",
        "  // Finalize all contexts\n#if HAVE_GPU\n  state.shut_down = true;\n  gpu_context.Finalize();\n#endif\n#if HAVE_NCCL\n",
    ),
    (
        "horovod/common/thread_pool.cc",
        "  while (running_) {\n    std::unique_lock<std::mutex> lock(mutex_);\n"
        "    cond_.wait(lock, [this] {return !(running_ && work_queue_.empty());});\n    if (!running_) break;\n",
        "  while (true) {\n    std::unique_lock<std::mutex> lock(mutex_);\n"
        "    cond_.wait(lock, [this] {return !(running_ && work_queue_.empty());});\n    if (work_queue_.empty()) break;\n",
    ),
    (  # the end of the world aborts it, a second time
        "horovod/common/ops/nccl_operations.cc",
        "    ncclCommAbort(nccl_comm);\n    throw",
        "    throw",
    ),
)


class BuildError(Exception):
    """The wheel could not be built; the message says what to look at."""


@dataclass(frozen=True, slots=True)
class Framework:
    """What Horovod is built for, by the name that its variables have for it."""

    variable: str
    label: str
    # Of one module, the first that is installed counts.
    packages: tuple[str, ...]

    def version(self) -> str:
        for name in self.packages:
            try:
                return importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                continue
        raise BuildError(
            f"{self.packages[-1]} is not installed: `make setup` installs the pinned version; "
            f"HOROVOD_WITHOUT_{self.variable}=1 builds Horovod without it"
        )


FRAMEWORKS = (
    Framework("PYTORCH", "torch", ("torch",)),
    Framework("TENSORFLOW", "tf", ("tensorflow-cpu", "tensorflow")),
)


def wanted(variables: Mapping[str, str]) -> list[Framework]:
    """The frameworks that no variable leaves out; as in Horovod's own build only "1" does."""
    chosen = [framework for framework in FRAMEWORKS if variables.get(f"HOROVOD_WITHOUT_{framework.variable}") != "1"]
    if not chosen:
        raise BuildError("HOROVOD_WITHOUT_PYTORCH=1 and HOROVOD_WITHOUT_TENSORFLOW=1 leave nothing to build for")
    return chosen


def cache_key(frameworks: list[Framework], gpu_operations: str) -> str:
    """Every version that the binary depends on, and the edits, in one directory name."""
    edits = hashlib.sha256(repr(EDITS).encode()).hexdigest()[:8]
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    versions = "-".join(f"{framework.label}{framework.version()}" for framework in frameworks)
    ops = f"-{gpu_operations.lower()}" if gpu_operations else ""
    return f"horovod-{HOROVOD_VERSION}-{python}-{versions}{ops}-{edits}"


def fetch_source(into: Path) -> Path:
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-build-isolation"]
    subprocess.run(
        [*pip, "--no-binary", ":all:", "-d", str(into), f"horovod=={HOROVOD_VERSION}"], check=True, stdout=sys.stderr
    )
    # Not tarfile's own `filter`: Python 3.11.2, Debian 12's, does not have it yet.
    shutil.unpack_archive(into / f"horovod-{HOROVOD_VERSION}.tar.gz", into)
    return into / f"horovod-{HOROVOD_VERSION}"


def apply_edits(source: Path) -> None:
    for name, old, new in EDITS:
        path = source / name
        text = path.read_text()
        if old not in text:
            raise BuildError(
                f"{name} has no line {old!r}: this is not the Horovod {HOROVOD_VERSION} that the edits are for"
            )
        path.write_text(text.replace(old, new, 1))


def build_environment(frameworks: list[Framework], gpu_operations: str) -> dict[str, str]:
    flags = {
        "HOROVOD_WITH_GLOO": "1",
        "HOROVOD_WITHOUT_MPI": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
        # A framework that is asked for and not found stops the build, instead of being left out silently.
        **{f"HOROVOD_WITH_{framework.variable}": "1" for framework in frameworks},
        "MAKEFLAGS": f"-j{len(os.sched_getaffinity(0))}",
        # The cmake of this environment, not a newer one that dropped the policies Horovod asks for.
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    if gpu_operations:
        flags["HOROVOD_GPU_OPERATIONS"] = gpu_operations
    return {**os.environ, **flags}


def compile_wheel(source: Path, out: Path, log: Path, env: dict[str, str]) -> Path:
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-v",
        "--no-build-isolation",
        "--no-deps",
        "-w",
        str(out),
        str(source),
    ]
    with (
        log.open("w") as sink,
        subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as build,
    ):
        assert build.stdout is not None
        shown = -5
        for line in build.stdout:
            sink.write(line)
            match = re.search(r"\[ *(\d+)%\]", line)
            if match and (int(match[1]) >= shown + 5 or int(match[1]) < shown):
                shown = int(match[1])
                print(f"  building Horovod (8-10 minutes on 2 cores, once): {shown:3d}%", file=sys.stderr, flush=True)
    if build.returncode != 0:
        tail = "".join(log.read_text().splitlines(keepends=True)[-25:])
        raise BuildError(f"the build of Horovod failed; its last lines were:\n{tail}\nthe whole log: {log}")
    return next(out.glob("horovod-*.whl"))


def main() -> int:
    gpu_operations = os.environ.get("HOROVOD_GPU_OPERATIONS", "")
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "elasticdl"
    frameworks = wanted(os.environ)
    target = cache / cache_key(frameworks, gpu_operations)
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "build.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two set-ups at once build one wheel
        if not target.is_dir():
            with tempfile.TemporaryDirectory(prefix="horovod-", dir=cache) as scratch:
                source = fetch_source(Path(scratch))
                apply_edits(source)
                out = Path(scratch) / "wheel"
                compile_wheel(source, out, cache / "horovod-build.log", build_environment(frameworks, gpu_operations))
                shutil.move(str(out), str(target))
    print(next(target.glob("horovod-*.whl")))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (BuildError, subprocess.CalledProcessError) as error:
        sys.exit(f"build_horovod: {error}")
