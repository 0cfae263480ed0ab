"""The job specification: every option of a job, declared once.

The command line, ``--config job.yaml`` and the JSON that a worker receives are all made from these fields
(`elasticdl.cli.commands.start`). The group of an option is the class that declares it.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from typing import Annotated, Any, Final, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, model_validator
from pydantic_core import PydanticSerializationError

from elasticdl.common.errors import UserError
from elasticdl.job import quantities

AUTO: Final = "auto"  # of --progress_timeout
CHECK_OFF, CHECK_REPAIR = "off", "repair"  # of --check_state
TRAIN, EVALUATE, PREDICT = "train", "evaluate", "predict"  # tasks of a module
PREDICTION_SUFFIXES = (".npz", ".parquet")
RANKS_ALL, RANKS_NONE = "all", "none"  # of --log_ranks
# Each has a record in the master's memory and a line in every status, whether there is a place for it or not.
MOST_WORKERS = 10_000


class WorkerRange(BaseModel):
    """How many workers a job may have, both ends included."""

    model_config = ConfigDict(frozen=True)  # a later version's state may say more

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


def _as_text(value: object) -> str:
    """What a YAML file has for ``off``, for a number and for several with commas between them."""
    if value is False:
        return CHECK_OFF
    return ",".join(map(str, value)) if isinstance(value, list) else str(value).replace(" ", "")


def _kept(parse: Callable[[str], object]) -> AfterValidator:
    """A check of a text that is kept as it was written."""

    def check(text: str) -> str:
        parse(text)
        return text

    return AfterValidator(check)


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ValueError(f"can't be split into words as a shell does: {str(error).lower()}") from None


YamlText = Annotated[str, BeforeValidator(_as_text)]
Words = Annotated[str, _kept(_words)]
Resources = Annotated[str, _kept(quantities.parse_resources)]


class OptionGroup(BaseModel):
    """Options that belong together. The docstring of a group is its title in the help, that of a field its description."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)


def fields_of(group: type[BaseModel]) -> dict[str, Any]:
    """The fields that a group declares itself, by name, in order."""
    return {name: field for name, field in group.model_fields.items() if name in group.__annotations__}


class ModelOptions(OptionGroup):
    """Model"""

    model_zoo: str = "."
    """folder that holds the model-zoo modules"""
    model_def: str = ""
    """module below --model_zoo, as in digits.cnn_torch, optionally with the function that makes the model (custom_model)"""
    model_params: str = ""
    """arguments of the function that makes the model, as in "units=64; activation='relu'\""""
    loss: str = "loss"
    """name of the module's loss(labels, predictions)"""
    optimizer: str = "optimizer"
    """name of the module's optimizer(parameters)"""
    dataset: str = "dataset"
    """name of the module's dataset(mode, path)"""
    feed: str = "feed"
    """name of the module's feed(dataset, mode, metadata) over the records of files, or of its older form dataset_fn, instead of dataset(mode, path)"""
    custom_data_reader: str = "custom_data_reader"
    """name of the module's custom_data_reader(data_origin, ...), if feed takes its records from one"""
    eval_metrics_fn: str = "eval_metrics_fn"
    """name of the module's eval_metrics_fn(), if it has one"""
    callbacks: str = "callbacks"
    """name of the module's callbacks(), if it has one"""
    prediction_outputs_processor: str = "PredictionOutputsProcessor"
    """name of the module's class whose process(predictions, worker_id) is given each batch of predictions, if it has one"""


class DataOptions(OptionGroup):
    """Data"""

    training_data: str = ""
    """path given to dataset('training', path); for feed: files"""
    validation_data: str = ""
    """path given to dataset('evaluation', path); for feed: files"""
    prediction_data: str = ""
    """path given to dataset('prediction', path); for feed: files"""
    data_reader_params: str = ""
    """how feed's files are read, as in "columns=['age', 'income']; sep=';'", or arguments of custom_data_reader"""
    num_epochs: int = Field(1, ge=1)
    """passes over the training data"""
    max_step: int = Field(0, ge=0)
    """stop after this many steps; 0: at the end of the last epoch"""
    seed: int = Field(0, ge=0)
    """of the sample order, the initial weights and every random draw in training"""
    shuffle: bool = True
    """a new order of samples each epoch"""
    data_workers: int = Field(0, ge=0)
    """processes per worker that load samples ahead; 0: load in the worker itself"""


