"""README.md, docs/ and the site: words of commands, names in Python blocks, and that the reference has everything."""

from __future__ import annotations

import ast
import re

import pytest
import yaml
from refusal_kit import refused

from elasticdl.job.journal import KINDS
from elasticdl.job.spec import JobSpec
from elasticdl.master.core.events import ExitCause
from elasticdl.master.core.values import WorkerState
from elasticdl.master.shell.calls import ALLOWED
from elasticdl.proto import elasticdl_pb2 as pb
from scripts.site import library, reference
from tests.documents.checking import Wrong, check_call, check_command, check_mention, check_names, options_of
from tests.documents.reading import DOCUMENTS, ROOT, How, read

READ = [read(path) for path in DOCUMENTS]
SPANS = [span for document in READ for span in document.spans]
PROGRAMS = ("elasticdl ", "make ", "pip install ", "python -m benchmarks")
PROGRAMS += ("python scripts/", "python model_zoo/", "python examples/")
# Where every option that is mentioned is one of `elasticdl`'s.
OURS = ("docs/cli.md", "docs/kubernetes.md", "docs/queues.md", "docs/data.md", "docs/library.md", "docs/runai.md")
# What another program has under the same name, in the table that says what takes its place.
THEIRS = {"elasticdl evaluate", "elasticdl predict"}
MIGRATION = {"elastic": "elasticdl.elastic.torch"}


def wrong(checks):
    """What is wrong with some places, each as one line."""
    found = []
    for each, check, *given in checks:
        try:
            check(*given)
        except Wrong as error:
            found.append(f"{each.place}: {error}")
    return found


def test_every_block_says_what_it_is_and_every_command_has_only_words_that_exist():
    assert [complaint for document in READ for complaint in document.complaints] == []
    assert {each.how for document in READ for each in document.commands} == set(How)
    commands = [each for document in READ for each in document.commands if each.how is How.MARKED]
    spans = [span for span in SPANS if span.text.startswith(PROGRAMS) and span.text not in THEIRS]
    assert wrong((each, check_command, each.text) for each in commands) == []
    assert wrong((each, check_mention, each.text) for each in spans) == []


def test_options_in_sentences_exist():
    known = {flag for name in ("train", "run", "logs", "events", "stop", "zoo", "scale") for flag in options_of(name)}
    for span in SPANS:
        flag = re.match(r"--[a-z_]+", span.text)
        if flag and span.document in OURS and not span.text.startswith("--num-workers"):
            assert flag[0] in known | {"--full", "--isolation"}, span.place


def test_a_python_block_can_be_compiled_and_names_what_is_there():
    blocks = [block for document in READ for block in document.python]
    for block in blocks:
        tree = ast.parse(block.code)
        imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
        ours = [node for node in imports if "elasticdl" in ast.unparse(node)]
        exec(compile(ast.Module(ours, []), block.place, "exec"), {})
    assert wrong((block, check_names, block.code, {}) for block in blocks) == []


def check_elastic(text, names=MIGRATION):
    check_names(text, names)
    check_call(text, names)


def test_names_in_sentences_and_tables_exist():
    spans = [span for span in SPANS if not span.text.startswith(PROGRAMS)]
    names = {"docs/migration.md": MIGRATION}
    assert wrong((each, check_elastic, each.text, names.get(each.document, {})) for each in spans) == []


def test_the_config_file_of_the_documents_is_one():
    block = re.search(r"```yaml\n(.*?)```", (ROOT / "docs" / "cli.md").read_text(), re.DOTALL)
    assert JobSpec.model_validate(yaml.safe_load(block[1])).model_def == "digits.cnn_torch"


@pytest.mark.parametrize(
    ("check", "text", "said"),
    [
        (check_command, "elasticdl trian --model_def a", "did you mean train?"),
        (check_command, "elasticdl train --model_deff a", "'--model_def'"),
        (check_command, "python -m benchmarks.master_scale --bogus 1", "does not take --bogus 1"),
        (check_command, "make nothing", "nothing is no target"),
        (check_command, 'pip install ".[nothing]"', "nothing is no extra"),
        (check_mention, "elasticdl logs JOB --folow", "no option --folow"),
        (check_elastic, "elastic.nothing()", "there is no "),
        (check_elastic, "elastic.init(global_batch=2)", "unexpected keyword argument"),
    ],
)
def test_a_word_that_does_not_exist_is_noticed(check, text, said):
    assert said in refused(r"\w", lambda: check(text), Wrong)


# ---- the site: `make docs` builds it, and checks all links ----


def cells(text):
    """What stands in code."""
    return {each for pair in re.findall(r"`([^`\n]+)`|<code>(.*?)</code>", text) for each in pair if each}


def test_all_options_events_states_causes_variables_and_calls_are_listed():
    made = {path.removeprefix("reference/"): text for path, text in reference.pages().items()}
    row = "| `--min_efficiency` | `PART` | with `--scale_policy` efficiency: minimum speedup per worker | `0.6` | yes |"
    assert f"\n{row}\n" in made["commands.md"], "its value, its default, and whether a script has it"
    for name in ("train", "run", "scale"):
        assert options_of(name) - {"--help"} <= cells(made["commands.md"])
    parts = dict(zip(KINDS, re.split(r"^## ", made["events.md"], flags=re.MULTILINE)[1:], strict=True))
    for name, kind in KINDS.items():
        assert parts[name].startswith(f"`{name}`")
        assert set(kind.fields) <= cells(parts[name])
    assert set(WorkerState) <= cells(made["states.md"])
    assert set(ExitCause) <= cells(made["errors.md"])
    sources = [path.read_text() for path in (ROOT / "elasticdl").rglob("*.py")]
    used = {name for text in sources for name in re.findall(r"\"(ELASTICDL_[A-Z_]+)\"", text)}
    assert {name for part in reference.ENVIRONMENT.values() for name in part} == used
    assert set(ALLOWED) == {each.name for each in pb.DESCRIPTOR.services_by_name["Master"].methods}
    assert all(f"\n## {name} {{" in made["calls.md"] for name in ALLOWED)


# Names that need no entry of their own: modules, which have one, and optimizers that are ready made of others.
READY_MADE = ("elasticdl.ga.torch.optim", "elasticdl.ga.keras.optimizers")


def test_all_public_names_have_an_entry():
    listed = [module for each in library.MODULES.values() for module in each]
    for module in listed:
        path = ROOT / module.name.replace(".", "/")
        source = (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()
        nodes = [node for node in ast.parse(source).body if isinstance(node, ast.Assign)]
        lists = [ast.literal_eval(node.value) for node in nodes if ast.unparse(node.targets[0]) == "__all__"]
        described = {each.name for each in (*module.names, *module.others)}
        modules = {each.name.rpartition(".")[2] for each in listed if each.name.startswith(f"{module.name}.")}
        if lists and module.name not in READY_MADE:
            assert set(lists[0]) - modules <= described, module.name
