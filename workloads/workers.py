"""Processes that work in two parts: all get ready at the same time, then each goes on alone."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from tileops.workloads.peers import start

ENDED = "its process was ended, for want of memory perhaps: try fewer tokens"


class Workers:
    """Processes for batches of works."""

    def __init__(self, peers: Sequence[str], most: int) -> None:
        self._peers, self._most = tuple(peers), most
        self._idle: list[Worker] = []
        self._busy: list[Worker] = []

    def start_ahead(self, count: int) -> None:
        """Start processes for as many of ``count`` works as a batch may have."""
        if self._most > 1:
            self._start(min(count, self._most))

    def _start(self, count: int) -> None:
        self._idle += [Worker(self._peers) for _ in range(count - len(self._idle))]

    def run(self, works: Sequence[tuple], batches: list[list[int]]) -> Iterator[tuple[int, Any]]:
        """Yield the number of each work and its result."""
        left = len(works)
        for batch in batches:
            left -= len(batch)
            self._start(len(batch))
            self._busy, self._idle = self._idle[: len(batch)], self._idle[len(batch) :]
            for worker, number in zip(self._busy, batch, strict=True):
                worker.send(works[number])
            for worker in self._busy:
                if worker.result() is not None:
                    worker.close()
            self.start_ahead(left)
            for worker, number in zip(self._busy, batch, strict=True):
                worker.send(None)
                result = worker.result()
                worker.close()
                yield number, result

    def close(self) -> None:
        """End all processes."""
        for worker in self._busy + self._idle:
            worker.close()


class Worker:
    """A process that imports, then does one work in two parts, each when it is sent word.

    A work is a generator function and its arguments. It yields None when it is ready for the second
    part, then its result; or its result at once. The result is a string where the work fails.
    """

    def __init__(self, peers: Sequence[str]) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, peers), daemon=True)
        self._process.start()
        theirs.close()
        self._result: Any = None

    def send(self, work: tuple | None) -> None:
        """Send the process its work, or word to go on with it."""
        with suppress(OSError):  # if it has ended, the result says so
            self._pipe.send(work)

    def result(self) -> Any:
        """Wait for the result; None: it is ready to go on."""
        if self._result is None:
            try:
                self._result = self._pipe.recv()
            except (EOFError, OSError):
                self._result = ENDED
        return self._result

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.join()
        self._pipe.close()


def _serve(pipe: Connection, peers: Sequence[str]) -> None:
    import tilelang

    tilelang.set_log_level("WARNING")
    try:
        start(peers)
        work, *args = pipe.recv()
        for found in work(*args):
            pipe.send(found)
            pipe.recv()
    except (EOFError, KeyboardInterrupt):
        pass  # nobody waits for the result
    except Exception as error:
        pipe.send(in_words(error))


def in_words(error: Exception) -> str:
    """Return what a row says of an error."""
    return f"{type(error).__name__}: {error}"[:300]
