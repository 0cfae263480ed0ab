"""The job specification: every option of a job, declared once.

The command line, ``--config job.yaml`` and the JSON that a worker receives are all made from these fields
(`elasticdl.cli.options`). The group of an option is the class that declares it.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, model_validator

from elasticdl.common.kubernetes_options import KubernetesOptions
from elasticdl.common.option_group import OptionGroup

# Each has a record in the master's memory and a line in every status, whether there is a place for it or not.
MOST_WORKERS = 10_000


class WorkerRange(BaseModel):
    """How many workers a job may have, both ends included."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    minimum: int = Field(ge=1, le=MOST_WORKERS)
    maximum: int = Field(ge=1, le=MOST_WORKERS)

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.minimum > self.maximum:
            raise ValueError(
                f"{self.minimum}-{self.maximum}: the minimum is above the maximum; write MIN-MAX, as in 2-4"
            )
        return self

    def __str__(self) -> str:
        return str(self.minimum) if self.minimum == self.maximum else f"{self.minimum}-{self.maximum}"


def parse_worker_range(value: object) -> object:
    """Accept ``4``, ``"4"`` and ``"2-4"``; anything else is left for the type check to refuse."""
    if isinstance(value, bool) or not isinstance(value, int | str):
        return value
    match = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", str(value))
    if not match:
        raise ValueError(f"{value!r} is neither a number nor MIN-MAX, as in 2-4")
    return WorkerRange(minimum=int(match[1]), maximum=int(match[2] or match[1]))


Workers = Annotated[WorkerRange, BeforeValidator(parse_worker_range), PlainSerializer(str)]


class ModelOptions(OptionGroup):
    """Model"""

    model_zoo: str = Field(".", description="folder that holds the model-zoo modules")
    model_def: str = Field(
        "",
        description="module below --model_zoo, as in digits.cnn_torch, optionally with the function that makes the model (custom_model)",
    )
    model_params: str = Field(
        "", description="arguments of the function that makes the model, as in \"units=64; activation='relu'\""
    )
    loss: str = Field("loss", description="name of the module's loss(labels, predictions)")
    optimizer: str = Field("optimizer", description="name of the module's optimizer(parameters)")
    dataset: str = Field("dataset", description="name of the module's dataset(mode, path)")
    feed: str = Field(
        "feed",
        description="name of the module's feed(dataset, mode, metadata) over the records of files, or of its older form dataset_fn, instead of dataset(mode, path)",
    )
    custom_data_reader: str = Field(
        "custom_data_reader",
        description="name of the module's custom_data_reader(data_origin, ...), if feed takes its records from one",
    )
    eval_metrics_fn: str = Field("eval_metrics_fn", description="name of the module's eval_metrics_fn(), if it has one")
    callbacks: str = Field("callbacks", description="name of the module's callbacks(), if it has one")


class DataOptions(OptionGroup):
    """Data"""

    training_data: str = Field("", description="path given to dataset('training', path); for feed: files")
    validation_data: str = Field("", description="path given to dataset('evaluation', path); for feed: files")
    data_reader_params: str = Field(
        "",
        description="how feed's files are read, as in \"columns=['age', 'income']; sep=';'\", or arguments of custom_data_reader",
    )
    num_epochs: int = Field(1, ge=1, description="passes over the training data")
    max_step: int = Field(0, ge=0, description="stop after this many steps; 0: at the end of the last epoch")
    seed: int = Field(0, ge=0, description="of the sample order, the initial weights and every random draw in training")
    shuffle: bool = Field(True, description="a new order of samples each epoch")
    data_workers: int = Field(
        0, ge=0, description="processes per worker that load samples ahead; 0: load in the worker itself"
    )


class BatchOptions(OptionGroup):
    """Batch size and learning rate"""

    global_batch_size: int | None = Field(
        None,
        ge=1,
        description="samples per step over all workers, whatever their number; the learning rate is left alone",
    )
    minibatch_size: int | None = Field(
        None,
        ge=1,
        description="samples per step and worker, so the global batch grows with the workers; 64 if neither is given",
    )
    max_worker_batch_size: int | None = Field(
        None, ge=1, description="most samples that a worker runs through the model at once; more are accumulated"
    )
    learning_rate_scaling: Literal["none", "linear", "sqrt"] = Field(
        "none",
        description="with --minibatch_size: multiply the learning rate by the number of workers, or by its square root",
    )
    learning_rate_ramp_steps: int = Field(
        0, ge=0, description="steps over which the learning rate moves to its new value after a change of workers"
    )

    @model_validator(mode="after")
    def _one_policy(self) -> Self:
        if self.global_batch_size is not None and self.minibatch_size is not None:
            raise ValueError(
                "--global_batch_size and --minibatch_size exclude each other: give the first for a fixed global batch, the second for a fixed batch per worker"
            )
        bound, batch = self.max_worker_batch_size, self.global_batch_size or self.minibatch_size
        if bound is not None and batch is not None and bound > batch:
            name = "--global_batch_size" if self.global_batch_size else "--minibatch_size"
            raise ValueError(f"--max_worker_batch_size {bound} is above {name} {batch}; it must be at most that")
        if self.learning_rate_scaling != "none" and self.global_batch_size is not None:
            raise ValueError(
                "--learning_rate_scaling corrects for a global batch that grows with the workers, but --global_batch_size keeps it fixed: leave one out"
            )
        return self


