"""The pages of the site about what users import: which names, and from whose docstrings (mkdocstrings reads them)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Name:
    """A public name. ``defined``: where, if that is elsewhere; ``members``: of a class, those that a program uses; ``shared``: it is
    described once, on the page of what all have in common."""

    name: str
    defined: str = ""
    members: tuple[str, ...] = ()
    shared: bool = False


@dataclass(frozen=True, slots=True)
class Module:
    """``names``: those of `__all__`, and for an optimizer's module the one that the others derive from. ``others``: what else is
    described there, below a heading."""

    name: str
    names: Sequence[Name]
    others: Sequence[Name] = ()
    others_are: str = "Objects that these return"


RUNTIME = "elasticdl.elastic.training.runtime.ScriptRuntime"
LOOP = "elasticdl.elastic.torch.prepare.PlainLoop"
COMMON = [
    Name("init", f"{RUNTIME}.init"),
    Name("run", f"{RUNTIME}.run"),
    Name("context", f"{RUNTIME}.context"),
    Name("rank", f"{RUNTIME}.rank"),
    Name("size", f"{RUNTIME}.size"),
    Name("LearningRate", "elasticdl.elastic.core.learning_rate.LearningRate", ("schedule", "scaling", "ramp_steps")),
]
SHARED = [Name(each.name, each.defined, shared=True) for each in COMMON]
STATE = ("commit", "step", "loss", "learning_rate")
STEPPED = ("steps", "will_step", "step", "accumulate", "flush", "discard", "zero_grad")

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
                *(each for each in SHARED if each.name != "rank"),
                Name("prepare", f"{LOOP}.prepare"),
                Name("DataLoader"),
                Name("Sampler"),
                Name("TorchState"),
                Name("mean", f"{LOOP}.mean"),
                Name("rank", f"{LOOP}.rank"),
                Name("device"),
                Name("catching_up", f"{LOOP}.catching_up"),
            ],
            [
                Name(
                    "StepBatch",
                    "elasticdl.elastic.torch_kit.data.loaders.StepBatch",
                    ("backward", "weigh", "micro_batch_size", "share"),
                ),
                Name(
                    "ElasticDataLoader",
                    "elasticdl.elastic.torch_kit.data.loaders.ElasticDataLoader",
                    ("epochs", "__len__"),
                ),
                Name(
                    "ElasticSampler",
                    "elasticdl.elastic.torch_kit.data.loaders.ElasticSampler",
                    ("epochs", "steps", "__len__"),
                ),
                Name(
                    "TorchState, the object",
                    "elasticdl.elastic.torch_kit.pieces.torch_state.TorchState",
                    (*STATE, "reduce_gradients", "mean"),
                ),
            ],
        ),
        Module("elasticdl.elastic.torch.optim", [Name("Optimizer", members=("micro_batches", "step"))]),
    ),
    "keras": (
        Module(
            "elasticdl.elastic.keras",
            [
                *SHARED,
                Name("DataLoader"),
                Name("KerasState"),
            ],
            [
                Name("ElasticDataLoader", "elasticdl.elastic.keras.loader.ElasticDataLoader", ("epochs", "__len__")),
                Name("KerasState, the object", "elasticdl.elastic.keras.keras_state.KerasState", (*STATE, "make_step")),
            ],
        ),
        Module("elasticdl.elastic.keras.models", [Name("Model", members=("compile", "fit", "evaluate", "predict"))]),
    ),
    "lightning": (Module("elasticdl.elastic.lightning", [Name("ElasticStrategy")]),),
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
        Module("elasticdl", [Name("Mode", "elasticdl.common.mode.Mode", ("TRAINING", "EVALUATION", "PREDICTION"))]),
        Module(
            "elasticdl.data",
            [
                Name("Arrays", "elasticdl.data.records.Arrays"),
                Name("Metadata", "elasticdl.data.records.Metadata", ("column_names",)),
                Name("Records", "elasticdl.data.records.Records", ("read", "place", "__len__")),
            ],
        ),
        Module("elasticdl.data.custom_reader", []),
        Module("elasticdl.data.feed", []),
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
        lines += [f"## `{module.name}`", ""] if module is not modules[0] else []
        options = ("members: []", "show_root_heading: false", "show_root_toc_entry: false")
        lines += [f"::: {module.name}", "    options:", *(f"      {each}" for each in options), ""]
        shared = [f"[`{each.name}`](elastic.md#{each.defined})" for each in module.names if each.shared]
        lines += [f"The same as everywhere: {', '.join(shared)}.", ""] if shared else []
        for each in module.names:
            lines += (
                []
                if each.shared
                else _entry(each, each.defined or f"{module.name}.{each.name}", 3 if module is not modules[0] else 2)
            )
        if module.others:
            lines += [f"## {module.others_are}", ""]
            for each in module.others:
                lines += _entry(each, each.defined, 3)
    return lines


def _entry(entry: Name, defined: str, level: int) -> list[str]:
    members = f"[{', '.join(entry.members)}]"
    return [
        f"::: {defined}",
        "    options:",
        f"      heading: {entry.name}",
        f"      toc_label: {entry.name}",
        f"      heading_level: {level}",
        f"      members: {members}",
        f"      inherited_members: {members}",
        "",
    ]
