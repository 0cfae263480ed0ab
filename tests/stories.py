"""Tests that are stories: a coroutine function, whose first argument is a scene that is opened before it and closed after it."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

Story = Callable[..., Awaitable[None]]


def on(scene: Callable[..., AbstractAsyncContextManager[Any]]) -> Callable[[Story], Callable[..., None]]:
    """Makes a test of a story. Arguments of ``scene`` without a default are fixtures, as those of the story but the first."""
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
