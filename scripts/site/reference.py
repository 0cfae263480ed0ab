"""The pages of the site that are made from the program itself: commands, environment, errors, events, states and calls."""

from __future__ import annotations

import html
import inspect
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from types import ModuleType

import click

from elasticdl.cli.__main__ import COMMANDS
from elasticdl.cli.__main__ import __doc__ as about_the_command_line
from elasticdl.cli.commands.start import run, train
from elasticdl.cli.parsing import Commands, Option
from elasticdl.common import errors as common_errors
from elasticdl.elastic.core import protocol
from elasticdl.elastic.core import worker as worker_side
from elasticdl.job import journal
from elasticdl.job.spec import JobSpec, KubernetesOptions, SlurmOptions
from elasticdl.master.core import events as master_events
from elasticdl.master.core.transitions import ROWS
from elasticdl.master.core.values import Phase, WorkerState
from elasticdl.master.shell.calls import ALLOWED
from scripts.draw_states import draw_worker_core, draw_workers

ROOT = Path(__file__).resolve().parents[2]
LAUNCHERS = {
    KubernetesOptions.__doc__: "Jobs on a Kubernetes cluster only: with `--image`.",
    "Submission to Kubernetes": "With `--image`; `--detach` with `--launcher slurm` as well.",
    SlurmOptions.__doc__: "Jobs on a Slurm cluster only: with `--launcher slurm`.",
}
# Which launchers look at an option that stands among those of all jobs.
ON_THIS_MACHINE = ("slots", "start_method", "port")

ENVIRONMENT = {
    "You set these": {
        "ELASTICDL_HOME": "folder that holds `jobs/`, in which each job has its own; without it `~/.local/state/elasticdl`",
    },
    "A launcher sets these for a worker": {
        "ELASTICDL_MASTER": "`host:port` of the master; without it a script runs alone",
        "ELASTICDL_TOKEN": "the job's token",
        "ELASTICDL_TLS": "folder of the worker's certificate, instead of a token",
        "ELASTICDL_WORKER_ID": "the worker's number",
        "ELASTICDL_JOB_SPEC": "file of the job's specification, JSON",
        "ELASTICDL_HOST": "address by which other workers reach this one",
        "ELASTICDL_MASTER_TIMEOUT": "seconds that a worker or an agent goes on without a master, one that is starting included, before it gives up",
        "ELASTICDL_SHARED_GPU": "several workers have one GPU, so gradients are summed through the host",
        "ELASTICDL_STACKS": "file that takes the stacks of a worker in which no Python code can run",
        "ELASTICDL_CONNECTED": "set by the process that holds the worker's session, for those that it starts: they are no workers",
        "ELASTICDL_PROCESS": "number of this process, in a worker of several",
        "ELASTICDL_PROCESSES": "how many there are, and the file by which they find each other",
        "ELASTICDL_SEEDED": "the worker's random generators are seeded; the processes that it starts draw what they like",
        "ELASTICDL_TEMPLATE": "this process is the one that workers are forked from",
    },
    "A launcher sets these for an agent, or for a master in a pod": {
        "ELASTICDL_PLACE": "id of the place that an agent is in",
        "ELASTICDL_NODE": "node that the place is on",
        "ELASTICDL_LOGS": "folder for the logs of an agent's workers",
        "ELASTICDL_NAMESPACE": "namespace of the master's pod",
        "ELASTICDL_POD_UID": "UID of the master's pod",
    },
}


def pages() -> dict[str, str]:
    """By their paths in the site."""
    made: Mapping[str, Callable[[], Iterable[str]]] = {
        "commands": commands,
        "environment": environment,
        "errors": errors,
        "events": events,
        "states": states,
        "calls": calls,
    }
    return {f"reference/{name}.md": "\n".join(lines()) + "\n" for name, lines in made.items()}


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    cells = [[str(cell).replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows]
    return ["", *(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *cells)), ""]


# ---- commands ----


def commands() -> Iterator[str]:
    yield "---\nsearch: {boost: 3}\n---\n"  # who looks for an option finds it here first
    yield "# Commands and options"
    yield ""
    yield "What each command takes, as `--help` shows it. How it goes on with a job: [the command line](../cli.md)."
    context = click.Context(COMMANDS, info_name="elasticdl")
    for name in COMMANDS.list_commands(context):
        found = COMMANDS.get_command(context, name)
        if found is train:
            yield from _start_commands(context)
        elif isinstance(found, Commands):
            inner = click.Context(found, parent=context, info_name=name)
            for each in found.list_commands(inner):
                yield from _command(found.get_command(inner, each), inner, f"{name} {each}")
        elif found is not run:
            yield from _command(found, context, name)


def _command(command: click.Command, parent: click.Context, name: str) -> Iterator[str]:
    context = click.Context(command, parent=parent, info_name=name.split()[-1])
    yield f"## elasticdl {name} {{ #{name.replace(' ', '-')} }}"
    yield ""
    yield f"    {context.command_path} {' '.join(command.collect_usage_pieces(context))}"
    yield ""
    yield _markdown(command.help)
    arguments = [each for each in command.params if isinstance(each, click.Argument)]
    if arguments:
        yield from table(["argument", ""], ((_code(each.metavar), _markdown(each.help)) for each in arguments))
    options = [each for each in command.params if isinstance(each, Option)]
    if options:
        yield from table(["option", "value", "", "default"], map(_option, options))


