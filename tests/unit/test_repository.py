"""Rules about the repository itself that no other tool checks."""

from __future__ import annotations

import ast
import functools
import os
import re
import subprocess
import sys
import tomllib
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from elasticdl.cli.commands.start import run, train
from elasticdl.common.front_ends import FRONT_ENDS
from elasticdl.job.journal import KINDS
from scripts.site import library

ROOT = Path(__file__).resolve().parents[2]
MODULES = [path for path in (ROOT / "elasticdl").rglob("*.py") if path.parent.name != "proto"]
# Of `elasticdl.elastic`. Its other folders are front ends; scripts of Horovod import none.
KITS = ("collectives", "core", "link", "torch_kit", "training")

# Options are a promise: a new one, and one that goes, is a decision to be made here.
COMMON_FLAGS = """
--help --config
--job_name --num_workers --scale_policy --min_efficiency --collective --check_state --slots
--processes_per_worker --start_method --port
ZOO
--checkpoint_dir --resume --no_resume STEPS
--output --tensorboard_log_dir --log_level --log_loss_steps --log_ranks --sample_record
--join_window --start_timeout --heartbeat_timeout --progress_timeout --replace_slow --no_replace_slow --stop_grace
--image --namespace --kube_context
--master_resource_request --master_resource_limit --worker_resource_request --worker_resource_limit
--master_pod_priority --worker_pod_priority --volume --envs --env_from_secret --image_pull_policy
--image_timeout --node_timeout --recovery_timeout --ttl
--pod_template --master_pod_template --worker_pod_template --service_account --gang --no_gang --queue --elastic --no_elastic
--launcher --slurm_args --slurm_master_args
--yaml --dry_run --detach
"""
RUN_FLAGS = COMMON_FLAGS.replace("ZOO", "").replace("STEPS", "")
ZOO_FLAGS = """
--model_zoo --model_def --model_params --loss --optimizer --dataset --feed --custom_data_reader --eval_metrics_fn --callbacks
--training_data --validation_data --data_reader_params --num_epochs --max_step --seed --shuffle --no_shuffle --data_workers
--global_batch_size --minibatch_size --max_worker_batch_size --learning_rate_scaling --learning_rate_ramp_steps
--evaluation_steps
"""
TRAIN_FLAGS = COMMON_FLAGS.replace("ZOO", ZOO_FLAGS).replace("STEPS", "--checkpoint_steps --keep_checkpoint_max")


@pytest.mark.parametrize(("command", "flags"), [(train, TRAIN_FLAGS), (run, RUN_FLAGS)], ids=["train", "run"])
def test_the_options_are_these(command, flags):
    assert command.flags() == flags.split()


def test_no_module_is_too_long_and_the_links_at_the_root_lead_into_the_package():
    assert [path for path in MODULES if len(path.read_text().splitlines()) > 700] == []
    for name in ("master", "worker"):
        assert (ROOT / name).resolve() == ROOT / "elasticdl" / name


@pytest.mark.parametrize(
    ("argv", "heavy"),
    [
        (["--help"], ["pydantic", "rich", "grpc", "kubernetes", "yaml"]),
        (["--version"], ["pydantic", "rich", "grpc", "yaml", "torch", "horovod", "tensorflow"]),
        (["train", "--help"], ["kubernetes"]),
        (["status"], ["kubernetes"]),  # of this machine's jobs
    ],
    ids=" ".join,
)
def test_a_command_imports_only_what_it_needs(tmp_path, argv, heavy):
    code = f"import sys; from elasticdl.cli.__main__ import main; main({argv!r}); sys.exit(str(set({heavy!r}) & set(sys.modules)))"
    lonely = {**os.environ, "HOME": str(tmp_path), "ELASTICDL_HOME": str(tmp_path), "KUBECONFIG": ""}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=lonely)
    assert done.stderr == "set()\n"


@functools.cache
def parsed() -> dict[str, ast.Module]:
    """All modules of the package, by their names."""
    names = {path: ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in MODULES}
    return {name: ast.parse(path.read_text()) for path, name in names.items()}


def private_attributes(tree: ast.Module) -> set[str]:
    """Those of other modules, as in ``pieces._name``."""
    nodes = list(ast.walk(tree))
    froms = [node for node in nodes if isinstance(node, ast.ImportFrom) and str(node.module).startswith("elasticdl")]
    ours = {each.asname or each.name for node in froms for each in node.names}
    touched = [node for node in nodes if isinstance(node, ast.Attribute) and re.match("_[^_]", node.attr)]
    return {ast.unparse(each) for each in touched if isinstance(each.value, ast.Name) and each.value.id in ours}


