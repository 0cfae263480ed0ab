"""A dry run before a job is started: ``python -m elasticdl.worker.check``, the job's specification on stdin.

Silent and 0 if a worker could train this job here; else 2, and one line on stderr that says what is wrong.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections.abc import Iterator

from elasticdl.common.credentials import refuse_variables
from elasticdl.common.errors import UserError, how_to_install
from elasticdl.common.reason import flat, name_of
from elasticdl.job.spec import JobSpec


def check(spec: JobSpec) -> None:
    """Raises UserError if the job can't be trained; one line says why."""
    # Imported here: what these import may be what is missing.
    from elasticdl.worker.learner import build_model, framework_of, import_learner, set_defaults
    from elasticdl.worker.zoo import load_module

    refuse_variables(os.environ)
    set_defaults(os.environ)
    module = load_module(spec)
    with module.blame(f"{name_of(module.custom_model)}()"):
        model = build_model(module, spec.seed)
    learner = import_learner(framework_of(model, module))
    learner.check(module, spec, model)
    refuse_second_history(spec, learner.codec.suffix)


def refuse_second_history(spec: JobSpec, suffix: str) -> None:
    """A folder holds the checkpoints of one training: of two, the newest would be anybody's."""
    from elasticdl.worker.learner import open_store

    store = open_store(spec, suffix)
    found = store.newest_first() if store is not None else []
    if found and not spec.resume:
        raise UserError(
            f"--no_resume, but --checkpoint_dir {spec.checkpoint_dir} holds checkpoints of an earlier training, up to "
            f"step {found[0].step}: give another folder"
        )


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Nothing that is imported or run within reaches the terminal, compiled code included."""
    sys.stdout.flush()
    sys.stderr.flush()
    kept = [os.dup(1), os.dup(2)]
    with open(os.devnull, "w") as nowhere:
        try:
            os.dup2(nowhere.fileno(), 1)
            os.dup2(nowhere.fileno(), 2)
            with contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
                yield
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for descriptor, target in zip(kept, (1, 2), strict=True):
                os.dup2(descriptor, target)
                os.close(descriptor)


def main() -> int:
    spec = JobSpec.from_json(sys.stdin.read())
    try:
        with silence():
            check(spec)
    except UserError as error:
        print(flat(error), file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        extra = {"torch": "torch", "tensorflow": "tensorflow", "keras": "tensorflow"}.get(error.name or "", "worker")
        print(f"{error.name} is not installed, and a worker needs it: {how_to_install(extra)}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    code = main()
    gc.freeze()  # else the interpreter, as it ends, looks half a second long through PyTorch for garbage
    sys.exit(code)
