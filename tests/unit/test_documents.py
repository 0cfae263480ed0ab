"""README.md and docs/: the words of commands that are marked or stand within sentences, and the names in Python blocks."""

from __future__ import annotations

import ast
import re

import pytest
import yaml
from refusal_kit import refused

from elasticdl.job.spec import JobSpec
from tests.documents.checking import Wrong, check_call, check_command, check_mention, check_names, options_of
from tests.documents.reading import DOCUMENTS, ROOT, How, PythonBlock, Span, read

READ = [read(path) for path in DOCUMENTS]
MARKED = [command for document in READ for command in document.commands if command.how is How.MARKED]
SPANS = [span for document in READ for span in document.spans]
PYTHON = [block for document in READ for block in document.python]
PROGRAMS = ("elasticdl ", "make ", "pip install ", "python -m benchmarks")
PROGRAMS += ("python scripts/", "python model_zoo/", "python examples/")
# Where every option that is mentioned is one of `elasticdl`'s.
OURS = ("docs/cli.md", "docs/kubernetes.md", "docs/queues.md", "docs/data.md", "docs/library.md", "docs/runai.md")
MIGRATION = {"elastic": "elasticdl.elastic.torch"}


def place(each: object) -> str:
    return f"{each.place} {each.text}" if hasattr(each, "text") else each.place


@pytest.mark.parametrize("document", READ, ids=lambda each: each.name)
def test_every_block_says_what_it_is(document):
    assert document.complaints == []


@pytest.mark.parametrize("command", MARKED, ids=place)
def test_a_marked_command_has_only_words_that_exist(command):
    check_command(command.text)


# What another program has under the same name, in the table that says what takes its place.
THEIRS = {"elasticdl evaluate", "elasticdl predict"}


@pytest.mark.parametrize(
    "span", [span for span in SPANS if span.text.startswith(PROGRAMS) and span.text not in THEIRS], ids=place
)
def test_a_command_in_a_sentence_has_only_words_that_exist(span):
    check_mention(span.text)


def test_options_in_sentences_exist():
    known = {flag for name in ("train", "run", "logs", "events", "stop", "zoo", "scale") for flag in options_of(name)}
    for span in SPANS:
        flag = re.match(r"--[a-z_]+", span.text)
        if flag and span.document in OURS and not span.text.startswith("--num-workers"):
            assert flag[0] in known | {"--full", "--isolation"}, place(span)


@pytest.mark.parametrize("block", PYTHON, ids=place)
def test_a_python_block_can_be_compiled_and_names_what_is_there(block):
    tree = ast.parse(block.code)
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    ours = [node for node in imports if "elasticdl" in ast.unparse(node)]
    exec(compile(ast.Module(ours, []), block.place, "exec"), {})
    check_names(block.code, {})


def check_elastic(text, names=MIGRATION):
    check_names(text, names)
    check_call(text, names)


def test_names_in_sentences_and_tables_exist():
    for span in SPANS:
        if not span.text.startswith(PROGRAMS):
            try:
                check_elastic(span.text, MIGRATION if span.document == "docs/migration.md" else {})
            except Wrong as wrong:
                raise AssertionError(f"{place(span)}: {wrong}") from None


def test_the_config_file_of_the_documents_is_one():
    block = re.search(r"```yaml\n(.*?)```", (ROOT / "docs" / "cli.md").read_text(), re.DOTALL)
    assert JobSpec.model_validate(yaml.safe_load(block[1])).model_def == "digits.cnn_torch"


# ---- the reading and the checking themselves ----


def test_what_is_done_with_a_command(tmp_path, monkeypatch):
    monkeypatch.setattr("tests.documents.reading.ROOT", tmp_path)
    (tmp_path / "a.md").write_text(
        "Text.\n\n    elasticdl train --model_def a \\\n        --num_workers 2   # on two\n    elasticdl zoo push a   # needs a registry\n"
        "\n    # takes 5 minutes\n    make test\n\nIn another terminal, while it runs:\n\n    elasticdl status\n"
        "\nElsewhere:\n\n    elasticdl train --image local/host --model_def a\n    elasticdl status a\n"
        "\n`a/b.py`:\n\n```python\nx = 1\n```\n\n| a |\n|---|\n| `elasticdl status` |\n\n```\nwhat?\n```\n"
    )
    found = read(tmp_path / "a.md")
    assert [(command.line, command.text.split()[1], command.how, command.mark) for command in found.commands] == [
        (3, "train", How.RUN, ""),
        (5, "zoo", How.MARKED, "needs a registry"),
        (8, "test", How.MARKED, "takes 5 minutes"),
        (12, "status", How.MEANWHILE, ""),
        (16, "train", How.ON_CLUSTER, ""),
        (17, "status", How.ON_CLUSTER, ""),
    ]
    assert found.commands[0].text == "elasticdl train --model_def a --num_workers 2"
    assert found.python == [PythonBlock("a.md", 21, "x = 1\n", "a/b.py")]
    assert found.spans[-1] == Span("a.md", 27, "elasticdl status")
    (complaint,) = found.complaints
    assert complaint.startswith("a.md:29: a fenced block says one of ")


@pytest.mark.parametrize(
    ("check", "text", "said"),
    [
        (check_command, "elasticdl trian --model_def a", "did you mean train?"),
        (check_command, "elasticdl train --model_deff a", "'--model_def'"),
        (check_command, "elasticdl train --num_workers 4-2", "the minimum is above"),
        (check_command, "elasticdl run --num_workers 2 python a.py", "the program goes after --"),
        (check_command, "python -m benchmarks.master_scale --bogus 1", "does not take --bogus 1"),
        (check_command, "python examples/nothing.py", "there is no examples/nothing.py"),
        (check_command, "make nothing", "nothing is no target"),
        (check_command, 'pip install ".[nothing]"', "nothing is no extra"),
        (check_command, 'pip install "elasticdl[kubernetes]"', "another project's package"),
        (check_command, "docker build -f docker/Dockerfile.nothing .", "there is no docker/Dockerfile.nothing"),
        (check_command, "nothing at all", "nothing is no program"),
        (check_mention, "elasticdl logs JOB --follow", ""),
        (check_mention, "elasticdl logs JOB --folow", "no option --folow"),
        (check_elastic, "elastic.rank()", ""),
        (check_elastic, "elastic.nothing()", "there is no "),
        (check_elastic, "elastic.init(global_batch_size=2)", ""),
        (check_elastic, "elastic.init(global_batch=2)", "unexpected keyword argument"),
    ],
)
def test_a_word_that_does_not_exist_is_noticed(check, text, said):
    if said:
        assert said in refused(r"\w", lambda: check(text), Wrong)
    else:
        check(text)
