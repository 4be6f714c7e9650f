"""Units of work in parallel: a few processes on one machine, each with its own torch.

A worker dies with the process that started it, and leaves Ctrl-C to that process.
"""

import os
import pickle
import signal
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import get_context, parent_process, resource_tracker
from multiprocessing.connection import Connection, wait
from threading import Thread
from time import monotonic, perf_counter
from typing import Any, NamedTuple, Protocol

import torch

from ortholand_lab.datasets import Dataset, Source
from ortholand_lab.study.environment import machine, torch_threads
from ortholand_lab.study.records import Result
from ortholand_lab.study.spec import Context

QUIET = 0.2  # seconds between a worker's progress messages


class Done(NamedTuple):
    """The result of a unit, and its circumstances."""

    result: Result
    machine: dict[str, str | int]
    seconds: float


@dataclass(frozen=True)
class Work:
    """A unit as a worker needs it; all of it can be pickled."""

    run: Callable[[Any, Context], Result]
    task: Any
    seed: int
    device: str
    threads: int
    source: Source | None

    def do(self, tick: Callable[[int], None], data: Dataset | None) -> Done:
        """Do it in this process."""
        device = torch.device(self.device)
        with torch_threads(self.threads):
            start = perf_counter()
            result = self.run(self.task, Context(self.seed, device, tick, data))
            return Done(result, machine(device), perf_counter() - start)


class Doable(Protocol):
    """What a worker can be sent: a :class:`Work`, or anything like it that can be pickled."""

    @property
    def source(self) -> Source | None:
        """The source of the data that it needs, if any."""

    def do(self, tick: Callable[[int], None], data: Dataset | None, /) -> Any:
        """Do it; the return value is sent back."""


class Failure(NamedTuple):
    """An error in a worker, if it can be sent, and its traceback."""

    error: Exception | None
    seen: str

    @classmethod
    def of(cls, error: Exception) -> "Failure":
        """The failure for an error that is being handled."""
        seen = traceback.format_exc()
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:
            return cls(None, seen)
        return cls(error, seen)


class WorkerError(RuntimeError):
    """A unit failed in its process; the message is the traceback from there."""


@contextmanager
def workers(count: int) -> Iterator[list[Connection]]:
    """Processes that do the work sent to them. At the end, and on any error, they are killed."""
    context = get_context("spawn")  # a fork would inherit torch's threads without the threads
    with ExitStack() as stack:
        pipes = []
        with _sigint_blocked():
            for _ in range(count):
                here, there = context.Pipe()
                process = context.Process(target=_serve, args=(there,), daemon=True)
                process.start()
                stack.callback(process.join)
                stack.callback(process.kill)
                there.close()
                pipes.append(here)
        yield pipes


@contextmanager
def _sigint_blocked() -> Iterator[None]:
    """Processes started in this context never receive Ctrl-C; this one receives it afterwards."""
    resource_tracker.ensure_running()  # starting it unblocks the signal
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def do_side_by_side(
    works: Sequence[Doable],
    count: int,
    tick: Callable[[int, int], None],
    done: Callable[[int, Any], None],
) -> None:
    """Do all work in ``count`` processes. ``tick`` and ``done`` are called with that work."""
    with workers(min(count, len(works))) as pipes:
        waiting, busy = iter(enumerate(works)), {}
        for pipe in pipes:
            busy[pipe] = _send_next(pipe, waiting)
        while any(index is not None for index in busy.values()):
            active = [pipe for pipe, index in busy.items() if index is not None]
            for pipe in wait(active):
                assert isinstance(pipe, Connection)
                message, index = _receive(pipe), busy[pipe]
                assert index is not None
                if isinstance(message, int):
                    tick(index, message)
                    continue
                busy[pipe] = _send_next(pipe, waiting)
                done(index, message)


def _send_next(pipe: Connection, waiting: Iterator[tuple[int, Doable]]) -> int | None:
    index, work = next(waiting, (None, None))
    if work is not None:
        with _alive():
            pipe.send(work)
    return index


def _receive(pipe: Connection) -> Any:
    with _alive():
        message = pipe.recv()
    if isinstance(message, Failure):
        if message.error is None:
            raise WorkerError(message.seen)
        raise message.error from WorkerError(message.seen)
    return message


@contextmanager
def _alive() -> Iterator[None]:
    try:
        yield
    except (EOFError, BrokenPipeError, ConnectionResetError):
        raise WorkerError("A worker process has died, perhaps for lack of memory.") from None


def _serve(pipe: Connection) -> None:
    """What a worker does until the process that started it is gone."""
    Thread(target=_end_with_parent, daemon=True).start()
    shelf: dict[bytes, Dataset] = {}  # a data set is read once, by whatever way it was found
    with suppress(BrokenPipeError, ConnectionResetError):  # nobody listens any more
        while True:
            pipe.send(_answer(pipe, shelf))


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)  # even in the middle of a unit


def _answer(pipe: Connection, shelf: dict[bytes, Dataset]) -> Any:
    try:
        work, ticker = pipe.recv(), _Ticker(pipe)
        done = work.do(ticker, _data(work.source, shelf))
        ticker.flush()
        return done
    except Exception as error:
        return Failure.of(error)


def _data(source: Source | None, shelf: dict[bytes, Dataset]) -> Dataset | None:
    if source is None:
        return None
    key = pickle.dumps(source)  # of one identity are also images in different shapes
    if key not in shelf:
        shelf[key] = source.load()
    return shelf[key]


class _Ticker:
    """Sends how many steps were done, no more often than a human can see."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe, self._steps, self._sent = pipe, 0, monotonic()

    def __call__(self, steps: int) -> None:
        self._steps += steps
        if monotonic() - self._sent > QUIET:
            self.flush()

    def flush(self) -> None:
        self._pipe.send(self._steps)
        self._steps, self._sent = 0, monotonic()
