from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WorkerMessage(_message.Message):
    __slots__ = ("hello", "heartbeat", "ask", "draining", "kv_put", "progress", "finished", "failed", "notice", "number")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    ASK_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    KV_PUT_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    NOTICE_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    heartbeat: Heartbeat
    ask: Ask
    draining: Draining
    kv_put: KvPut
    progress: Progress
    finished: Finished
    failed: Failed
    notice: Notice
    number: int
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., ask: _Optional[_Union[Ask, _Mapping]] = ..., draining: _Optional[_Union[Draining, _Mapping]] = ..., kv_put: _Optional[_Union[KvPut, _Mapping]] = ..., progress: _Optional[_Union[Progress, _Mapping]] = ..., finished: _Optional[_Union[Finished, _Mapping]] = ..., failed: _Optional[_Union[Failed, _Mapping]] = ..., notice: _Optional[_Union[Notice, _Mapping]] = ..., number: _Optional[int] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("worker_id", "host", "pid", "world_version")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    WORLD_VERSION_FIELD_NUMBER: _ClassVar[int]
    worker_id: int
    host: str
    pid: int
    world_version: int
    def __init__(self, worker_id: _Optional[int] = ..., host: _Optional[str] = ..., pid: _Optional[int] = ..., world_version: _Optional[int] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("world_version", "step", "progress", "waiting", "times", "ending")
    WORLD_VERSION_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    TIMES_FIELD_NUMBER: _ClassVar[int]
    ENDING_FIELD_NUMBER: _ClassVar[int]
    world_version: int
    step: int
    progress: int
    waiting: bool
    times: StepTimes
    ending: bool
    def __init__(self, world_version: _Optional[int] = ..., step: _Optional[int] = ..., progress: _Optional[int] = ..., waiting: _Optional[bool] = ..., times: _Optional[_Union[StepTimes, _Mapping]] = ..., ending: _Optional[bool] = ...) -> None: ...

class StepTimes(_message.Message):
    __slots__ = ("steps", "data", "compute", "wait", "update", "samples")
    STEPS_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_FIELD_NUMBER: _ClassVar[int]
    WAIT_FIELD_NUMBER: _ClassVar[int]
    UPDATE_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    steps: int
    data: float
    compute: float
    wait: float
    update: float
    samples: float
    def __init__(self, steps: _Optional[int] = ..., data: _Optional[float] = ..., compute: _Optional[float] = ..., wait: _Optional[float] = ..., update: _Optional[float] = ..., samples: _Optional[float] = ...) -> None: ...

class Ask(_message.Message):
    __slots__ = ("left_world", "step", "has_state", "broken", "reason", "epoch", "synced_in")
    LEFT_WORLD_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    HAS_STATE_FIELD_NUMBER: _ClassVar[int]
    BROKEN_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SYNCED_IN_FIELD_NUMBER: _ClassVar[int]
    left_world: int
    step: int
    has_state: bool
    broken: bool
    reason: str
    epoch: int
    synced_in: int
    def __init__(self, left_world: _Optional[int] = ..., step: _Optional[int] = ..., has_state: _Optional[bool] = ..., broken: _Optional[bool] = ..., reason: _Optional[str] = ..., epoch: _Optional[int] = ..., synced_in: _Optional[int] = ...) -> None: ...

class Draining(_message.Message):
    __slots__ = ("reason", "lingers")
    REASON_FIELD_NUMBER: _ClassVar[int]
    LINGERS_FIELD_NUMBER: _ClassVar[int]
    reason: str
    lingers: bool
    def __init__(self, reason: _Optional[str] = ..., lingers: _Optional[bool] = ...) -> None: ...

class KvPut(_message.Message):
    __slots__ = ("world_version", "scope", "key", "value")
    WORLD_VERSION_FIELD_NUMBER: _ClassVar[int]
    SCOPE_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    world_version: int
    scope: str
    key: str
    value: bytes
    def __init__(self, world_version: _Optional[int] = ..., scope: _Optional[str] = ..., key: _Optional[str] = ..., value: _Optional[bytes] = ...) -> None: ...

class Progress(_message.Message):
    __slots__ = ("steps", "total_steps", "total_epochs")
    STEPS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_STEPS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_EPOCHS_FIELD_NUMBER: _ClassVar[int]
    steps: _containers.RepeatedCompositeFieldContainer[StepReport]
    total_steps: int
    total_epochs: int
    def __init__(self, steps: _Optional[_Iterable[_Union[StepReport, _Mapping]]] = ..., total_steps: _Optional[int] = ..., total_epochs: _Optional[int] = ...) -> None: ...

class StepReport(_message.Message):
    __slots__ = ("step", "epoch", "loss", "samples", "learning_rate", "seconds", "world_version", "total_samples", "ends_epoch", "compared")
    STEP_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    LEARNING_RATE_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    WORLD_VERSION_FIELD_NUMBER: _ClassVar[int]
    TOTAL_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    ENDS_EPOCH_FIELD_NUMBER: _ClassVar[int]
    COMPARED_FIELD_NUMBER: _ClassVar[int]
    step: int
    epoch: int
    loss: float
    samples: int
    learning_rate: float
    seconds: float
    world_version: int
    total_samples: int
    ends_epoch: bool
    compared: int
    def __init__(self, step: _Optional[int] = ..., epoch: _Optional[int] = ..., loss: _Optional[float] = ..., samples: _Optional[int] = ..., learning_rate: _Optional[float] = ..., seconds: _Optional[float] = ..., world_version: _Optional[int] = ..., total_samples: _Optional[int] = ..., ends_epoch: _Optional[bool] = ..., compared: _Optional[int] = ...) -> None: ...

class Finished(_message.Message):
    __slots__ = ("step", "epochs", "metrics", "together")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    STEP_FIELD_NUMBER: _ClassVar[int]
    EPOCHS_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    TOGETHER_FIELD_NUMBER: _ClassVar[int]
    step: int
    epochs: int
    metrics: _containers.ScalarMap[str, float]
    together: bool
    def __init__(self, step: _Optional[int] = ..., epochs: _Optional[int] = ..., metrics: _Optional[_Mapping[str, float]] = ..., together: _Optional[bool] = ...) -> None: ...

class Failed(_message.Message):
    __slots__ = ("message", "traceback", "trained", "users")
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    TRACEBACK_FIELD_NUMBER: _ClassVar[int]
    TRAINED_FIELD_NUMBER: _ClassVar[int]
    USERS_FIELD_NUMBER: _ClassVar[int]
    message: str
    traceback: str
    trained: bool
    users: bool
    def __init__(self, message: _Optional[str] = ..., traceback: _Optional[str] = ..., trained: _Optional[bool] = ..., users: _Optional[bool] = ...) -> None: ...

class Notice(_message.Message):
    __slots__ = ("event", "fields_json")
    EVENT_FIELD_NUMBER: _ClassVar[int]
    FIELDS_JSON_FIELD_NUMBER: _ClassVar[int]
    event: str
    fields_json: str
    def __init__(self, event: _Optional[str] = ..., fields_json: _Optional[str] = ...) -> None: ...

class MasterMessage(_message.Message):
    __slots__ = ("welcome", "change", "broken", "world", "kv_entry", "drain", "stop_work", "dump_stacks", "last_word_taken", "saved")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    CHANGE_FIELD_NUMBER: _ClassVar[int]
    BROKEN_FIELD_NUMBER: _ClassVar[int]
    WORLD_FIELD_NUMBER: _ClassVar[int]
    KV_ENTRY_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    STOP_WORK_FIELD_NUMBER: _ClassVar[int]
    DUMP_STACKS_FIELD_NUMBER: _ClassVar[int]
    LAST_WORD_TAKEN_FIELD_NUMBER: _ClassVar[int]
    SAVED_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    change: Change
    broken: Broken
    world: World
    kv_entry: KvEntry
    drain: Drain
    stop_work: StopWork
    dump_stacks: DumpStacks
    last_word_taken: LastWordTaken
    saved: Saved
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., change: _Optional[_Union[Change, _Mapping]] = ..., broken: _Optional[_Union[Broken, _Mapping]] = ..., world: _Optional[_Union[World, _Mapping]] = ..., kv_entry: _Optional[_Union[KvEntry, _Mapping]] = ..., drain: _Optional[_Union[Drain, _Mapping]] = ..., stop_work: _Optional[_Union[StopWork, _Mapping]] = ..., dump_stacks: _Optional[_Union[DumpStacks, _Mapping]] = ..., last_word_taken: _Optional[_Union[LastWordTaken, _Mapping]] = ..., saved: _Optional[_Union[Saved, _Mapping]] = ...) -> None: ...

