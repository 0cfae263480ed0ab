"""A dry run before a job is started: ``python -m elasticdl.worker.check``, the job's specification on stdin.

0 if a worker could train this job here; else 2, and the last line on stderr says what is wrong. What the module prints is before it.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys

from elasticdl.common.credentials import refuse_variables
from elasticdl.common.errors import UserError, how_to_install
from elasticdl.common.reason import flat, name_of
from elasticdl.job.spec import TRAIN, JobSpec


def check(spec: JobSpec) -> None:
    """Raises UserError if the job can't be trained; one line says why."""
    # Imported here: what these import may be what is missing.
    from elasticdl.worker.learner import batch_policy, build_model, framework_of, import_learner
    from elasticdl.worker.zoo import load_module

    refuse_variables(os.environ)
    module = load_module(spec)
    with module.blame(f"{name_of(module.custom_model)}()"):
        model = build_model(module, spec.seed)
    learner = import_learner(framework_of(model, module))
    if spec.task != TRAIN:
        from elasticdl.worker.inference import Pass

        with contextlib.closing(learner.context_class.connect(batch_policy(spec), seed=spec.seed, environ={})) as alone:
            Pass(spec, alone, module, learner, model).check()
        return
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


def main() -> int:
    spec = JobSpec.from_json(sys.stdin.read())
    try:
        check(spec)
    except UserError as error:
        print(f"\n{flat(error)}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        extra = {"torch": "torch", "tensorflow": "tensorflow", "keras": "tensorflow"}.get(error.name or "", "worker")
        print(f"\n{error.name} is not installed, and a worker needs it: {how_to_install(extra)}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    code = main()
    gc.freeze()  # else the interpreter, as it ends, looks half a second long through PyTorch for garbage
    sys.exit(code)
