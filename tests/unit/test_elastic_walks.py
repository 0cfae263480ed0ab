"""docs/worker_side.md, whose lists a traced step writes: the files that it crosses, in the order in which they come in."""

import sys
from types import SimpleNamespace

import pytest
from front_ends import FRONT_ENDS, Script
from job_kit import Job

from tests.walks import REPOSITORY, require_written

PACKAGE = f"{REPOSITORY}/elasticdl/"
# For these the tests have a sum of threads.
MOVE_TENSORS = ("elastic/collectives/", "elastic/keras/tensorflow_adapter.py")
STEP = 3  # that is traced: to the commit of this number from that before, which a plain loop has before its step
# By the name of the walk: the front end, what happens within the step, and how many files may be crossed. Somebody has to read them.
WALKS = {
    "library": ("library loop", None, 14),
    "plain": ("plain loop", None, 18),
    "torn": ("plain loop", "lost", 24),
    "lightning": ("Lightning", None, 19),
    "transformers": ("Hugging Face", None, 18),
    "keras": ("Keras fit", None, 13),
}


def traced(kind, happens, monkeypatch):
    """The files that worker 0 crosses in a step beside another worker."""
    files, commits = {}, []
    job = getattr(kind, "Job", Job)(2, {(1, STEP - 1): happens} if happens else {})
    job.keeps_states = False
    job.streams = SimpleNamespace(capture=lambda: None, restore=lambda kept: None)  # nothing is drawn
    for name in getattr(kind, "runtimes", ()):
        monkeypatch.setattr(name, job)
    init = job.init_in_place

    def note(frame, event, _):
        package, _, path = frame.f_code.co_filename.partition(PACKAGE)
        if event == "call" and not package and path and not path.startswith(MOVE_TENSORS):
            files[path] = True

    def init_in_place(*given, **more):
        context = init(*given, **more)
        commit = context.commit

        def commit_and_trace():
            commits.append(True)
            commit()
            sys.setprofile(note if len(commits) == STEP - 1 else None)

        if job.rank() == 0:
            context.commit = commit_and_trace
        return context

    job.init_in_place = init_in_place
    workers = [kind(Script(epochs=1, notes=False)) for _ in range(2)]
    job.run(lambda rank: workers[rank].train(job))
    return list(files)


@pytest.mark.parametrize("walk", WALKS)
def test_a_step_crosses_few_files_and_the_document_names_them(walk, monkeypatch):
    front_end, happens, most = WALKS[walk]
    files = traced(FRONT_ENDS[front_end].load(), happens, monkeypatch)
    require_written(REPOSITORY / "docs" / "worker_side.md", walk, files)
    assert len(files) <= most