def _start_commands(parent: click.Context) -> Iterator[str]:
    """`train` and `run` have most options in common."""
    for command in (train, run):
        context = click.Context(command, parent=parent, info_name=command.name)
        usage = f"{context.command_path} {' '.join(command.collect_usage_pieces(context))}"
        yield from (
            f"## elasticdl {command.name} {{ #{command.name} }}",
            "",
            f"    {usage}",
            "",
            _markdown(command.help),
            "",
        )
    yield "## Options of `train` and `run` { #options }"
    yield ""
    yield "A file for `--config` has the same names without the dashes. Where the last column says no, a script decides itself."
    sections: dict[str, list[Option]] = {}
    for each in train.params:
        if isinstance(each, Option):
            sections.setdefault(each.section, []).append(each)
    in_run = set(run.flags())
    for title, options in sections.items():
        yield f"### {title}"
        yield ""
        yield LAUNCHERS.get(title, "")
        rows = [(*_option(each), "yes" if each.opts[0] in in_run else "no") for each in options]
        yield from table(["option", "value", "", "default", "`run`"], rows)


def _option(option: Option) -> tuple[str, str, str, str]:
    """Its flags, its value, what it means, its default."""
    text, default = option.help or "", option.default
    if option.name in JobSpec.model_fields:
        field = JobSpec.model_fields[option.name]
        text, default = field.description or "", field.default
        default = ("yes" if default else "no") if field.annotation is bool else default
    if option.name in ON_THIS_MACHINE:
        text += " (this machine only)" if "this machine" not in text else ""
    value = "" if option.is_flag else option.make_metavar(click.Context(train))
    is_set = (
        default is not None
        and default != ""
        and not isinstance(default, bool)
        and "Sentinel" not in type(default).__name__
    )
    return (
        "<br>".join(map(_code, option.flags())),
        _code(value) if value else "",
        _markdown(text),
        _code(default) if is_set else "",
    )


def _code(text: object) -> str:
    """A table's cell ends at a bar, and in Markdown's code it can't be written otherwise."""
    bar = html.escape(str(text), quote=False).replace("|", "&#124;")
    return f"<code>{bar}</code>" if "|" in str(text) else f"`{text}`"


def _markdown(text: object) -> str:
    """Options within a sentence are code, and so is an example at the end."""
    said, _, example = str(text or "").partition(" As in: ")
    said = re.sub(r"(?<![\w`'-])(--[a-z_]+)", r"`\1`", re.sub(r"([*<>])", r"\\\1", said))
    return f"{said} As in:\n\n    {example}\n" if example else said


# ---- environment, errors ----


def environment() -> Iterator[str]:
    yield "# Environment variables"
    for title, variables in ENVIRONMENT.items():
        yield f"\n## {title}"
        yield from table(["variable", "meaning"], ((_code(name), text) for name, text in variables.items()))
    yield "No option of a command is taken from the environment. `HOROVOD_CYCLE_TIME`, `HOROVOD_FUSION_THRESHOLD` and"
    yield "`HOROVOD_AUTOTUNE` are refused: [what is checked before anything starts](../cli.md#what-is-checked-before-anything-starts)."


def errors() -> Iterator[str]:
    yield "# Errors and exit codes"
    yield ""
    yield "## Exit codes of commands"
    yield ""
    yield from re.findall(r"^\|.*$", inspect.cleandoc(about_the_command_line or ""), re.MULTILINE)
    yield ""
    yield "## Errors"
    yield ""
    yield "Each is one line that says what, where, and what would be right. Functions of the library name in their docstrings those that"
    yield "they raise."
    yield from _tree(common_errors)
    yield "## What changes the course of a training loop"
    yield ""
    yield "They pass through the function under `@elastic.run`, which must not keep them."
    yield from _tree(protocol)
    yield "## Why a worker has left"
    yield ""
    yield "The field `cause` of [`worker_left`](events.md#worker_left)."
    yield from table(["cause", "meaning"], _members(master_events.ExitCause))


def _tree(module: ModuleType) -> list[str]:
    defined = [each for each in vars(module).values() if inspect.isclass(each) and each.__module__ == module.__name__]
    every = [each for each in defined if issubclass(each, Exception)]
    rows = [(_code(each.__name__), _code(each.__bases__[0].__name__), inspect.getdoc(each)) for each in every]
    return table(["error", "is a", "meaning"], rows)


def _members(kind: type[Enum]) -> list[tuple[str, str]]:
    """Its values, and the comment at the end of the line of each."""
    source = inspect.getsource(kind)
    comments = dict(re.findall(r"^    ([A-Z_]+) = .*?(?:  # (.*))?$", source, re.MULTILINE))
    return [(_code(each.value), comments[each.name]) for each in kind]


