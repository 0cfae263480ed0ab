"""Flags and YAML keys: every field is reachable, and each mistake is one line that says what would be right."""

from __future__ import annotations

import builtins
import importlib.metadata
import platform
import re
import signal

import click
import pytest
from pydantic import ValidationError

import elasticdl
from elasticdl.cli import entry
from elasticdl.cli.__main__ import main
from elasticdl.cli.commands.start import make_spec, run, train
from elasticdl.cli.signals import CAUGHT
from elasticdl.common.errors import UserError
from elasticdl.job.spec import OPTION_GROUPS, JobSpec, KubernetesOptions, fields_of

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
    "job_name": "mine",
    "max_worker_batch_size": "7",
    "master_resource_request": "cpu=2",
    "master_resource_limit": "cpu=2",
    "worker_resource_request": "gpu=1",
    "worker_resource_limit": "gpu=1",
    "worker_pod_priority": "high=0.5",
    "volume": "claim_name=data,mount_path=/data",
    "envs": "A=1",
    "image_pull_policy": "Always",
    "queue": "kueue=team",
}
ON_A_CLUSTER = set(fields_of(KubernetesOptions)) - {"image"}
FIELDS = [name for group in OPTION_GROUPS for name in fields_of(group)]


def spec_of(*argv: str) -> JobSpec:
    context = train.make_context("train", list(argv), parent=click.Context(train, info_name="elasticdl"))
    return make_spec(context.params, OPTION_GROUPS)


def companion(name: str) -> list[str]:
    """What an option needs so that it is not refused."""
    if name == "min_efficiency":
        return ["--scale_policy", "efficiency"]
    if name.startswith("slurm_"):
        return ["--launcher", "slurm"]
    return ["--image", "some/image"] if name in ON_A_CLUSTER else []


def other_value(name: str) -> str:
    """Valid text for a field that is not its default."""
    field = JobSpec.model_fields[name]
    if name in OTHER_VALUES:
        return OTHER_VALUES[name]
    if field.annotation is bool:
        return "false" if field.default else "true"
    return "text" if field.annotation is str else "7"


def as_flag(name: str, value: str = "") -> list[str]:
    """With another value than the default, unless one is given."""
    value = value or other_value(name)
    if JobSpec.model_fields[name].annotation is bool:
        return [f"--{name}" if value.lower() == "true" else f"--no_{name}"]
    return [f"--{name}", value]


@pytest.mark.parametrize("name", FIELDS)
def test_every_field_is_set_by_its_flag_in_both_spellings_and_by_its_key_which_a_flag_overrides(name, tmp_path):
    config = tmp_path / "job.yaml"
    config.write_text(f"{name}: {other_value(name)}\n")
    more = companion(name)
    flag, *value = as_flag(name)
    by_flag = spec_of(flag, *value, *more)
    assert by_flag == spec_of(flag.replace("_", "-"), *value, *more)
    assert by_flag == spec_of("--config", str(config), *more)
    others = {"command", *(flag.removeprefix("--") for flag in more[:1])}
    assert set(by_flag.model_dump(exclude_defaults=True)) - others == {name}
    default = JobSpec.model_fields[name].default
    if default not in (None, ""):
        assert spec_of("--config", str(config), *as_flag(name, str(default)), *more) == spec_of(*more)


@pytest.mark.parametrize("name", sorted(ON_A_CLUSTER))
def test_options_of_a_cluster_are_refused_without_an_image(name):
    with pytest.raises(UserError) as caught:
        spec_of(*as_flag(name))
    wanted = f"--{name} is for a job on a Kubernetes cluster: give --image as well, or leave it out"
    assert str(caught.value) == wanted