class Saved(_message.Message):
    __slots__ = ("number",)
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    number: int
    def __init__(self, number: _Optional[int] = ...) -> None: ...

class LastWordTaken(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("job_name", "heartbeat_interval", "generation", "epoch", "epoch_steps", "facts")
    JOB_NAME_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_INTERVAL_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    EPOCH_STEPS_FIELD_NUMBER: _ClassVar[int]
    FACTS_FIELD_NUMBER: _ClassVar[int]
    job_name: str
    heartbeat_interval: float
    generation: int
    epoch: int
    epoch_steps: int
    facts: bytes
    def __init__(self, job_name: _Optional[str] = ..., heartbeat_interval: _Optional[float] = ..., generation: _Optional[int] = ..., epoch: _Optional[int] = ..., epoch_steps: _Optional[int] = ..., facts: _Optional[bytes] = ...) -> None: ...

class Change(_message.Message):
    __slots__ = ("world_version", "reason")
    WORLD_VERSION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    world_version: int
    reason: str
    def __init__(self, world_version: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class Broken(_message.Message):
    __slots__ = ("world_version", "reason")
    WORLD_VERSION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    world_version: int
    reason: str
    def __init__(self, world_version: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class World(_message.Message):
    __slots__ = ("version", "reason", "size", "rank", "standing", "root", "own")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    STANDING_FIELD_NUMBER: _ClassVar[int]
    ROOT_FIELD_NUMBER: _ClassVar[int]
    OWN_FIELD_NUMBER: _ClassVar[int]
    version: int
    reason: str
    size: int
    rank: int
    standing: int
    root: Member
    own: Member
    def __init__(self, version: _Optional[int] = ..., reason: _Optional[str] = ..., size: _Optional[int] = ..., rank: _Optional[int] = ..., standing: _Optional[int] = ..., root: _Optional[_Union[Member, _Mapping]] = ..., own: _Optional[_Union[Member, _Mapping]] = ...) -> None: ...

class Member(_message.Message):
    __slots__ = ("worker_id", "host", "step", "has_state", "epoch", "synced_in")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    HAS_STATE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SYNCED_IN_FIELD_NUMBER: _ClassVar[int]
    worker_id: int
    host: str
    step: int
    has_state: bool
    epoch: int
    synced_in: int
    def __init__(self, worker_id: _Optional[int] = ..., host: _Optional[str] = ..., step: _Optional[int] = ..., has_state: _Optional[bool] = ..., epoch: _Optional[int] = ..., synced_in: _Optional[int] = ...) -> None: ...

class KvEntry(_message.Message):
    __slots__ = ("world_version", "scope", "key", "value")
    WORLD_VERSION_FIELD_NUMBER: _ClassVar[int]
    SCOPE_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    world_version: int
    scope: str
    key: str
    value: bytes
    def __init__(self, world_version: _Optional[int] = ..., scope: _Optional[str] = ..., key: _Optional[str] = ..., value: _Optional[bytes] = ...) -> None: ...

class Drain(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class StopWork(_message.Message):
    __slots__ = ("reason", "checkpoint")
    REASON_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    reason: str
    checkpoint: bool
    def __init__(self, reason: _Optional[str] = ..., checkpoint: _Optional[bool] = ...) -> None: ...

class DumpStacks(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AgentMessage(_message.Message):
    __slots__ = ("hello", "started", "ended", "looked", "leaving")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    LOOKED_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    hello: AgentHello
    started: Started
    ended: Ended
    looked: Looked
    leaving: Leaving
    def __init__(self, hello: _Optional[_Union[AgentHello, _Mapping]] = ..., started: _Optional[_Union[Started, _Mapping]] = ..., ended: _Optional[_Union[Ended, _Mapping]] = ..., looked: _Optional[_Union[Looked, _Mapping]] = ..., leaving: _Optional[_Union[Leaving, _Mapping]] = ...) -> None: ...

class AgentHello(_message.Message):
    __slots__ = ("place", "node", "host", "running", "untold", "leaving")
    PLACE_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    UNTOLD_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    place: str
    node: str
    host: str
    running: Started
    untold: _containers.RepeatedCompositeFieldContainer[Ended]
    leaving: str
    def __init__(self, place: _Optional[str] = ..., node: _Optional[str] = ..., host: _Optional[str] = ..., running: _Optional[_Union[Started, _Mapping]] = ..., untold: _Optional[_Iterable[_Union[Ended, _Mapping]]] = ..., leaving: _Optional[str] = ...) -> None: ...

class Started(_message.Message):
    __slots__ = ("worker_id", "pid")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    worker_id: int
    pid: int
    def __init__(self, worker_id: _Optional[int] = ..., pid: _Optional[int] = ...) -> None: ...

class Ended(_message.Message):
    __slots__ = ("worker_id", "code", "output", "problem", "out_of_memory")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    OUT_OF_MEMORY_FIELD_NUMBER: _ClassVar[int]
    worker_id: int
    code: int
    output: str
    problem: str
    out_of_memory: bool
    def __init__(self, worker_id: _Optional[int] = ..., code: _Optional[int] = ..., output: _Optional[str] = ..., problem: _Optional[str] = ..., out_of_memory: _Optional[bool] = ...) -> None: ...

class Looked(_message.Message):
    __slots__ = ("worker_id", "text", "state", "has_session")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    HAS_SESSION_FIELD_NUMBER: _ClassVar[int]
    worker_id: int
    text: str
    state: str
    has_session: bool
    def __init__(self, worker_id: _Optional[int] = ..., text: _Optional[str] = ..., state: _Optional[str] = ..., has_session: _Optional[bool] = ...) -> None: ...

class Leaving(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class AgentOrder(_message.Message):
    __slots__ = ("welcome", "start", "end", "end_taken", "read_stacks", "leave")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    END_TAKEN_FIELD_NUMBER: _ClassVar[int]
    READ_STACKS_FIELD_NUMBER: _ClassVar[int]
    LEAVE_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    start: Start
    end: End
    end_taken: EndTaken
    read_stacks: ReadStacks
    leave: Leave
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., start: _Optional[_Union[Start, _Mapping]] = ..., end: _Optional[_Union[End, _Mapping]] = ..., end_taken: _Optional[_Union[EndTaken, _Mapping]] = ..., read_stacks: _Optional[_Union[ReadStacks, _Mapping]] = ..., leave: _Optional[_Union[Leave, _Mapping]] = ...) -> None: ...

class Start(_message.Message):
    __slots__ = ("worker_id", "environment")
    class EnvironmentEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ENVIRONMENT_FIELD_NUMBER: _ClassVar[int]
    worker_id: int
    environment: _containers.ScalarMap[str, str]
    def __init__(self, worker_id: _Optional[int] = ..., environment: _Optional[_Mapping[str, str]] = ...) -> None: ...

class End(_message.Message):
    __slots__ = ("worker_id", "grace")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    GRACE_FIELD_NUMBER: _ClassVar[int]
    worker_id: int
    grace: float
    def __init__(self, worker_id: _Optional[int] = ..., grace: _Optional[float] = ...) -> None: ...

class EndTaken(_message.Message):
    __slots__ = ("worker_id",)
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    worker_id: int
    def __init__(self, worker_id: _Optional[int] = ...) -> None: ...

class ReadStacks(_message.Message):
    __slots__ = ("worker_id",)
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    worker_id: int
    def __init__(self, worker_id: _Optional[int] = ...) -> None: ...

class Leave(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WorkerStatus(_message.Message):
    __slots__ = ("worker_id", "state", "rank", "host", "pid", "reason", "remark")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    REMARK_FIELD_NUMBER: _ClassVar[int]
    worker_id: int
    state: str
    rank: int
    host: str
    pid: int
    reason: str
    remark: str
    def __init__(self, worker_id: _Optional[int] = ..., state: _Optional[str] = ..., rank: _Optional[int] = ..., host: _Optional[str] = ..., pid: _Optional[int] = ..., reason: _Optional[str] = ..., remark: _Optional[str] = ...) -> None: ...

class JobStatus(_message.Message):
    __slots__ = ("job_name", "phase", "reason", "traceback", "world_version", "workers", "last_change", "epoch", "total_epochs", "step", "total_steps", "loss", "samples_per_second", "time_left", "elapsed", "min_workers", "max_workers", "metrics", "samples", "collective", "advice", "decision", "compared_step", "compared_workers")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    JOB_NAME_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    TRACEBACK_FIELD_NUMBER: _ClassVar[int]
    WORLD_VERSION_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    LAST_CHANGE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    TOTAL_EPOCHS_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    TOTAL_STEPS_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    TIME_LEFT_FIELD_NUMBER: _ClassVar[int]
    ELAPSED_FIELD_NUMBER: _ClassVar[int]
    MIN_WORKERS_FIELD_NUMBER: _ClassVar[int]
    MAX_WORKERS_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    COLLECTIVE_FIELD_NUMBER: _ClassVar[int]
    ADVICE_FIELD_NUMBER: _ClassVar[int]
    DECISION_FIELD_NUMBER: _ClassVar[int]
    COMPARED_STEP_FIELD_NUMBER: _ClassVar[int]
    COMPARED_WORKERS_FIELD_NUMBER: _ClassVar[int]
    job_name: str
    phase: str
    reason: str
    traceback: str
    world_version: int
    workers: _containers.RepeatedCompositeFieldContainer[WorkerStatus]
    last_change: str
    epoch: int
    total_epochs: int
    step: int
    total_steps: int
    loss: float
    samples_per_second: float
    time_left: float
    elapsed: float
    min_workers: int
    max_workers: int
    metrics: _containers.ScalarMap[str, float]
    samples: int
    collective: str
    advice: str
    decision: str
    compared_step: int
    compared_workers: int
    def __init__(self, job_name: _Optional[str] = ..., phase: _Optional[str] = ..., reason: _Optional[str] = ..., traceback: _Optional[str] = ..., world_version: _Optional[int] = ..., workers: _Optional[_Iterable[_Union[WorkerStatus, _Mapping]]] = ..., last_change: _Optional[str] = ..., epoch: _Optional[int] = ..., total_epochs: _Optional[int] = ..., step: _Optional[int] = ..., total_steps: _Optional[int] = ..., loss: _Optional[float] = ..., samples_per_second: _Optional[float] = ..., time_left: _Optional[float] = ..., elapsed: _Optional[float] = ..., min_workers: _Optional[int] = ..., max_workers: _Optional[int] = ..., metrics: _Optional[_Mapping[str, float]] = ..., samples: _Optional[int] = ..., collective: _Optional[str] = ..., advice: _Optional[str] = ..., decision: _Optional[str] = ..., compared_step: _Optional[int] = ..., compared_workers: _Optional[int] = ...) -> None: ...

class EventsRequest(_message.Message):
    __slots__ = ("follow", "after")
    FOLLOW_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    follow: bool
    after: int
    def __init__(self, follow: _Optional[bool] = ..., after: _Optional[int] = ...) -> None: ...

class JournalEntry(_message.Message):
    __slots__ = ("json",)
    JSON_FIELD_NUMBER: _ClassVar[int]
    json: str
    def __init__(self, json: _Optional[str] = ...) -> None: ...

class ScaleRequest(_message.Message):
    __slots__ = ("min_workers", "max_workers")
    MIN_WORKERS_FIELD_NUMBER: _ClassVar[int]
    MAX_WORKERS_FIELD_NUMBER: _ClassVar[int]
    min_workers: int
    max_workers: int
    def __init__(self, min_workers: _Optional[int] = ..., max_workers: _Optional[int] = ...) -> None: ...

class ScaleReply(_message.Message):
    __slots__ = ("message",)
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    message: str
    def __init__(self, message: _Optional[str] = ...) -> None: ...

class StopRequest(_message.Message):
    __slots__ = ("checkpoint", "now", "reason")
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    NOW_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    checkpoint: bool
    now: bool
    reason: str
    def __init__(self, checkpoint: _Optional[bool] = ..., now: _Optional[bool] = ..., reason: _Optional[str] = ...) -> None: ...

class StopReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TensorBoardEvent(_message.Message):
    __slots__ = ("wall_time", "step", "file_version", "summary")
    WALL_TIME_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    FILE_VERSION_FIELD_NUMBER: _ClassVar[int]
    SUMMARY_FIELD_NUMBER: _ClassVar[int]
    wall_time: float
    step: int
    file_version: str
    summary: TensorBoardSummary
    def __init__(self, wall_time: _Optional[float] = ..., step: _Optional[int] = ..., file_version: _Optional[str] = ..., summary: _Optional[_Union[TensorBoardSummary, _Mapping]] = ...) -> None: ...

class TensorBoardSummary(_message.Message):
    __slots__ = ("value",)
    VALUE_FIELD_NUMBER: _ClassVar[int]
    value: _containers.RepeatedCompositeFieldContainer[TensorBoardValue]
    def __init__(self, value: _Optional[_Iterable[_Union[TensorBoardValue, _Mapping]]] = ...) -> None: ...

class TensorBoardValue(_message.Message):
    __slots__ = ("tag", "simple_value")
    TAG_FIELD_NUMBER: _ClassVar[int]
    SIMPLE_VALUE_FIELD_NUMBER: _ClassVar[int]
    tag: str
    simple_value: float
    def __init__(self, tag: _Optional[str] = ..., simple_value: _Optional[float] = ...) -> None: ...
