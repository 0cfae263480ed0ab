"""What all groups of options have in common."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict


class OptionGroup(BaseModel):
    """Options that belong together; the docstring of a group is its title in the help."""

    model_config = ConfigDict(frozen=True, extra="forbid")


def fields_of(group: type[BaseModel]) -> dict[str, Any]:
    """The fields that a group declares itself, by name, in order."""
    return {name: field for name, field in group.model_fields.items() if name in group.__annotations__}


def aliases_of(field: Any) -> tuple[str, ...]:
    """Further names under which people may give an option."""
    return tuple((field.json_schema_extra or {}).get("aliases", ()))