@pytest.mark.parametrize(
    ("argv", "right"),
    [
        ("--num-workers 2 python train.py --lr 1", "elasticdl run --num-workers 2 -- python train.py --lr 1"),
        ("--detach train.py", "elasticdl run --detach -- python train.py"),
        ("--no_resume bash train.sh", "elasticdl run --no_resume -- bash train.sh"),
    ],
)
def test_a_program_without_the_separator_is_told_where_that_goes(argv, right):
    with pytest.raises(UserError) as told:
        run.make_context("run", argv.split())
    assert str(told.value) == f"the program goes after --: `{right}`"
    assert run.make_context("run", ["--pod_template", "pod.yaml"]).params["program"] == ()
    assert run.make_context("run", ["--", "bash", "--num_workers", "--", "-x"]).params["program"][1:] == (
        "--num_workers",
        "--",
        "-x",
    )
    with pytest.raises(UserError, match="--num_epochs: `elasticdl train` has it; with `elasticdl run`"):
        run.make_context("run", ["--num-epochs", "3", "--", "python", "train.py"])


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--num_workers 4-2", "--num_workers 4-2: the minimum is above the maximum; write MIN-MAX, as in 2-4"),
        ("--num_workers 1-1000000000", "--num_workers 1-1000000000: must be less than or equal to 10000"),
        ("--scale_policy efficiency --min_efficiency 0", "--min_efficiency 0: must be greater than 0"),
        ("--num_workers few", "--num_workers few: is neither a number nor MIN-MAX, as in 2-4"),
        ("--slurm_args=--gpus=1", "--slurm_args is for --launcher slurm: give that as well, or leave it out"),
        ("--image i --worker_resource_request gpu=x", "--worker_resource_request gpu=x: gpu=x is no quantity: write"),
        ("--num_workers 0", "--num_workers 0: must be greater than or equal to 1"),
        ("--scale_policy best", "--scale_policy best: must be 'all' or 'efficiency'"),
        ("--scale_policy efficiency --min_efficiency 1.2", "--min_efficiency 1.2: must be less than or equal to 1"),
        ("--min_efficiency 0.5", "--min_efficiency is for --scale_policy efficiency: give that as well, or leave"),
        ("--num_epochs 2.5", "--num_epochs 2.5: must be a valid integer"),
        ("--heartbeat_timeout 0", "--heartbeat_timeout 0: must be greater than 0"),
        ("--progress_timeout soon", "--progress_timeout soon: must be a valid number or must be 'auto'"),
        ("--image i --namespace Team", "--namespace Team: does not fit: namespace of the job, as in team-a"),
        ("--port 70000", "--port 70000: must be less than or equal to 65535"),
        ("--global_batch_size 8 --max_worker_batch_size 16", "--max_worker_batch_size 16 is above --global_batch_size"),
        ("--image i --gang --num_workers 2-4", "--num_workers 2-4: --gang trains with all workers or none: give one"),
        ("--launcher slurm --image i", "--launcher slurm runs no images, and --image is for Kubernetes: leave one out"),
        ("--launcher slurm --slurm_args='a", "--slurm_args 'a: can't be split into words as a shell does: no closing"),
        ("--image i --job_name 7b", "--job_name 7b: must begin with a letter for a job on a Kubernetes cluster"),
    ],
)
def test_a_wrong_flag_is_one_line(argv, message):
    with pytest.raises(UserError) as caught:
        spec_of(*argv.split())
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("num_worker: 3", "{file}: unknown option num_worker: did you mean num_workers?"),
        ("num_epochs: 0", "{file}: num_epochs: 0: must be greater than or equal to 1"),
        ("num_workers: [2, 4]", "{file}: num_workers: [2, 4]: does not fit: number of workers, or MIN-MAX"),
        ("- num_epochs", "--config {file} must be a mapping of options, as in `num_workers: 2-4`"),
        ("a: b: c", "--config {file} is not YAML: mapping values are not allowed here"),
    ],
)
def test_a_wrong_file_is_one_line(content, message, tmp_path):
    config = tmp_path / "job.yaml"
    config.write_text(content)
    with pytest.raises(UserError) as caught:
        spec_of("--config", str(config))
    assert str(caught.value).startswith(message.format(file=config))
    assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match="No such file or directory"):
        spec_of("--config", str(tmp_path / "none.yaml"))


def test_run_offers_what_a_script_does_not_decide_itself():
    offered = set(run.flags())
    assert {"--num_workers", "--tensorboard_log_dir", "--log_level", "--stop_grace", "--checkpoint_dir"} <= offered
    assert not {"--model_def", "--training_data", "--checkpoint_steps", "--evaluation_steps"} & offered


@pytest.mark.parametrize(("text", "limit"), [("auto", "auto"), ("7", 7.0), ("0.5", 0.5)])
def test_a_limit_is_auto_or_seconds(text, limit):
    spec = JobSpec.model_validate({"progress_timeout": text})
    assert spec.progress_timeout == limit
    assert JobSpec.from_json(spec.to_json()) == spec


@pytest.mark.parametrize("name", ["start_timeout", "stop_grace", "join_window", "heartbeat_timeout"])
def test_no_number_is_endless_as_json_has_no_such(name):
    with pytest.raises(UserError) as caught:
        spec_of(f"--{name}", "inf")
    assert str(caught.value) == f"--{name} inf: must be a finite number"