class EvaluationOptions(OptionGroup):
    """Evaluation"""

    evaluation_steps: int = Field(
        0, ge=0, description="also evaluate each so many steps; 0: at the end of each epoch only"
    )


class CheckpointOptions(OptionGroup):
    """Checkpoints"""

    checkpoint_dir: str = Field("", description="folder or fsspec URL for checkpoints")
    checkpoint_steps: int = Field(0, ge=0, description="write one each so many steps; 0: at the end of each epoch")
    keep_checkpoint_max: int = Field(3, ge=0, description="checkpoints to keep; 0: all")
    resume: bool = Field(True, description="continue from the newest checkpoint in --checkpoint_dir if there is one")


class OutputOptions(OptionGroup):
    """Output"""

    output: str = Field("", description="folder for the final model and summary.json")
    tensorboard_log_dir: str = Field("", description="folder for TensorBoard scalars")
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field(
        "INFO", description="least severe messages in the logs"
    )
    log_loss_steps: int = Field(
        100, ge=1, description="steps between two lines of progress when the output is not a terminal"
    )
    sample_record: str = Field(
        "", description="folder where each worker records the indices of the samples it consumes"
    )

    @model_validator(mode="after")
    def _local(self) -> Self:
        for name in ("output", "tensorboard_log_dir", "sample_record"):
            value = getattr(self, name)
            if "://" in value:
                raise ValueError(f"--{name} {value} is a URL; it must be a local folder (--checkpoint_dir takes URLs)")
        return self


class JobOptions(OptionGroup):
    """Job and workers"""

    job_name: str = Field(
        "",
        pattern=r"^([a-z0-9]([-a-z0-9]{0,51}[a-z0-9])?)?$",
        description="name of the job: up to 53 lower-case letters, digits and dashes; made up if not given",
    )
    num_workers: Workers = Field(
        WorkerRange(minimum=1, maximum=1), description="number of workers, or MIN-MAX to grow and shrink within"
    )
    slots: int = Field(
        0,
        ge=0,
        description="workers that this machine can hold at once; 0: one per GPU, or as many as asked for on a machine without GPUs",
    )
    port: int = Field(0, ge=0, le=65535, description="port of the master; 0: any free one")


class TimingOptions(OptionGroup):
    """Timing, in seconds"""

    join_window: float = Field(0.3, ge=0, description="wait this long for further newcomers before the world changes")
    start_timeout: float = Field(
        600.0,
        gt=0,
        description="a worker that is not ready this long after its start is given up and replaced",
    )
    heartbeat_timeout: float = Field(
        10.0, gt=0, description="a worker silent for this long is taken to be frozen or cut off, and replaced"
    )
    progress_timeout: float = Field(
        300.0, gt=0, description="a worker that makes no progress for this long is taken to be stuck, and replaced"
    )
    stop_grace: float = Field(
        30.0,
        gt=0,
        description="time for workers to leave by themselves, and write a last checkpoint, before they are killed",
    )


class JobSpec(
    JobOptions,
    ModelOptions,
    DataOptions,
    BatchOptions,
    EvaluationOptions,
    CheckpointOptions,
    OutputOptions,
    TimingOptions,
    KubernetesOptions,
):
    """All options of one job, checked, immutable, and the same on the command line, in YAML and in JSON."""

    command: tuple[str, ...] = Field((), description="the user's own program, for `elasticdl run`")

    @model_validator(mode="after")
    def _fits_a_cluster(self) -> Self:
        workers = self.num_workers
        if self.gang and workers.minimum != workers.maximum:
            raise ValueError(f"--gang trains with all workers or none: give --num_workers one number, not {workers}")
        if self.image and self.job_name[:1].isdigit():
            raise ValueError(f"--job_name {self.job_name}: must begin with a letter for a job on a Kubernetes cluster")
        return self

    @classmethod
    def from_json(cls, text: str) -> JobSpec:
        return cls.model_validate_json(text)

    def to_json(self) -> str:
        return self.model_dump_json(indent=1)


OPTION_GROUPS: tuple[type[OptionGroup], ...] = JobSpec.__bases__  # in the order of the help