def test_no_module_takes_a_private_name_of_another_one():
    froms = [node for tree in parsed().values() for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    ours = [node for node in froms if str(node.module).startswith("elasticdl")]
    assert [each.name for node in ours for each in node.names if re.match("_[^_]", each.name)] == []
    assert {name: private_attributes(tree) for name, tree in parsed().items() if private_attributes(tree)} == {}


def test_no_library_is_used_by_a_name_that_its_class_hides():
    """As ``client._ApiClient__deserialize``: it may be gone with the library's next version."""
    assert [path for path in MODULES if re.search(r"\._[A-Za-z]\w*[a-z0-9]__[a-z]\w*\b(?!__)", path.read_text())] == []


def test_the_front_ends_are_in_all_lists():
    folders = {path.parent.name for path in (ROOT / "elasticdl" / "elastic").glob("*/__init__.py")}
    assert {each.name for each in FRONT_ENDS} == folders - {*KITS, "horovod_scripts"}
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    site = (ROOT / "mkdocs.yml").read_text()
    for each in FRONT_ENDS:
        assert each.packages[0][0] in extras
        assert each.name in library.MODULES
        assert f"reference/python/{each.name}.md" in site


def test_all_that_is_declared_of_a_job_is_told():
    """What is told and not declared, or has other fields, is found in each test of the core: see `play_kit.step`."""
    makers = [path for part in ("master", "elastic", "worker") for path in (ROOT / "elasticdl" / part).rglob("*.py")]
    text = "".join(path.read_text() for path in makers)
    assert {name for name in KINDS if f'"{name}"' not in text} == set()


def test_every_dependency_is_pinned():
    lines = (ROOT / "requirements" / "lock.txt").read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9_.-]+==[0-9][0-9a-z.!]*", pin) for pin in pins), "no local versions, no ranges"


def test_no_two_modules_have_one_name_where_somebody_looks_for_one():
    """But the front ends of the library, which may call alike what is alike in them."""
    for folder, rooms in (("", ("cli", "common", "kube", "master")), ("elastic", KITS)):
        paths = [path for path in (ROOT / "elasticdl" / folder).rglob("*.py") if not path.stem.startswith("__")]
        parts = {path: path.relative_to(ROOT / "elasticdl" / folder).parts[0] for path in paths}
        names = [path.stem for path in paths if folder or parts[path] in rooms]
        ours = {path.stem for path in paths if parts[path] in rooms}
        assert {name for name in ours if names.count(name) > 1} == set()


def imported(name: str) -> set[str]:
    """The modules of the package that a module imports, but for imports within functions."""
    found, waiting = set(), list(parsed()[name].body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("elasticdl"):
            titles = [f"{node.module}.{each.name}" for each in node.names]
            found |= {each if each in parsed() else node.module for each in titles}
        elif isinstance(node, ast.Import):
            found |= {each.name for each in node.names if each.name in parsed()}
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            waiting += ast.iter_child_nodes(node)
    parts = [each.split(".") for each in found]
    found |= {".".join(each[:count]) for each in parts for count in range(1, len(each))}  # are imported before
    return {each for each in found if not name.startswith(f"{each}.")} - {name}


def test_no_modules_import_each_other_in_a_circle():
    imports = {name: imported(name) for name in parsed()}
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


# ---- what only some users install, and what is said to who lacks it ----

TO_GET = r"pip install '\.\[{}\]' in a checkout of elasticdl, or its wheel with \[{}\] \(docs/install\.md\)\n$"
COMMAND = "import sys; from elasticdl.cli.__main__ import main; sys.exit(main({!r}))"


@pytest.mark.parametrize(
    ("missing", "code", "told", "extra"),
    [
        ("numpy", "import elasticdl.elastic.torch", "elasticdl.elastic needs numpy, which is not installed", "worker"),
        ("fsspec", COMMAND.format(["train", "--model_def=digits.mlp_torch", f"--model_zoo={ROOT}/model_zoo"]),
         "elasticdl train: .*fsspec.* is not installed", "worker"),
        ("kubernetes", COMMAND.format(["status", "x", "--namespace=y"]),
         "elasticdl status: jobs on a cluster need the package kubernetes", "kubernetes"),
        ("cryptography", COMMAND.format(["run", "--launcher=slurm", "--", "true"]),
         "elasticdl run: jobs of Slurm need the package cryptography", "slurm"),
    ],
)  # fmt: skip
def test_what_is_missing_is_one_line_that_says_how_to_get_it(tmp_path, missing, code, told, extra):
    """A module that begins so is none in any process of the command."""
    (tmp_path / "sitecustomize.py").write_text(f"import sys\nsys.modules[{missing!r}] = None\n")
    env = {**os.environ, "PYTHONPATH": str(tmp_path), "ELASTICDL_HOME": str(tmp_path / "home")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=env)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert re.search(f"{told}.*: {TO_GET.replace('{}', extra)}", done.stderr)


def test_the_master_and_the_command_line_need_none_of_the_extras():
    missing = ["numpy", "fsspec", "torch", "tensorflow", "kubernetes", "plotly", "cryptography", "urllib3"]
    modules = ["master.shell.serve", "cli.commands.look", "cli.commands.start", "cli.commands.jobs"]
    imports = "; ".join(f"import elasticdl.{name}" for name in modules)
    code = f"import sys; sys.modules.update(dict.fromkeys({missing})); {imports}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_nothing_tells_to_install_the_package_of_another_project():
    """In messages, examples, images and requirements; the documents' commands are looked at in test_documents.py."""
    folders = ("elasticdl", "model_zoo", "examples", "benchmarks", "docker", "requirements", "scripts")
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix not in (".pyc", ".gz")]
    texts = {path: path.read_text(errors="replace") for path in paths if path.is_file()}
    wrong = r"pip3? install (-\S+ )*['\"]?elasticdl\b(?!-)"
    assert [path for path, text in texts.items() if re.search(wrong, text)] == []
    lists = [path for path in texts if path.name.endswith(".txt")]
    assert [path for path in lists if re.search(r"^elasticdl\b", texts[path], re.MULTILINE)] == []