class BatchOptions(OptionGroup):
    """Batch size and learning rate"""

    global_batch_size: int | None = Field(None, ge=1)
    """samples per step over all workers, whatever their number; the learning rate is left alone"""
    minibatch_size: int | None = Field(None, ge=1)
    """samples per step and worker, so the global batch grows with the workers; without training those that a worker runs through the model at once; 64 if not given"""
    num_minibatches_per_task: int = Field(16, ge=1)
    """minibatches in a part: each step gives each worker one part, which is made again if the worker is killed meanwhile"""
    max_worker_batch_size: int | None = Field(None, ge=1)
    """most samples that a worker runs through the model at once; more are accumulated"""
    learning_rate_scaling: Literal["none", "linear", "sqrt"] = "none"
    """with --minibatch_size: multiply the learning rate by the number of workers, or by its square root"""
    learning_rate_ramp_steps: int = Field(0, ge=0)
    """steps over which the learning rate moves to its new value after a change of workers"""

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

    evaluation_steps: int = Field(0, ge=0)
    """also evaluate each so many steps; 0: at the end of each epoch only"""


class ResumeOptions(OptionGroup):
    """Checkpoints"""

    checkpoint_dir: str = ""
    """folder or fsspec URL for a module's checkpoints, and for what is kept of a training that is stopped; if not given, that is in the job's own folder"""
    resume: bool = True
    """continue from the newest checkpoint in --checkpoint_dir if there is one, or from what a job of this name was stopped with"""
    checkpoint_step: int = Field(0, ge=0)
    """use the checkpoint of this step; 0: the newest in --checkpoint_dir that can be read"""


class CheckpointOptions(OptionGroup):
    """Checkpoints"""

    checkpoint_steps: int = Field(0, ge=0)
    """write one each so many steps; 0: at the end of each epoch"""
    keep_checkpoint_max: int = Field(3, ge=0)
    """checkpoints to keep; 0: all"""


class OutputOptions(OptionGroup):
    """Output"""

    output: str = ""
    """folder for summary.json and, of a module, the final model; without training the file of the metrics, or that of the predictions, .npz or .parquet"""
    tensorboard_log_dir: str = ""
    """folder for TensorBoard scalars"""
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """least severe messages in the logs"""
    log_loss_steps: int = Field(100, ge=1)
    """steps between two lines of progress when the output is not a terminal"""
    log_ranks: YamlText = Field("0", pattern=r"^(all|none|[0-9]{1,5}(,[0-9]{1,5})*)$")
    """ranks whose prints are shown, as in 0,1; all: of all workers; none. Of more than one each line has its worker before it"""
    sample_record: str = ""
    """folder where each worker records the indices of the samples it consumes"""

    @model_validator(mode="after")
    def _local(self) -> Self:
        for name in ("output", "tensorboard_log_dir", "sample_record"):
            value = getattr(self, name)
            if "://" in value and not (name == "output" and getattr(self, "task", TRAIN) != TRAIN):
                raise ValueError(f"--{name} {value} is a URL; it must be a local folder (--checkpoint_dir takes URLs)")
        return self


