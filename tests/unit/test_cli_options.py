"""Flags and YAML keys: every field is reachable, and each mistake is one line that says what would be right."""

from __future__ import annotations

import importlib.metadata
import platform
import re

import click
import pytest
from cli_kit import play, scene_in

import elasticdl
from elasticdl.cli.__main__ import main
from elasticdl.cli.commands.start import evaluate, make_spec, predict, train
from elasticdl.common.errors import UserError
from elasticdl.job.spec import OPTION_GROUPS, JobSpec, KubernetesOptions, fields_of, options_of

OTHER_VALUES = {
    "launcher": "slurm",
    "num_workers": "2-4",
    "scale_policy": "efficiency",
    "min_efficiency": "0.5",
    "learning_rate_scaling": "linear",
    "log_level": "DEBUG",
    "collective": "torch",
    "check_state": "7",
    "log_ranks": "0,2",
    "start_method": "spawn",
    **{f"{role}_resource_{what}": "cpu=2" for role in ("master", "worker") for what in ("request", "limit")},
    "worker_pod_priority": "high=0.5",
    "volume": "claim_name=data,mount_path=/data",
    "envs": "A=1",
    "image_pull_policy": "Always",
    "queue": "kueue=team",
}
ON_A_CLUSTER = set(fields_of(KubernetesOptions)) - {"image"}
COMMANDS = {"train": train, "evaluate": evaluate, "predict": predict}
FIELDS = {task: [name for group in OPTION_GROUPS for name in options_of(group, task)] for task in COMMANDS}
ONCE = {name: task for task in reversed(COMMANDS) for name in FIELDS[task]}


def spec_of(*argv: str, task: str = "train") -> JobSpec:
    command = COMMANDS[task]
    context = command.make_context(task, list(argv), parent=click.Context(command, info_name="elasticdl"))
    return make_spec(context.params, OPTION_GROUPS, task=task)


def companion(name):
    """What an option needs so that it is not refused."""
    if ONCE[name] != "train":
        return ["--checkpoint_dir", "kept"]
    if name == "min_efficiency":
        return ["--scale_policy", "efficiency"]
    if name.startswith("slurm_"):
        return ["--launcher", "slurm"]
    return ["--image", "some/image"] if name in ON_A_CLUSTER else []


def other_value(name):
    """Valid text for a field that is not its default."""
    field = JobSpec.model_fields[name]
    if field.annotation is bool:
        return str(not field.default).lower()
    return OTHER_VALUES.get(name) or ("text" if field.annotation is str else "7")


def as_flag(name, value):
    if JobSpec.model_fields[name].annotation is bool:
        return [f"--{name}" if value.lower() == "true" else f"--no_{name}"]
    return [f"--{name}", value]


@pytest.mark.parametrize("name", sorted(ONCE.keys() - {"processes_per_worker"}))  # which `train` refuses
def test_every_field_is_set_by_its_flag_in_both_spellings_and_by_its_key_which_a_flag_overrides(name, tmp_path):
    config = tmp_path / "job.yaml"
    config.write_text(f"{name}: {other_value(name)}\n")
    more = companion(name)
    flag, *value = as_flag(name, other_value(name))
    task = ONCE[name]
    by_flag = spec_of(flag, *value, *more, task=task)
    assert by_flag == spec_of(flag.replace("_", "-"), *value, *more, task=task)
    assert by_flag == spec_of("--config", str(config), *more, task=task)
    others = {"command", "task", *(flag.removeprefix("--") for flag in more[:1])}
    assert set(by_flag.model_dump(exclude_defaults=True)) - others == {name}
    default = JobSpec.model_fields[name].default
    if default not in (None, ""):
        given = ["--config", str(config), *as_flag(name, str(default)), *more]
        assert spec_of(*given, task=task) == spec_of(*more, task=task)