@pytest.mark.parametrize("given", [{"output": "/a/\udcff"}, {"command": ("a", "\udcff")}])
def test_a_path_that_is_no_text_is_refused(given):
    with pytest.raises(UserError, match="an option or an argument of the program is not UTF-8"):
        JobSpec(**given).to_json()


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "soon", None])
def test_nothing_else_is_a_limit(text):
    with pytest.raises(ValidationError, match="auto"):
        JobSpec.model_validate({"progress_timeout": text})


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        ("trian", "elasticdl: No such command 'trian'. Did you mean 'train'? See `elasticdl --help`."),
        ("--zzz train", "elasticdl: No such option '--zzz'. See `elasticdl --help`."),
        (
            "train --num-epoch 3",
            "elasticdl train: No such option '--num_epoch'. (Did you mean one of: '--",
        ),
        ("train digits", "elasticdl train: Got unexpected extra argument (digits) See `elasticdl train --help`."),
        ("train --num_epochs", "elasticdl train: Option '--num_epochs' requires an argument. See `elasticdl train"),
        (
            "train --detach=yes",
            "elasticdl train: Option '--detach' does not take a value. See `elasticdl train --help`",
        ),
        ("run --foo -- python train.py", "elasticdl run: No such option '--foo'. See `elasticdl run --help`."),
        (
            "run -- torchrun train.py",
            "elasticdl run: torchrun starts workers of its own, which can't come and go: give",
        ),
        ("logs --worker x", "elasticdl logs: Invalid value for '--worker': 'x' is not a valid integer. See `elasticdl"),
        ("delete", "elasticdl delete: Missing argument 'JOB'. See `elasticdl delete --help`."),
        ("scale", "elasticdl scale: Missing argument 'N|MIN-MAX'. See `elasticdl scale --help`."),
        ("scale a 2 3", "elasticdl scale: Got unexpected extra argument (3). See `elasticdl scale --help`."),
        ("train", "elasticdl train: --model_def is missing: name a module below --model_zoo, as in "),
        ("run --num_workers 2", "elasticdl run: the program is missing: put it after --, as in `elasticdl run -- "),
    ],
)
def test_a_mistake_ends_with_2_and_one_line(argv, line, capsys):
    assert main(argv.split()) == 2
    out, err = capsys.readouterr()
    assert (out, err.startswith(line), err.count("\n")) == ("", True, 1)


@pytest.mark.parametrize("argv", [[], ["zoo"]])
def test_without_a_command_the_commands_are_shown(argv, capsys):
    assert main(argv) == 2
    shown = capsys.readouterr().err
    assert main([*argv, "--help"]) == 0
    assert capsys.readouterr().out == shown
    assert shown.startswith(f"Usage: elasticdl {'zoo ' if argv else ''}[OPTIONS] COMMAND [ARGS]...\n\n")


def test_the_version(capsys):
    assert main(["--help"]) == 0
    assert "--version" in capsys.readouterr().out
    assert main(["--version"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first == f"elasticdl {elasticdl.__version__}, Python {platform.python_version()}"
    torch = importlib.metadata.version("torch")
    assert re.fullmatch(rf"collectives and frameworks: (horovod .*, )?torch {re.escape(torch)}, .+", second)


def test_a_command_that_is_interrupted_while_it_is_imported_is_quiet(monkeypatch):
    def interrupted(name, *_):
        if name == "elasticdl.cli.__main__":
            raise KeyboardInterrupt

    monkeypatch.setattr(builtins, "__import__", interrupted)
    before = {number: signal.getsignal(number) for number in CAUGHT}
    try:
        assert entry.main() == 130
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_help_has_a_section_for_each_group_and_every_flag_with_its_kind_of_value():
    text = train.get_help(click.Context(train, info_name="train"))
    assert all(f"\n{group.__doc__}:\n" in text for group in OPTION_GROUPS)
    assert all(f"  --{name}" in text for name in FIELDS)
    metavars = {option.name: option.metavar for option in train.params if isinstance(option, click.Option)}
    names = ("min_efficiency", "join_window", "num_workers", "progress_timeout", "port")
    assert [metavars[name] for name in names] == ["PART", "SECONDS", "N|MIN-MAX", "SECONDS|auto", "N"]


@pytest.mark.parametrize(("given", "meant"), [("off", "off"), ("100", "100"), ("repair", "repair")])
def test_how_often_states_are_compared_may_stand_in_a_file(tmp_path, given, meant):
    config = tmp_path / "job.yaml"
    config.write_text(f"check_state: {given}\n")
    assert spec_of("--config", str(config)).check_state == meant
    with pytest.raises(
        UserError, match="--check_state never: does not fit: how often to compare what workers hold: epoch"
    ):
        spec_of("--check_state", "never")
