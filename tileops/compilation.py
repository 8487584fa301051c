"""Compiling kernels ahead of time: which builds a call needs, found without one, and done apart.

Every builder of an in-tree target is decorated with `jit`. Inside `collecting` a builder compiles
nothing: it writes down how it was called and returns a kernel that does nothing, so an op can be
called for a GPU that is not there, on memory that nothing reads. `compile_builds` compiles what was
written down, into TileLang's cache on disk.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, partial, wraps
from importlib import import_module
from multiprocessing import get_context
from typing import Any

from tileops import repeat


class CompileError(RuntimeError):
    """A kernel that is needed cannot be compiled; the message names its builder and arguments."""


@dataclass(frozen=True)
class Build:
    """One call of a builder.

    Attributes:
        module: Where the builder is.
        name: Its name there.
        args: Its positional arguments.
        kwargs: Its named arguments, sorted.
    """

    module: str
    name: str
    args: tuple[Any, ...] = ()
    kwargs: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        given = [repr(arg) for arg in self.args]
        given += [f"{name}={value!r}" for name, value in self.kwargs]
        return f"{self.module}.{self.name}({', '.join(given)})"


# of the current call, not of the process: another thread may serve meanwhile
_collection: ContextVar[tuple[str, list[Build]] | None] = ContextVar("collection", default=None)


@contextmanager
def collecting(arch: str) -> Iterator[list[Build]]:
    """Yield a list that gets the builds of the ops called inside, each once, in order.

    No kernel is compiled or run inside: results are uninitialised memory. For ``sm_90a`` call the
    ops with ``target="cuda"`` and tensors on the CPU, which stand for those of a GPU.

    Args:
        arch: What the kernels are for: ``sm_90a``, or a level of the target ``cpu``, which this
            machine need not have.
    """
    builds: list[Build] = []
    token = _collection.set((arch, builds))
    try:
        yield builds
    finally:
        _collection.reset(token)


def collected_arch() -> str | None:
    """Return what builds are being collected for, or None in a call that is to run."""
    collection = _collection.get()
    return None if collection is None else collection[0]


def _kernel_that_does_nothing(*args: object) -> None:
    return None


def jit(
    function: Callable[..., Any] | None = None,
    *,
    why_not: Callable[[], str | None],
    prepare: Callable[[Any], None] | None = None,
    **options: Any,
) -> Callable[..., Any]:
    """Make a function that returns a ``prim_func`` a builder: one that returns a kernel.

    Args:
        function: The function; None returns the decorator.
        why_not: Says why nothing can be compiled on this machine, if that is so. Asked only after a
            build has failed: kernels of the cache on disk need no compiler.
        prepare: Is given each kernel once, before its first call.
        **options: Of ``tilelang.jit``.
    """
    if function is None:
        return partial(jit, why_not=why_not, prepare=prepare, **options)

    @cache
    def parsed() -> Callable[..., Any]:
        # at the first build: an import of all kernels would spend seconds on those never used
        import tilelang

        return tilelang.jit(**options)(function)

    module, name = function.__module__, function.__name__
    kernels: dict[Any, Any] = {}

    @wraps(function)
    def builder(*args: Any, **kwargs: Any) -> Any:
        collection = _collection.get()
        if collection is not None:
            build = Build(module, name, args, tuple(sorted(kwargs.items())))
            if build not in collection[1]:
                collection[1].append(build)
            return _kernel_that_does_nothing
        key = (args, *kwargs.items())
        kernel = kernels.get(key)
        if kernel is None:
            kernel = kernels[key] = make(args, kwargs)
        recorder = repeat.recording()
        return kernel if recorder is None else recorder.launching(kernel)

    def make(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            kernel = parsed()(*args, **kwargs)
            if prepare is not None:
                prepare(kernel)
            return kernel
        except Exception as error:
            if (reason := why_not()) is None:
                raise
            build = Build(module, name, args, tuple(sorted(kwargs.items())))
            raise CompileError(
                f"{build} is not in the kernel cache and cannot be compiled: {reason}"
            ) from error

    return builder


def compile_builds(
    builds: Iterable[Build],
    *,
    processes: int,
    cache_dir: str | os.PathLike[str] | None = None,
    report: Callable[[Build, bool], None] = lambda build, compiled: None,
) -> None:
    """Compile builds in processes of their own. No GPU is needed, and none is touched.

    Args:
        builds: As `collecting` gives them.
        processes: How many work at a time.
        cache_dir: Where the kernels go; None for the ``TILELANG_CACHE_DIR`` of this process.
        report: Called after each build, and told whether it was compiled: otherwise the cache had
            it.

    Raises:
        CompileError: If a build fails. Those that others were busy with are finished, the rest is
            not begun.
    """
    builds = list(dict.fromkeys(builds))
    if not builds:
        return
    directory = None if cache_dir is None else os.path.abspath(cache_dir)
    pool = ProcessPoolExecutor(
        min(processes, len(builds)), get_context("spawn"), _enter_worker, (directory,)
    )
    with pool:
        futures = {pool.submit(_compile, build): build for build in builds}
        try:
            for future in as_completed(futures):
                report(futures[future], future.result())
        except BrokenProcessPool as error:
            raise CompileError(
                "a process that compiled kernels was ended from outside, for want of memory "
                "perhaps: use fewer processes"
            ) from error
        finally:
            pool.shutdown(cancel_futures=True)


def _enter_worker(cache_dir: str | None) -> None:
    if cache_dir is not None:
        os.environ["TILELANG_CACHE_DIR"] = cache_dir
    import tilelang

    # its notes on what it compiles would run into the caller's report
    tilelang.set_log_level("WARNING")


def _compile(build: Build) -> bool:
    """Compile one build; return whether that was necessary."""
    builder = getattr(import_module(build.module), build.name)
    try:
        kernel = builder(*build.args, **dict(build.kwargs))
    except CompileError:
        raise
    except Exception as error:
        raise CompileError(f"{build} fails: {type(error).__name__}: {error}") from error
    # TileLang logs that it could not write, and goes on
    if not os.path.isdir(getattr(kernel, "_tilelang_cache_path", "")):
        raise CompileError(
            f"{build} was compiled, but not written to the cache: see what TileLang logged, and "
            f"whether TILELANG_DISABLE_CACHE is set"
        )
    return kernel.artifact is not None