class JobOptions(OptionGroup):
    """Job and workers"""

    job_name: str = Field("", pattern=r"^([a-z0-9]([-a-z0-9]{0,51}[a-z0-9])?)?$")
    """name of the job: up to 53 lower-case letters, digits and dashes; made up if not given"""
    num_workers: Workers = WorkerRange(minimum=1, maximum=1)
    """number of workers, or MIN-MAX to grow and shrink within; with fewer than the number, or than MIN, the job waits"""
    scale_policy: Literal["all", "efficiency"] = "all"
    """how many of --num_workers to have; all: every free slot; efficiency: as many as keep --min_efficiency"""
    min_efficiency: float = Field(0.6, gt=0, le=1)
    """with --scale_policy efficiency: minimum speedup per worker"""
    collective: Literal["auto", "horovod", "torch"] = "auto"
    """library that sums gradients over workers: Horovod or torch.distributed; auto: Horovod where it can be imported"""
    check_state: YamlText = Field("epoch", pattern="^(off|epoch|repair|[1-9][0-9]*)$")
    """how often to compare what workers hold: epoch (and in each new world), each so many steps, or off; repair: as epoch, and what differs becomes rank 0's"""
    slots: int = Field(0, ge=0)
    """workers that this machine can hold at once; 0: one per GPU, or as many as asked for on a machine without GPUs"""
    processes_per_worker: int = Field(1, ge=1, le=64)
    """processes of each worker, which share one model among themselves, each with a GPU of its own where there are GPUs; for `elasticdl run` of PyTorch's FSDP2 or tensor parallelism"""
    start_method: Literal["fork", "spawn"] = "fork"
    """how workers of this machine start: forked from a process that has imported the framework already, where that is safe, or anew"""
    port: int = Field(0, ge=0, le=65535)
    """port of the master; 0: any free one"""


class TimingOptions(OptionGroup):
    """Timing, in seconds"""

    join_window: float = Field(0.3, ge=0)
    """wait this long for further newcomers before the world changes; longer with more than 1,000 members"""
    start_timeout: float = Field(600.0, gt=0)
    """a worker that is not ready this long after its start is given up and replaced"""
    heartbeat_timeout: float = Field(10.0, gt=0)
    """a worker silent for this long is taken to be frozen or cut off, and replaced"""
    progress_timeout: Annotated[float, Field(gt=0)] | Literal["auto"] = Field(AUTO, union_mode="left_to_right")
    """a worker that makes no progress for this long is taken to be stuck, and replaced; auto: 300, and longer for one that does something"""
    replace_slow: bool = False
    """a worker that has been slower than the others for a while, and holds them up, is replaced"""
    stop_grace: float = Field(30.0, gt=0)
    """time for workers to leave by themselves, and write a last checkpoint, before they are killed"""


class KubernetesOptions(OptionGroup):
    """Kubernetes"""

    # What the values mean is in `elasticdl.job.quantities`.

    image: str = Field("", pattern=r"^\S*$")
    """container image of the job, as in registry.example.com/team/job:1, which makes it run on a Kubernetes cluster instead of this machine"""
    namespace: str = Field("", pattern=r"^([a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?)?$")
    """namespace of the job, as in team-a; if not given, that of the kubeconfig context"""
    kube_context: str = ""
    """context of the kubeconfig; if not given, the current one"""
    master_resource_request: Resources = "cpu=0.1,memory=1024Mi"
    """what the master is promised, as in cpu=0.5,memory=2Gi"""
    master_resource_limit: Resources = ""
    """the most that the master may use, in the same form"""
    worker_resource_request: Resources = "cpu=1,memory=4096Mi"
    """what each worker is promised, as in cpu=4,memory=8Gi,gpu=1; gpu stands for nvidia.com/gpu"""
    worker_resource_limit: Resources = ""
    """the most that a worker may use, in the same form"""
    master_pod_priority: str = ""
    """PriorityClass of the master"""
    worker_pod_priority: Annotated[str, _kept(quantities.parse_priority)] = ""
    """PriorityClass of the workers; CLASS=0.5: of half of the maximum of workers; 0.5 alone: of the class high"""
    volume: Annotated[str, _kept(quantities.parse_volumes)] = ""
    """volumes of every pod, as in claim_name=data,mount_path=/data or host_path=/scratch,mount_path=/scratch, with sub_path, type, read_only=true if you like and ; between two"""
    envs: Annotated[str, _kept(quantities.parse_envs)] = ""
    """environment variables of every pod, as in NAME=VALUE,OTHER=VALUE; kept in a Secret of the job's"""
    env_from_secret: Annotated[str, _kept(quantities.parse_secret_envs)] = ""
    """environment variables of every pod from Secrets of the namespace: NAME=SECRET/KEY for one, SECRET for all of its keys, and , between two"""
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = None
    """when nodes pull the image; if not given, always for the tag latest, else if not present"""
    image_timeout: float = Field(300.0, gt=0)
    """the job is given up when the master, or no worker ever, could pull the image for so many seconds"""
    node_timeout: int = Field(10, ge=0)
    """a pod on a node that is not ready or does not answer is given up so many seconds after the cluster has noticed"""
    recovery_timeout: float = Field(60.0, gt=0)
    """a master that was started again waits so many seconds for the workers to come back, and replaces those who have not"""
    ttl: int = Field(7 * 24 * 3600, ge=0)
    """all of the job is deleted so many seconds after its end; 0: it stays until `elasticdl delete`, as does a job whose master never has a place"""
    pod_template: str = ""
    """YAML file with parts of a pod that are merged into every pod of the job: node selector, tolerations, affinity, scheduler, image pull secrets ...; a service account is the workers'"""
    master_pod_template: str = ""
    """the same for the master's pod alone, after --pod_template"""
    worker_pod_template: str = ""
    """the same for the workers' pods alone, after --pod_template"""
    service_account: str = ""
    """existing service account of the master; if not given, one is made that can do no more than needed"""
    gang: bool = False
    """train with all workers or none; --num_workers must be one number then"""
    queue: Annotated[str, _kept(quantities.parse_queue)] = ""
    """queue in which the workers wait for their places: kueue=QUEUE or volcano=QUEUE"""
    elastic: bool = False
    """label the pods `elastic: "true"`, as Run:AI does"""


