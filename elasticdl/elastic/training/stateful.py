"""Objects that say their state, and take it, by two methods."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Stateful(Protocol):
    """A scheduler of torch, a GradScaler, a metric: anything with the usual two methods."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


def is_stateful(value: Any) -> bool:
    """As isinstance() says after a hundred times the time, which each commit would pay."""
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")
