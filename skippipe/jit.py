"""Kernels: plain Python functions over arrays, compiled by numba where numba is there.

The simulator and the search run them compiled. The training runtime calls the same functions (which task is next, which
stage may follow) a few times a second, on machines that need not have numba, and takes them as they are written.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]
"""Arrays that kernels take."""

Function = TypeVar("Function", bound=Callable[..., object])

OPTIONS: dict[str, Any] = {"nogil": True, "no_cfunc_wrapper": True}
"""Nobody calls kernels from C: to allow it takes a tenth longer."""
COMPILED_WITHIN_S = 120.0  # by a process beside this one; from then on this one compiles for itself


def kernel(function: Function) -> Function:
    """Compile at the first call and keep the machine code on disk for the next process."""
    return _compiled(function, for_python=True)


def inner_kernel(function: Function) -> Function:
    """A kernel that kernels call, and Python hardly ever: then it is run as it is written.

    What takes arguments from Python takes numba longer to compile than most functions do: for the tables of the search,
    which are two dozen arrays, six times as long.
    """
    return _compiled(function, for_python=False)


def _compiled(function: Function, *, for_python: bool) -> Function:
    if os.environ.get("SKIPPIPE_PURE_PYTHON"):
        return function
    try:
        import numba
    except ImportError:
        return function
    settings: Any = numba.config
    if settings.DISABLE_JIT:
        return function
    compiler = numba.njit(**OPTIONS) if for_python else _inner_dispatcher
    before = settings.CACHE_DIR
    settings.CACHE_DIR = str(_cache_folder())
    dispatcher = compiler(function)
    try:
        dispatcher.enable_caching()
        _do_without_damaged(dispatcher._cache)
    except (RuntimeError, OSError):  # nowhere to write: compile anew in every process
        pass
    finally:
        settings.CACHE_DIR = before
    return cast(Function, dispatcher)


def _do_without_damaged(cache: Any) -> None:
    """Let kernels be compiled anew where their files are damaged, as after a power loss, or cannot be written."""
    load, save = cache.load_overload, cache.save_overload

    def load_overload(signature: Any, context: Any) -> Any:
        try:
            return load(signature, context)
        except Exception:  # of half a pickle: nearly any
            with suppress(OSError):
                cache.flush()
            return None

    def save_overload(signature: Any, compiled: Any) -> None:
        with suppress(OSError):
            save(signature, compiled)

    cache.load_overload, cache.save_overload = load_overload, save_overload


def _inner_dispatcher(function: Function) -> Any:
    """What `numba.njit` makes, but without an entry for Python, which would jump to address 0."""
    from numba.core.registry import CPUDispatcher

    class InnerKernel(CPUDispatcher):
        def __call__(self, *given: Any) -> Any:
            return self.py_func(*given)

    options = {"nopython": True, "no_cpython_wrapper": True, **OPTIONS}
    return InnerKernel(function, targetoptions=options)


def cores() -> int:
    """Cores that this process may use: in a container, or bound to some of them, fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@contextmanager
def compile_beside(code: str) -> Iterator[None]:
    """Compile in a second process meanwhile, where nothing is compiled yet: what it compiles is in the cache then.

    numba compiles one kernel at a time in a process. If the other process fails, all is compiled here when it is
    needed.
    """
    cold = _cache_dir is not None and _cache_dir.is_dir() and not any(_cache_dir.rglob("*.nbi"))
    if not cold:
        yield
        return
    null = subprocess.DEVNULL
    other = subprocess.Popen([sys.executable, "-c", code], stdin=null, stdout=null, stderr=null)
    try:
        yield
        other.wait(COMPILED_WITHIN_S)
    except subprocess.TimeoutExpired:
        pass
    finally:
        other.kill()
        other.wait(COMPILED_WITHIN_S)


def python_version(function: Function) -> Function:
    """The function as it is written, for callers that need it now and then and should not have to compile it."""
    return cast(Function, getattr(function, "py_func", function))


_cache_dir: Path | None = None


def _cache_folder() -> Path:
    """The cache folder: one for each state of our sources.

    numba notices a change of the file a kernel stands in, but not of the kernels it calls from other files.
    """
    global _cache_dir
    if _cache_dir is None:
        package = Path(__file__).parent
        sources = sha256()
        patterns = ("*.py", "codecs/*.py", "collectives/*.py", "planner/**/*.py")
        for file in sorted(file for pattern in patterns for file in package.glob(pattern)):
            sources.update(file.read_bytes())
        root = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
        _cache_dir = root / "skippipe" / sources.hexdigest()[:12]
    return _cache_dir
