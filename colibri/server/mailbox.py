"""Messages from the engine's thread to a coroutine, which never keep the sender waiting."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class Mailbox(Generic[T]):
    """Made and read on the event loop, filled from any thread."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._items: deque[T] = deque()
        self._filled = asyncio.Event()
        self._called = False  # one wake-up for many messages

    def post(self, item: T) -> None:
        """Put a message in; after the loop has ended there is nobody to read it."""
        self._items.append(item)
        if not self._called:
            self._called = True
            try:
                self._loop.call_soon_threadsafe(self._filled.set)
            except RuntimeError:
                self._items.clear()

    async def take(self, timeout: float | None = None) -> list[T]:
        """All messages there are, at least one; none when `timeout` seconds brought none."""
        while not self._items:
            self._filled.clear()
            self._called = False
            if self._items:  # came in between
                break
            try:
                await asyncio.wait_for(self._filled.wait(), timeout)
            except asyncio.TimeoutError:
                return []
        items = []
        while self._items:
            items.append(self._items.popleft())
        return items