MISTAKES = r"""
$ train --num_workers 4-2  ! --num_workers 4-2: the minimum is above the maximum; write MIN-MAX, as in 2-4
$ train --num_workers 1-1000000000  ! --num_workers 1-1000000000: must be less than or equal to 10000
$ train --num_workers few  ! --num_workers few: is neither a number nor MIN-MAX, as in 2-4
$ train --scale_policy best  ! --scale_policy best: must be 'all' or 'efficiency'
$ train --scale_policy efficiency --min_efficiency 0  ! --min_efficiency 0: must be greater than 0
$ train --min_efficiency 0.5  ! --min_efficiency is for --scale_policy efficiency: give that as well, or leave it out
$ train --heartbeat_timeout inf  ! --heartbeat_timeout inf: must be a finite number
$ train --progress_timeout soon  ! --progress_timeout soon: must be a valid number or must be 'auto'
$ train --log_ranks first  ! --log_ranks first: ...
$ train --check_state never  ! --check_state never: does not fit: how often to compare what workers hold: epoch...
$ train --global_batch_size 8 --max_worker_batch_size 16  ! --max_worker_batch_size 16 is above --global_batch_size...
$ train --slurm_args=--gpus=1  ! --slurm_args is for --launcher slurm: give that as well, or leave it out
$ train --launcher slurm --image i  ! --launcher slurm runs no images, and --image is for Kubernetes: leave one out
$ train --launcher slurm --slurm_args="'a"  ! --slurm_args 'a: can't be split into words as a shell does: no closing...
$ train --image i --worker_resource_request gpu=x  ! --worker_resource_request gpu=x: gpu=x is no quantity: write...
$ train --image i --namespace Team  ! --namespace Team: does not fit: namespace of the job, as in team-a...
$ train --image i --gang --num_workers 2-4  ! --num_workers 2-4: --gang trains with all workers or none: give one...
$ train --image i --job_name 7b  ! --job_name 7b: must begin with a letter for a job on a Kubernetes cluster
$ train --model_def m --ttl 9  ! --ttl is for a job on a Kubernetes cluster: give --image as well, or leave it out
$ train --model_def m --image i --ttl 60 --yaml a.yaml  ! --ttl takes away what a Job owns, and what is applied from ...
$ trian  !! elasticdl: No such command 'trian'. Did you mean 'train'? See `elasticdl --help`.  ? 2
$ train --num-epoch 3  ! No such option '--num_epoch'. (Did you mean one of: '--...
$ train digits  ! Got unexpected extra argument (digits) See `elasticdl train --help`.
$ train --prediction_data p  ! No such option '--prediction_data'...
$ evaluate --model_def m  ! --checkpoint_dir is missing: name the folder with the checkpoints of the trained model
$ predict --model_def m --checkpoint_dir c --output o.csv  ! --output o.csv: must be a file that ends in .npz or .parquet
$ train  ! --model_def is missing: name a module below --model_zoo, as in ...
$ run  ! the program is missing: put it after --, as in `elasticdl run -- ...
$ train --model_def m --processes_per_worker 2  ! --processes_per_worker 2: a module's model is whole in each process...
$ run --processes_per_worker 2 --collective horovod -- python a.py  ! --processes_per_worker 2: only torch.distributed ...
$ run --processes_per_worker 2 --image i --worker_resource_limit gpu=4 -- python a.py
! elasticdl run: --worker_resource_limit has 4 GPUs for 2 processes: give gpu=2, or the option 4
$ run -- torchrun train.py  ! torchrun starts workers of its own, which can't come and go: give...
$ run --num-epochs 3 -- python train.py  ! --num_epochs: `elasticdl train` has it; with `elasticdl run`...
$ run --num-workers 2 python train.py --lr 1
! elasticdl run: the program goes after --: `elasticdl run --num-workers 2 -- python train.py --lr 1`
$ run --detach train.py  ! the program goes after --: `elasticdl run --detach -- python train.py`
$ train --config none.yaml  ! --config none.yaml: No such file or directory
+ file a.yaml num_worker: 3
$ train --config a.yaml  ! a.yaml: unknown option num_worker: did you mean num_workers?
+ file c.yaml num_workers: [2, 4]
$ train --config c.yaml  ! c.yaml: num_workers: [2, 4]: does not fit: number of workers, or MIN-MAX...
+ file d.yaml - num_epochs
$ train --config d.yaml  ! --config d.yaml must be a mapping of options, as in `num_workers: 2-4`
+ file e.yaml a: b: c
$ train --config e.yaml  ! --config e.yaml is not YAML: mapping values are not allowed here...
"""


@pytest.mark.parametrize("session", re.findall(r"^(?:\+ .*\n)?\$ .*(?:\n! .*)*", MISTAKES, re.MULTILINE))
def test_a_mistake_ends_with_2_and_one_line_and_nothing_is_made(session, tmp_path, monkeypatch, capfd):
    with scene_in(tmp_path, monkeypatch) as scene:
        play(session, scene, capfd)
        assert not list((tmp_path).glob("*/*"))


@pytest.mark.parametrize("given", [{"output": "/a/\udcff"}, {"command": ("a", "\udcff")}])
def test_a_path_that_is_no_text_is_refused(given):
    with pytest.raises(UserError, match="an option or an argument of the program is not UTF-8"):
        JobSpec(**given).to_json()


def test_the_version(capsys):
    assert main(["--version"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first == f"elasticdl {elasticdl.__version__}, Python {platform.python_version()}"
    assert f"torch {importlib.metadata.version('torch')}, " in second


def test_help_has_a_section_for_each_group_and_every_flag_with_its_kind_of_value():
    for task, command in COMMANDS.items():
        text = command.get_help(click.Context(command, info_name=task))
        groups = [group for group in OPTION_GROUPS if options_of(group, task)]
        assert all(f"\n{group.__doc__}:\n" in text for group in groups)
        assert all(bool(re.search(rf"  --{name}\b", text)) == (name in FIELDS[task]) for name in ONCE)
    metavars = {option.name: option.metavar for option in train.params if isinstance(option, click.Option)}
    assert [metavars[name] for name in ("min_efficiency", "num_workers", "port")] == ["PART", "N|MIN-MAX", "N"]
