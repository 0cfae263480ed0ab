"""The pages of the site about what users import: which names, and from whose docstrings (mkdocstrings reads them)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Name:
    """A public name."""

    name: str
    defined: str = ""  # where, if that is elsewhere
    members: tuple[str, ...] = ()  # of a class, those that a program uses
    shared: bool = False  # described once, on the page of what all have in common
    is_made: bool = True  # by the program itself, of a class; else only its members are shown
    has_value: bool = True  # that tells somebody something


@dataclass(frozen=True, slots=True)
class Module:
    """A module that users import, with the names of its `__all__`; of optimizers, the one that the others derive from."""

    name: str
    names: Sequence[Name]
    others: Sequence[Name] = ()  # what else is described there
    others_are: str = "Objects that these return"  # the heading above
    is_for_users: bool = True  # its docstring


def _given(name: str, defined: str, *members: str) -> Name:
    """A class whose objects a program is given."""
    return Name(name, defined, members, is_made=False)


KIT = "elasticdl.elastic.torch_kit"
RUNTIME = "elasticdl.elastic.training.runtime.ScriptRuntime"
LOOP = "elasticdl.elastic.torch.prepare.PlainLoop"
COMMON = [
    Name("init", f"{RUNTIME}.init"),
    Name("run", f"{RUNTIME}.run"),
    Name("context", f"{RUNTIME}.context"),
    Name("rank", f"{RUNTIME}.rank"),
    Name("size", f"{RUNTIME}.size"),
    Name("LearningRate", "elasticdl.elastic.core.learning_rate.LearningRate"),
]
SHARED = [Name(each.name, each.defined, shared=True) for each in COMMON]
STATE = ("commit", "step", "loss", "learning_rate")
STEPPED = ("steps", "will_step", "step", "flush", "discard", "zero_grad")

MODULES = {
    "elastic": (
        Module(
            "elasticdl.elastic",
            [Name(each) for each in ("steps", "batch_size", "global_batch_size", "gpus", "master")],
            COMMON,
            "What the modules for PyTorch and Keras have in common",
        ),
    ),
    "torch": (
        Module(
            "elasticdl.elastic.torch",
            [
                *(
                    Name(each, f"{LOOP}.{each}")
                    for each in ("prepare", "mean", "evaluate", "values", "on_one", "rank", "catching_up")
                ),
                *(each for each in SHARED if each.name != "rank"),
                Name("DataLoader"),
                Name("Sampler"),
                Name("TorchState"),
                Name("device"),
            ],
            [
                _given("StepBatch", f"{KIT}.loaders.StepBatch", "backward", "weigh", "micro_batch_size", "share"),
                _given("ElasticDataLoader", f"{KIT}.loaders.ElasticDataLoader", "epochs", "__len__"),
                _given("ElasticSampler", f"{KIT}.loaders.ElasticSampler", "epochs", "steps", "__len__"),
                _given("TorchState, the object", f"{KIT}.torch_state.TorchState", *STATE, "reduce_gradients", "mean"),
            ],
        ),
    ),
    "keras": (
        Module(
            "elasticdl.elastic.keras",
            [
                *SHARED,
                Name("DataLoader"),
                Name("KerasState"),
                Name("evaluate"),
            ],
            [
                _given("ElasticDataLoader", "elasticdl.elastic.keras.loader.ElasticDataLoader", "epochs", "__len__"),
                _given("KerasState, the object", "elasticdl.elastic.keras.keras_state.KerasState", *STATE, "make_step"),
            ],
        ),
        Module("elasticdl.elastic.keras.models", [Name("Model", members=("compile", "fit", "evaluate", "predict"))]),
    ),
    "lightning": (
        Module(
            "elasticdl.elastic.lightning",
            [Name(each, has_value=False) for each in ("ElasticStrategy", "ElasticModelParallelStrategy")],
        ),
    ),
    "transformers": (
        Module(
            "elasticdl.elastic.transformers",
            [
                Name(each, f"elasticdl.elastic.transformers.elastic_trainer.{each}")
                for each in ("Trainer", "Seq2SeqTrainer", "patch")
            ],
        ),
    ),
    "callbacks": (
        Module(
            "elasticdl.callbacks",
            [
                Name(
                    "Callback",
                    members=(
                        "on_train_begin",
                        "on_world_change",
                        "on_epoch_begin",
                        "on_train_batch_end",
                        "on_epoch_end",
                        "on_evaluation_end",
                        "on_train_end",
                    ),
                ),
                Name("LearningRateScheduler"),
            ],
        ),
    ),
    "data": (
        Module(
            "elasticdl.data",
            [
                Name("Arrays", "elasticdl.data.records.Arrays"),
                Name("Metadata", "elasticdl.data.records.Metadata", ("column_names",)),
                Name("Records", "elasticdl.data.records.Records", ("read", "place")),
            ],
        ),
        Module("elasticdl.data.custom_reader", []),
        Module("elasticdl.data.feed", []),
        Module(
            "elasticdl",
            [Name("Mode", members=("TRAINING", "EVALUATION", "PREDICTION"))],
            is_for_users=False,
        ),
    ),
    "ga_torch": (
        Module("elasticdl.ga.torch.optim", [Name("Optimizer", members=(*STEPPED, "state_dict", "load_state_dict"))]),
    ),
    "ga_keras": (
        Module(
            "elasticdl.ga.keras.optimizers",
            [
                Name(
                    "Optimizer",
                    members=(
                        "steps",
                        "accumulated",
                        "will_step",
                        "apply",
                        "apply_gradients",
                        "flush",
                        "discard",
                        "weighing",
                    ),
                )
            ],
        ),
        Module("elasticdl.ga.keras.callbacks", [Name("ExactEpochs")]),
    ),
}


def pages() -> dict[str, str]:
    """By their paths in the site."""
    return {f"reference/python/{name}.md": "\n".join(_page(modules)) for name, modules in MODULES.items()}


def _page(modules: Sequence[Module]) -> list[str]:
    lines = [f"# `{modules[0].name}`", ""]
    for module in modules:
        is_first = module is modules[0]
        lines += [] if is_first else [f"## `{module.name}`", ""]
        if module.is_for_users:
            lines += _block(module.name, members="[]", show_root_heading="false", show_root_toc_entry="false")
        for each in module.names:
            if not each.shared:
                lines += _entry(each, each.defined or f"{module.name}.{each.name}", level=2 if is_first else 3)
        shared = [f"[`{each.name}`](elastic.md#{each.defined})" for each in module.names if each.shared]
        lines += [f"The same as everywhere: {', '.join(shared)}.", ""] if shared else []
        if module.others:
            lines += [f"## {module.others_are}", ""]
            for each in module.others:
                lines += _entry(each, each.defined, level=3)
    return lines


def _entry(name: Name, defined: str, *, level: int) -> list[str]:
    members = f"[{', '.join(name.members)}]"
    return _block(
        defined,
        heading=name.name,
        toc_label=name.name,
        heading_level=str(level),
        members=members,
        inherited_members=members,
        merge_init_into_class=str(name.is_made).lower(),
        show_attribute_values=str(name.has_value).lower(),
    )


def _block(what: str, **options: str) -> list[str]:
    return [f"::: {what}", "    options:", *(f"      {name}: {value}" for name, value in options.items()), ""]
