"""The site of docs/: that the reference has everything, and what is done to pages. `make docs` builds it, and checks all links."""

from __future__ import annotations

import ast
import re

import click
import pytest

from elasticdl.cli.__main__ import COMMANDS
from elasticdl.cli.parsing import Command
from elasticdl.job.event_catalogue import KINDS
from elasticdl.master.shell.access import ALLOWED
from elasticdl.master.state.events import ExitCause
from elasticdl.master.state.states import WorkerState
from elasticdl.proto import elasticdl_pb2 as pb
from scripts.site import library, pages, reference

ROOT = pages.ROOT


@pytest.fixture(scope="module")
def made():
    return {path.removeprefix("reference/"): text for path, text in reference.pages().items()}


def cells(text):
    """What stands in code."""
    return {each for pair in re.findall(r"`([^`\n]+)`|<code>(.*?)</code>", text) for each in pair if each}


def every_command(group, context):
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if isinstance(command, Command):
            yield f"{context.info_name} {name}", command
        else:
            yield from every_command(command, click.Context(command, info_name=f"{context.info_name} {name}"))


def test_all_commands_and_their_options_are_listed(made):
    context = click.Context(COMMANDS, info_name="elasticdl")
    commands = dict(every_command(COMMANDS, context))
    assert {"elasticdl train", "elasticdl status", "elasticdl zoo init"} <= set(commands)
    listed = cells(made["commands.md"])
    for name, command in commands.items():
        assert f"## {name} " in made["commands.md"]
        assert set(command.flags()) - {"--help"} <= listed


def test_an_option_says_its_value_its_default_and_whether_a_script_has_it(made):
    rows = {line.split(" |")[0].strip("| "): line for line in made["commands.md"].splitlines() if line.startswith("|")}
    assert rows["`--min_efficiency`"].endswith(
        "| `PART` | with `--scale_policy` efficiency: minimum speedup per worker | `0.6` | yes |"
    )
    assert rows["`--num_workers`"].endswith(
        "| <code>N&#124;MIN-MAX</code> | number of workers, or MIN-MAX to grow and shrink within | `1` | yes |"
    )
    assert rows["`--shuffle`<br>`--no_shuffle`"].endswith("|  | a new order of samples each epoch | `yes` | no |")


def test_all_events_their_fields_and_words_are_listed(made):
    text = made["events.md"]
    parts = dict(zip(KINDS, re.split(r"^## ", text, flags=re.MULTILINE)[1:], strict=True))
    for name, kind in KINDS.items():
        assert parts[name].startswith(f"`{name}`")
        assert set(kind.fields) <= cells(parts[name])
        assert not kind.said or f"Words: `{kind.said}`" in parts[name]


def test_all_variables_of_the_program_are_listed_and_no_others():
    sources = [path.read_text() for path in (ROOT / "elasticdl").rglob("*.py")]
    used = {name for text in sources for name in re.findall(r"\"(ELASTICDL_[A-Z_]+)\"", text)}
    assert {name for part in reference.ENVIRONMENT.values() for name in part} == used


def test_all_states_and_causes_are_listed_with_what_they_mean(made):
    assert set(WorkerState) <= cells(made["states.md"])
    assert "| `pending` | asked for; the launcher has no place for it |" in made["states.md"]
    assert set(ExitCause) <= cells(made["errors.md"])


def test_all_calls_messages_and_fields_are_listed(made):
    text = made["calls.md"]
    assert set(ALLOWED) == {each.name for each in pb.DESCRIPTOR.services_by_name["Master"].methods}
    assert all(f"\n## {name} {{" in text for name in ALLOWED)
    parts = {part.split(" ")[0]: part for part in text.split("\n### ")[1:]}
    assert set(parts) == set(pb.DESCRIPTOR.message_types_by_name)
    for name, message in pb.DESCRIPTOR.message_types_by_name.items():
        rows = {
            (int(number), field) for number, field in re.findall(r"^\| (\d+) \| `(\w+)`", parts[name], re.MULTILINE)
        }
        assert rows == {(field.number, field.name) for field in message.fields}


# Names that need no entry of their own: modules, which have one, and optimizers that are ready made of others.
READY_MADE = ("elasticdl.ga.torch.optim", "elasticdl.ga.keras.optimizers")
MODULES = [module for each in library.MODULES.values() for module in each]


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.name)
def test_all_public_names_have_an_entry(module):
    path = ROOT / module.name.replace(".", "/")
    source = (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()
    lists = [
        ast.literal_eval(node.value)
        for node in ast.parse(source).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    ]
    described = {each.name for each in (*module.names, *module.others)}
    modules = {each.name.rpartition(".")[2] for each in MODULES if each.name.startswith(f"{module.name}.")}
    if lists and module.name not in READY_MADE:
        assert set(lists[0]) - modules <= described


@pytest.mark.parametrize(
    ("page", "text", "led"),
    [
        ("index.md", "[a](docs/cli.md#images) [b](docs/pictures/x.png)", "[a](cli.md#images) [b](pictures/x.png)"),
        ("index.md", "[docs/gpu.md](docs/gpu.md), [c](CHANGELOG.md)", "[GPUs](gpu.md), [c](changelog.md)"),
        ("gpu.md", "[a](../README.md#x) [b](cli.md) [c](#d)", "[a](index.md#x) [b](cli.md) [c](#d)"),
        ("gpu.md", "![a](../benchmarks/results/b.png)", "![a](benchmarks/results/b.png)"),
        ("gpu.md", "[a](https://example.com/docs/a.md)", "[a](https://example.com/docs/a.md)"),
    ],
)
def test_links_lead_where_they_lead_in_the_repository(page, text, led):
    assert pages.with_links_of_the_site(text, page) == led


@pytest.mark.parametrize(
    ("text", "parted"),
    [
        ("Two:\n- a\n  more\n- b\n", "Two:\n\n- a\n  more\n- b"),
        ("Two:\n1. a\n2. b", "Two:\n\n1. a\n2. b"),
        ("A table:\n| a |\n| - |", "A table:\n\n| a |\n| - |"),
        ("- a\nmore\n- b", "- a\nmore\n- b"),
        ("# A\n- b", "# A\n- b"),
        ("```text\nx\n- y\n```\nz\n- a", "```text\nx\n- y\n```\nz\n\n- a"),
    ],
)
def test_lists_and_tables_begin_after_a_blank_line(text, parted):
    assert pages.with_blank_lines(text) == parted


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('<script async src="https://example.com/a.js"></script>', ["https://example.com/a.js"]),
        ('<link rel="stylesheet" href="//example.com/a.css">', ["//example.com/a.css"]),
        ("a { background: url(https://example.com/a.png) }", ["https://example.com/a.png"]),
        ('@import "https://example.com/a.css";', ["https://example.com/a.css"]),
        ('<a href="https://example.com">a</a> <img src="a//b.png"> <link href="../a.css">', []),
        ("a { background: url(../a.png) }", []),
    ],
)
def test_what_a_browser_would_fetch_from_elsewhere_is_noticed(text, found):
    assert pages.fetched_from_elsewhere(text) == found
