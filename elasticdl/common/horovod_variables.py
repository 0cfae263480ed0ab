"""Environment variables of Horovod that a job whose world changes can't bear."""

from __future__ import annotations

from collections.abc import Mapping

from elasticdl.common.errors import UserError

# On its second init Horovod 0.28.1 writes the default of one tuned parameter into the slot of the other
# (parameter_manager.cc, BayesianParameter::SetValue): ranks then fuse differently and abort.
REFUSED_VARIABLES = ("HOROVOD_CYCLE_TIME", "HOROVOD_FUSION_THRESHOLD", "HOROVOD_AUTOTUNE")


def refuse_variables(environ: Mapping[str, str]) -> None:
    """Raises:
    UserError: one of them is set.
    """
    for name in REFUSED_VARIABLES:
        if name in environ:
            raise UserError(
                f"{name} is set in the environment: Horovod 0.28.1 corrupts its parameters when it is started again "
                f"with it, as at every change of workers; unset {name}"
            )