# ---- events ----


def events() -> Iterator[str]:
    yield "# Events of the journal"
    yield ""
    yield "`elasticdl events JOB --json` prints the journal, one JSON object a line. Each has the fields `number`, which grows, `event`, its"
    yield f"kind, and `time`, in seconds since 1970. Format {journal.FORMAT}. An entry has those fields that are known."
    yield ""
    yield "The level is that of the line in the master's log. *Words* are what somebody who watches the job is told of it."
    for kind in journal.KINDS.values():
        yield f"## `{kind.name}` {{ #{kind.name} }}"
        yield ""
        told = [logging.getLevelName(kind.level)]
        told += ["also from a worker"] if kind.of_worker else []
        told += ["marked in the report"] if kind.marked else []
        told += ["TensorBoard"] if kind.scalars else []
        yield "; ".join(told) + "."
        if kind.said:
            yield f"\nWords: `{kind.said}`"
        yield from table(["field", "meaning"], ((_code(name), _markdown(text)) for name, text in kind.fields.items()))


# ---- states ----


def states() -> Iterator[str]:
    yield "# States"
    yield ""
    yield "The tables by which master and worker go; the pictures are drawn from them. A pair of a state and something that happens which is"
    yield "in no table changes nothing."
    yield "## A worker, as the master sees it { #worker }"
    yield from _diagram(draw_workers())
    yield from table(["state", "meaning"], _members(WorkerState))
    rows = []
    for before, trigger, after, actions in ROWS:
        done = "; ".join(map(_doing, actions))
        rows.append((", ".join(before), trigger.value, after or "", _markdown(done)))
    yield from table(["in", "what happens", "then", "what is done"], rows)
    yield "## A job { #job }"
    yield from table(["phase", "meaning"], _members(Phase))
    yield "## A worker, as it sees itself { #worker-itself }"
    yield from _diagram(draw_worker_core())
    yield from table(["state", "meaning"], _members(worker_side.WorkerState))
    every = ((state, trigger, then) for (state, trigger), (then, _) in worker_side.TABLE.items())
    yield from table(["in", "what happens", "then"], every)


def _doing(action: Callable[..., object]) -> str:
    """What a row's function does: in its own words, or by its name."""
    text = (
        (inspect.getdoc(action) or action.__name__.replace("note_", "write into the journal: ").replace("_", " "))
        .partition(".\n")[0]
        .rstrip(".")
    )
    return text[:1].lower() + text[1:]


def _diagram(source: str) -> list[str]:
    return ["", "```mermaid", source, "```", ""]


# ---- calls ----

COMMENT = r"((?:^ *//.*\n)*)"
RPC = re.compile(COMMENT + r"^  rpc (\w+)\((stream )?(\w+)\) returns \((stream )?(\w+)\);", re.MULTILINE)
MESSAGE = re.compile(COMMENT + r"^message (\w+) \{(\}|\n(?:.*\n)*?\})", re.MULTILINE)
FIELD = re.compile(COMMENT + r"^ +((?:repeated |optional )?[\w.]+(?:<.*?>)?) (\w+) = (\d+);", re.MULTILINE)


def calls() -> Iterator[str]:
    proto = (ROOT / "proto" / "elasticdl.proto").read_text()
    yield "# Calls of the master"
    yield ""
    yield "gRPC, over loopback with the job's token or over mutual TLS ([security](../security.md)). Made from `proto/elasticdl.proto`."
    yield ""
    yield "| call | request | reply | who may call |"
    yield "| --- | --- | --- | --- |"
    found = RPC.findall(proto)
    for _, name, streams, request, replies, reply in found:
        roles = ", ".join(sorted(ALLOWED[name]))
        yield f"| [`{name}`](#call-{name.lower()}) | {_message(streams, request)} | {_message(replies, reply)} | {roles} |"
    yield ""
    for comment, name, *_ in found:
        yield f"## {name} {{ #call-{name.lower()} }}"
        yield ""
        yield _sentence(comment) or f"See [`{name}Request`](#{name.lower()}request)."
        yield ""
    yield "## Messages"
    yield ""
    messages = MESSAGE.findall(proto)
    names = {name for _, name, _ in messages}
    for comment, name, body in messages:
        yield f"### {name} {{ #{name.lower()} }}"
        yield ""
        yield _sentence(comment)
        rows = []
        for about, kind, field, number in FIELD.findall(body):
            word = kind.split()[-1]
            shown = f"{kind.removesuffix(word)}[`{word}`](#{word.lower()})" if word in names else _code(kind)
            rows.append((number, _code(field), shown, _sentence(about)))
        if rows:
            yield from table(["number", "field", "type", "meaning"], rows)


def _message(streams: str, name: str) -> str:
    return f"{streams}[`{name}`](#{name.lower()})"


def _sentence(comment: str) -> str:
    """Of comment lines, without a title of a part of the file."""
    lines = [line.strip().removeprefix("//").strip() for line in comment.splitlines()]
    return _markdown(" ".join(line for line in lines if not line.startswith("----")))
