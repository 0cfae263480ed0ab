"""What ``fit`` was given, made into what it needs; whatever elastic training can't do is refused in one line."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Any

import keras

from elasticdl.common.errors import ArgumentError, UserError
from elasticdl.elastic.keras.fit_checks import check_values, check_weights
from elasticdl.elastic.keras.fit_data import WITH_WEIGHTS, Columns, Samples, open_data, weigh_classes

# What to do instead of giving an argument that is refused.
INSTEAD = {
    "steps_per_epoch": "an epoch is all samples, each once; leave it out, or give fewer samples and more epochs",
    "validation_steps": "validation is on all of validation_data; leave it out, or give fewer samples there",
}


@dataclass(frozen=True, slots=True)
class FitOptions:
    """What ``fit`` is told besides data and callbacks."""

    epochs: int
    initial_epoch: int
    verbose: int
    shuffle: bool
    validation_freq: int | Container[int]

    def __post_init__(self) -> None:
        """Raises:
        ArgumentError: there is no such epoch, or no such frequency.
        """
        check_values({name: getattr(self, name) for name in ("epochs", "initial_epoch", "validation_freq")})

    def validates(self, epoch: int) -> bool:
        """Whether there is a validation at the end of this epoch, counted from 0."""
        if isinstance(self.validation_freq, Container):
            return epoch + 1 in self.validation_freq
        return (epoch + 1) % self.validation_freq == 0


@dataclass(frozen=True, slots=True)
class FitData:
    """What to train on, and what to validate on."""

    training: Samples
    validation: Samples | None = None

    def check(self, model: keras.Model) -> None:
        """Raises:
        UserError: there are no samples to validate on, or weights that the model's loss can't be multiplied by.
        """
        if self.validation is not None and not len(self.validation):
            raise UserError("fit(validation_data=): there are no samples; leave it out, or give at least one")
        for call, samples in (("fit(x, y)", self.training), ("fit(validation_data=)", self.validation)):
            if samples is not None and samples.weighted and len(samples):
                check_weights(call, samples.dataset[0][1][1], model)


@dataclass(frozen=True, slots=True)
class GivenData:
    """The arguments of ``fit`` that make up its data."""

    x: Any
    y: Any
    sample_weight: Any = None
    class_weight: Mapping[int, float] | None = None
    validation_data: Any = None
    validation_split: float = 0.0

    def open(self) -> FitData:
        """Raises:
        UserError: it can't be used here.
        """
        check_values({"class_weight": self.class_weight, "validation_split": self.validation_split})
        training = open_data(self.x, self.y, self._weights())
        if self.validation_data is not None:
            return FitData(training, _open_validation(self.validation_data))
        if not self.validation_split:
            return FitData(training)
        if not isinstance(training.dataset, Columns):
            raise UserError("fit(validation_split=) needs arrays; give validation_data")
        first, last = training.dataset.split(self.validation_split)
        return FitData(Samples(first, training.weighted), Samples(last, training.weighted))

    def _weights(self) -> Any:
        if self.class_weight is None:
            return self.sample_weight
        if self.sample_weight is not None:
            raise UserError("fit(class_weight=, sample_weight=): give one of them, as Keras takes no more")
        if self.y is None:
            raise UserError(
                "fit(class_weight=) needs y as an array; give the weights within the data set, as (inputs, labels, weights)"
            )
        return weigh_classes(self.y, self.class_weight)


def _open_validation(given: Any) -> Samples:
    parts = tuple(given) if isinstance(given, tuple | list) else (given, None)
    if len(parts) not in (2, WITH_WEIGHTS):
        raise UserError("fit(validation_data=): expected (x, y) or (x, y, sample_weight), or a data set")
    weights = parts[2] if len(parts) == WITH_WEIGHTS else None
    return open_data(parts[0], parts[1], weights, "fit(validation_data=)")


def refuse(others: Mapping[str, Any]) -> None:
    """Raises:
    UserError: some argument that means something was given.
    """
    for name, value in others.items():
        if value is not None:
            raise UserError(f"fit({name}=) is not supported: {INSTEAD.get(name, 'leave it out')}")


def verbosity(verbose: int | str, *, alone: bool) -> int:
    """Raises:
    ArgumentError: Keras knows no such value.
    """
    if verbose == "auto":
        return 1 if alone else 2  # a line for each epoch in a log
    if verbose not in (0, 1, 2):
        raise ArgumentError(f'fit(verbose={verbose!r}): must be "auto", 0, 1 or 2')
    return int(verbose)


def complete(callbacks: Any, verbose: int) -> tuple[keras.callbacks.History, list[keras.callbacks.Callback]]:
    """The history, and all callbacks with it and what shows progress, in Keras's order.

    Raises:
        UserError: there is something else among them, or one that can't be used here.
    """
    given = [each for each in keras.tree.flatten(callbacks) if each is not None]
    for callback in given:
        if not isinstance(callback, keras.callbacks.Callback):
            raise UserError(f"fit(callbacks=): {type(callback).__name__} is not a keras.callbacks.Callback")
        if isinstance(callback, keras.callbacks.BackupAndRestore):
            raise UserError("fit(callbacks=): BackupAndRestore is not supported; use ModelCheckpoint")
    histories = [each for each in given if isinstance(each, keras.callbacks.History)]
    history = histories[0] if histories else keras.callbacks.History()
    progress = [keras.callbacks.ProgbarLogger()] if verbose else []
    return history, [*progress, *given, *([] if histories else [history])]
