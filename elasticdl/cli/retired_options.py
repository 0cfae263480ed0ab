"""What other command lines had and this one has not, with what takes its place; docs/migration.md has the same rows.

Without it the nearest of today's names would be offered, which means something else.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath

from elasticdl.common.errors import UserError

NO_SERVERS = "leave it out: there are no parameter servers, only allreduce"
NO_TASKS = "leave it out: there are no tasks, samples are dealt out step by step"
NO_SWITCH = "leave it out: the master always does all that it is needed for"
OTHER_IMAGE = "`elasticdl zoo init` and `elasticdl zoo build` make the image"

# In groups with one answer; options without their dashes.
OPTIONS = {
    ("num_ps_pods", "distribution_strategy", "use_async", "grads_to_wait", "sync_version_tolerance"): NO_SERVERS,
    ("lr_staleness_modulation", "get_model_steps", "ps_addrs", "ps_id"): NO_SERVERS,
    ("ps_resource_request", "ps_resource_limit", "ps_pod_priority"): NO_SERVERS,
    ("num_minibatches_per_task", "task_fault_tolerance", "need_task_manager"): NO_TASKS,
    ("need_pod_manager", "need_elasticdl_job_service", "need_tf_config", "aux_params"): NO_SWITCH,
    ("relaunch_on_worker_failure",): "leave it out: workers that are lost are always replaced",
    ("relaunch_timeout_worker",): "`--progress_timeout SECONDS`",
    ("checkpoint_dir_for_init",): "`--checkpoint_dir`: a job goes on from the newest checkpoint there",
    ("dataset_fn",): "`--feed`",
    ("prediction_data", "prediction_outputs_processor"): "load the model that `--output` has written, and call it",
    ("job_command",): "`elasticdl run -- PROGRAM ARGUMENTS`",
    ("job_type",): "the command says it: `elasticdl train` or `elasticdl run`",
    ("worker_image",): "`--image`, for all pods",
    ("base_image", "local_pkg_dir", "extra_pypi_index"): OTHER_IMAGE,
    ("cluster_spec", "cluster_spec_json"): "`--pod_template FILE`",
    ("populate_env_names",): "`--envs NAME=VALUE`",
    ("force_use_kube_config_file",): "`--kube_context NAME`, or leave it out",
    ("log_file_path",): "`elasticdl logs`",
    ("num_evaluators", "evaluator_resource_request", "evaluator_resource_limit"): "leave it out: the workers evaluate",
}

COMMANDS = {
    "evaluate": (
        "a training evaluates by itself: `elasticdl train` with `--validation_data` and `--evaluation_steps`; for a trained "
        "model load what `--output` has written"
    ),
    "predict": "load the model that `--output` has written, and call it in a program of your own",
}

# Programs, and modules for `python -m`, that start workers of their own, which can't come and go.
STARTERS = (
    "torchrun", "torch.distributed.run", "torch.distributed.launch", "horovodrun", "mpirun", "mpiexec", "deepspeed", "accelerate",
)  # fmt: skip

_INSTEAD = {name: instead for names, instead in OPTIONS.items() for name in names} | COMMANDS


def instead_of(name: str) -> str:
    """``name``: of a command, or of an option without dashes. Empty if ElasticDL had none such, or this command line has it, too."""
    return f"that was ElasticDL's: {_INSTEAD[name]}" if name in _INSTEAD else ""


def refuse_starters(program: Sequence[str]) -> None:
    """Raises:
    UserError: the program starts workers itself.
    """
    words = [PurePath(word).name for word in program]
    named = words[2] if words[1:2] == ["-m"] and len(words) > 2 else words[0]
    if named in STARTERS:
        raise UserError(
            f"{named} starts workers of its own, which can't come and go: give the script alone, as in `elasticdl run -- python "
            "train.py`, and see docs/migration.md for what changes in it"
        )