class SlurmOptions(OptionGroup):
    """Slurm"""

    launcher: Literal["slurm"] | None = None
    """slurm: the master and each worker are batch jobs of a Slurm cluster; if not given, processes of this machine, or with --image pods"""
    slurm_args: Words = ""
    """arguments of sbatch for each worker, as in '--partition=gpu --gpus=1 --time=4:00:00'"""
    slurm_master_args: Words = ""
    """arguments of sbatch for the master, which needs one processor and no GPU"""


class JobSpec(
    JobOptions,
    ModelOptions,
    DataOptions,
    BatchOptions,
    EvaluationOptions,
    ResumeOptions,
    CheckpointOptions,
    OutputOptions,
    TimingOptions,
    KubernetesOptions,
    SlurmOptions,
):
    """All options of one job, checked, immutable, and the same on the command line, in YAML and in JSON."""

    command: tuple[str, ...] = ()
    """the user's own program, for `elasticdl run`"""
    task: Literal["train", "evaluate", "predict"] = "train"
    """what a module's model is for"""

    @model_validator(mode="after")
    def _has_what_its_task_needs(self) -> Self:
        if self.task != TRAIN and not self.checkpoint_dir:
            raise ValueError("--checkpoint_dir is missing: name the folder with the checkpoints of the trained model")
        if self.task == PREDICT and self.output and not self.output.endswith(PREDICTION_SUFFIXES):
            raise ValueError(f"--output {self.output}: must be a file that ends in {' or '.join(PREDICTION_SUFFIXES)}")
        return self

    @property
    def parts(self) -> str:
        """Folder of what the parts of an evaluation or a prediction give, until all is put together; empty if it makes none."""
        if self.task == TRAIN or (self.task == PREDICT and not self.output):
            return ""
        folder, slash, name = (self.output or f"{self.checkpoint_dir.rstrip('/')}/evaluation").rpartition("/")
        return f"{folder}{slash}.{name}.{self.job_name}.parts"

    @model_validator(mode="after")
    def _each_where_it_belongs(self) -> Self:
        if self.launcher and self.image:
            raise ValueError("--launcher slurm runs no images, and --image is for Kubernetes: leave one out")
        for is_there, owner, names in (
            (self.image, "a job on a Kubernetes cluster: give --image", fields_of(KubernetesOptions)),
            (self.launcher, "--launcher slurm: give that", fields_of(SlurmOptions)),
            (self.scale_policy != "all", "--scale_policy efficiency: give that", ("min_efficiency",)),
        ):
            for name in names if not is_there else ():
                if getattr(self, name) != JobSpec.model_fields[name].default:
                    raise ValueError(f"--{name} is for {owner} as well, or leave it out")
        return self

    @model_validator(mode="after")
    def _has_processes_that_share(self) -> Self:
        count = self.processes_per_worker
        if count == 1:
            return self
        if not self.command:
            raise ValueError(
                f"--processes_per_worker {count}: a module's model is whole in each process; give `elasticdl run` a script that shards its model"
            )
        if self.collective == "horovod":
            raise ValueError(
                f"--processes_per_worker {count}: only torch.distributed sums shards: leave --collective out"
            )
        for name in ("worker_resource_request", "worker_resource_limit"):
            gpus = quantities.gpus_of(getattr(self, name)) if self.image else ""
            if gpus not in ("", "0", str(count)):
                raise ValueError(
                    f"--{name} has {gpus} GPUs for {count} processes: give gpu={count}, or the option {gpus}"
                )
        return self

    @model_validator(mode="after")
    def _fits_a_cluster(self) -> Self:
        if why := self.why_not_scaled_to(self.num_workers):
            raise ValueError(f"--num_workers {self.num_workers}: {why}")
        if self.image and self.job_name[:1].isdigit():
            raise ValueError(f"--job_name {self.job_name}: must begin with a letter for a job on a Kubernetes cluster")
        return self

    def why_not_scaled_to(self, workers: WorkerRange) -> str:
        """Why this job, once submitted, may not have so many workers, in one line; empty if it may."""
        if self.gang and self.queue and workers != self.num_workers:
            # Kueue deletes pods beyond the size that a group was made with, and holds back a group that lacks some.
            return (
                f"the gang in --queue {self.queue} was submitted with {self.num_workers} workers, which can't be changed: "
                "submit another job"
            )
        if self.gang and workers.minimum != workers.maximum:
            return f"--gang trains with all workers or none: give one number of workers, not {workers}"
        return ""

    def shown_ranks(self) -> tuple[int, ...] | None:
        """The ranks that --log_ranks names, each once; None for all."""
        if self.log_ranks == RANKS_ALL:
            return None
        return () if self.log_ranks == RANKS_NONE else tuple(dict.fromkeys(map(int, self.log_ranks.split(","))))

    @classmethod
    def from_json(cls, text: str) -> JobSpec:
        return cls.model_validate_json(text)

    def to_json(self) -> str:
        """
        Raises:
            UserError: a path or an argument is no text, as a file's name may be.
        """
        try:
            return self.model_dump_json(indent=1)
        except PydanticSerializationError as error:
            raise UserError(
                "an option or an argument of the program is not UTF-8: rename that file or folder"
            ) from error


OPTION_GROUPS: tuple[type[OptionGroup], ...] = JobSpec.__bases__  # in the order of the help

# Options that not all tasks of a module have.
_OF_TASKS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("training_data", "num_epochs", "max_step", "seed", "shuffle"), (TRAIN,)),
    **dict.fromkeys(set(fields_of(BatchOptions)) - {"minibatch_size", "num_minibatches_per_task"}, (TRAIN,)),
    **dict.fromkeys((*fields_of(EvaluationOptions), *fields_of(CheckpointOptions), "callbacks"), (TRAIN,)),
    **dict.fromkeys(("validation_data", "eval_metrics_fn"), (TRAIN, EVALUATE)),
    **dict.fromkeys(("prediction_data", "prediction_outputs_processor"), (PREDICT,)),
    **dict.fromkeys(("num_minibatches_per_task", "checkpoint_step"), (EVALUATE, PREDICT)),
}


def options_of(group: type[BaseModel], task: str) -> dict[str, Any]:
    """The fields of a group that are options of this task; of a script of the user's own, as of training."""
    return {name: field for name, field in fields_of(group).items() if task in _OF_TASKS.get(name, (task,))}
