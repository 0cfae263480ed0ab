"""Tests that are stories: in words, or as a coroutine function with a scene that is opened before it and closed after it."""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

Story = Callable[..., Awaitable[None]]


def on(scene: Callable[..., AbstractAsyncContextManager[Any]]) -> Callable[[Story], Callable[..., None]]:
    """Makes a test of a story, whose first argument is the scene. Arguments of ``scene`` without a default are fixtures, as those of the story but the first."""
    for_scene = [name for name, each in inspect.signature(scene).parameters.items() if each.default is each.empty]

    def decorate(story: Story) -> Callable[..., None]:
        _, *for_story = inspect.signature(story).parameters

        def run(**given: Any) -> None:
            async def whole() -> None:
                async with scene(**{name: given[name] for name in for_scene}) as opened:
                    await story(opened, **{name: given[name] for name in for_story})

            asyncio.run(whole())

        run.__name__, run.__doc__, run.__module__ = story.__name__, story.__doc__, story.__module__
        asked = dict.fromkeys([*for_scene, *for_story])
        run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in asked]
        )
        return run

    return decorate


def on_each(benches: Mapping[str, Callable[[Path], AbstractAsyncContextManager[Any]]]) -> Callable[[Story], Any]:
    """As `on`, for each bench that can be made in a folder: so a contract is tried on all who have to keep it."""

    @asynccontextmanager
    async def opened(make: Any, tmp_path: Path) -> AsyncIterator[Any]:
        async with make(tmp_path) as bench:
            yield bench

    return lambda story: pytest.mark.parametrize("make", benches.values(), ids=benches)(on(opened)(story))


# ---- stories in words ----


def told_in(text: str) -> list[Any]:
    """The stories of a text, for `pytest.mark.parametrize`: of each its lines, the title first.

    A title stands at the left; below it are lines of events, and after an arrow what comes of them. What is indented further goes on
    the line before. A line `for WORD in a, b` makes a story of each.
    """
    found = []
    for block in re.split(r"\n(?=\S)", dedent(text).strip()):
        title, *lines = filter(str.strip, re.sub(r"\n {6,}", " ", block).splitlines())
        loop = re.fullmatch(r"\s+for (\w+) in (.*)", lines[0])
        for value in loop[2].split(", ") if loop else [""]:
            told = [line.replace(loop[1], value) for line in (title, *lines[1:])] if loop else [title, *lines]
            found.append(pytest.param(told, id=f"{title.partition(' (')[0]} {value}".strip()))
    return found


def parts_of(text: str) -> list[str]:
    return list(filter(None, map(str.strip, re.split(r"; |;$", text))))


def settings_of(title: str) -> dict[str, str]:
    """What stands in brackets at its end; the value of a name alone is empty."""
    found = re.search(r" \((.*)\)$", title)
    given = (each.partition("=") for each in found[1].split(", ")) if found else ()
    return {name: value for name, _, value in given}


def is_meant(expected: Sequence[str], told: Sequence[str], reason: str = "") -> bool:
    """`...` stands for any text, or alone for any number of items. ``reason``: after it an item may have more than is expected."""
    more = f"({reason}[^\0]*)?" if reason else ""
    items = (
        "[^\0]*".join(map(re.escape, each.split("..."))) + f"{more}\0" if each != "..." else "(.*\0)?"
        for each in expected
    )
    return bool(re.fullmatch("".join(items), "".join(f"{each}\0" for each in told), re.DOTALL))


def check(line: str, told: Sequence[str], fact: Callable[[str], str] = str) -> None:
    """What a line says after its arrow: all that is told, in order (`nothing`: nothing is), and facts, as in ``name = value``."""
    _, arrow, outcomes = line.partition("->")
    facts = [each for each in parts_of(outcomes) if re.search(r" =( |$)", each)]
    expected = [each for each in parts_of(outcomes) if each not in facts]
    assert facts or expected or not arrow, f"nothing is said after the arrow: {line}"
    if expected:
        wanted = [each for each in expected if each != "nothing"]
        assert is_meant(wanted, told, ": "), f"{line.strip()}\ntold: {'; '.join(told) or 'nothing'}"
    for each in facts:
        name, _, value = (part.strip() for part in each.partition(" ="))
        assert is_meant([value], [fact(name)]), f"{line.strip()}\n{name} is: {fact(name)}"
