"""The site of docs/: that the reference has everything, and what is done to pages. `make docs` builds it, and checks all links."""

from __future__ import annotations

import ast
import re

import click
import pytest

from elasticdl.cli.__main__ import COMMANDS
from elasticdl.cli.parsing import Command
from elasticdl.job.journal import KINDS
from elasticdl.master.core.events import ExitCause
from elasticdl.master.core.values import WorkerState
from elasticdl.master.shell.calls import ALLOWED
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
    commands, text = dict(every_command(COMMANDS, click.Context(COMMANDS, info_name="elasticdl"))), made["commands.md"]
    assert {"elasticdl train", "elasticdl status", "elasticdl zoo init"} <= set(commands)
    for name, command in commands.items():
        assert f"## {name} " in text
        assert set(command.flags()) - {"--help"} <= cells(text)
    row = "| `--min_efficiency` | `PART` | with `--scale_policy` efficiency: minimum speedup per worker | `0.6` | yes |"
    assert f"\n{row}\n" in text, "its value, its default, and whether a script has it"


def test_all_events_states_causes_and_variables_are_listed_and_no_others(made):
    parts = dict(zip(KINDS, re.split(r"^## ", made["events.md"], flags=re.MULTILINE)[1:], strict=True))
    for name, kind in KINDS.items():
        assert parts[name].startswith(f"`{name}`")
        assert set(kind.fields) <= cells(parts[name])
        assert not kind.said or f"Words: `{kind.said}`" in parts[name]
    assert set(WorkerState) <= cells(made["states.md"])
    assert "| `pending` | asked for; the launcher has no place for it |" in made["states.md"]
    assert set(ExitCause) <= cells(made["errors.md"])
    sources = [path.read_text() for path in (ROOT / "elasticdl").rglob("*.py")]
    used = {name for text in sources for name in re.findall(r"\"(ELASTICDL_[A-Z_]+)\"", text)}
    assert {name for part in reference.ENVIRONMENT.values() for name in part} == used


def test_all_calls_messages_and_fields_are_listed(made):
    text, messages = made["calls.md"], pb.DESCRIPTOR.message_types_by_name
    assert set(ALLOWED) == {each.name for each in pb.DESCRIPTOR.services_by_name["Master"].methods}
    assert all(f"\n## {name} {{" in text for name in ALLOWED)
    parts = {part.split(" ")[0]: part for part in text.split("\n### ")[1:]}
    rows = {name: set(re.findall(r"^\| (\d+) \| `(\w+)`", part, re.MULTILINE)) for name, part in parts.items()}
    assert rows == {name: {(str(field.number), field.name) for field in each.fields} for name, each in messages.items()}


# Names that need no entry of their own: modules, which have one, and optimizers that are ready made of others.
READY_MADE = ("elasticdl.ga.torch.optim", "elasticdl.ga.keras.optimizers")
MODULES = [module for each in library.MODULES.values() for module in each]


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.name)
def test_all_public_names_have_an_entry(module):
    path = ROOT / module.name.replace(".", "/")
    source = (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()
    nodes = [node for node in ast.parse(source).body if isinstance(node, ast.Assign)]
    lists = [ast.literal_eval(node.value) for node in nodes if ast.unparse(node.targets[0]) == "__all__"]
    described = {each.name for each in (*module.names, *module.others)}
    modules = {each.name.rpartition(".")[2] for each in MODULES if each.name.startswith(f"{module.name}.")}
    if lists and module.name not in READY_MADE:
        assert set(lists[0]) - modules <= described


def docstring(path):
    """Of what this leads to, a module first."""
    module, names = path, []
    while (
        not (found := ROOT / (module.replace(".", "/") + ".py")).is_file()
        and not (found := found.with_suffix("") / "__init__.py").is_file()
    ):
        module, _, name = module.rpartition(".")
        names.insert(0, name)
    tree = ast.parse(found.read_text())
    for name in names:
        tree = next(each for each in tree.body if getattr(each, "name", "") == name)
    return ast.get_docstring(tree)


@pytest.mark.parametrize("page", ["torch", "keras", "transformers"])
def test_what_a_script_calls_is_described_with_an_example_and_a_link(page):
    """First of a loop what makes it elastic."""
    for module in library.MODULES[page]:
        for each in module.names:
            text = docstring(each.defined or f"{module.name}.{each.name}")
            assert re.search(r"\bdocs/\w+\.md", text), each.name
            assert "``" in text or "example above" in text, each.name
    assert library.MODULES["torch"][0].names[0].name == "prepare"


# ---- what is done to pages ----


def test_a_docstring_leads_to_the_page_that_it_names():
    html = "<p>it (docs/cli.md)</p> <code>docs/cli.md</code>"
    shown = html.replace("(docs/cli.md)", f'(<a href="../../cli.html">{pages.title_of("docs/cli.md")}</a>)')
    assert pages.with_links_of_docstrings(html, "reference/python/torch.md") == shown


@pytest.mark.parametrize(
    ("text", "fetched"),
    [
        ('<script src="https://a.b/a.js">', 1),
        ('<link href="//a.b/a.css">', 1),
        ("url(https://a.b/a.png)", 1),
        ('@import "https://a.b/c"', 1),
        (
            '<a href="https://e.com">a</a> <img src="a//b.png"> <link href="../a.css"> a { background: url(../a.png) }',
            0,
        ),
    ],
)
def test_what_a_browser_would_fetch_from_elsewhere_is_noticed(text, fetched):
    assert len(pages.fetched_from_elsewhere(text)) == fetched


def test_an_option_in_a_sentence_is_not_broken_after_its_hyphens():
    html = '<p><code>run --num_workers 2-4 -- a</code> -- <code class="b">--c</code></p>'
    whole = '<code>run <span class="option">--num_workers</span> 2-4 -- a</code>'
    assert pages.with_whole_options(html) == html.replace("<code>run --num_workers 2-4 -- a</code>", whole)
