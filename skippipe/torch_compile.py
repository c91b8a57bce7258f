"""Functions of tensors as kernels that torch.compile makes, above all for GPUs."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

MOST_COMPILED = 64  # forms of a function that torch.compile keeps: each device, type and kind of pass takes one
MOST_QUOTED = 200  # characters of an error of a compiler


def keep_compiled_forms() -> None:
    """Have torch.compile keep more forms of a function than its usual few, beyond which it compiles no more; each whole
    number that a function reads from an object is a constant of its form. In all threads of this process."""
    from torch._dynamo import config

    _set_option(config, "recompile_limit", max(getattr(config, "recompile_limit", 0), MOST_COMPILED))
    _set_option(config, "specialize_int", True)  # or the second codec with other bits would be compiled for any bits


def _set_option(config: Any, name: str, value: object) -> None:
    """Set an option of torch's compiler. From torch 2.12 on that holds in the thread that sets it alone, and functions
    are compiled in the thread that first calls them, so the default, which all other threads have, is changed too."""
    setattr(config, name, value)
    entry: Any = getattr(config, "_config", {}).get(name)
    if hasattr(entry, "default"):
        entry.default = value


def compiled_on_device(function: Callable[..., Any], what: str, **options: Any) -> Callable[..., Any]:
    """A function of tensors as kernels that torch.compile makes at the first call, without gradients. Where it cannot,
    the function as it is, after a warning that says `what` is slower: a run does not end for that."""
    import torch
    from torch._dynamo.exc import TorchDynamoException

    def warn(error: Exception) -> None:
        reason = " ".join(str(error).split())[:MOST_QUOTED]  # its first line may say no more than which compiler
        warnings.warn(f"{what} is not compiled, and slower: {reason}", stacklevel=3)

    keep_compiled_forms()
    made: Callable[..., Any] | None = None
    try:
        made = torch.compile(function, fullgraph=True, **options)
    except RuntimeError as error:  # an option that this version of torch does not have
        warn(error)

    def run(*given: Any, **named: Any) -> Any:
        nonlocal made
        with torch.no_grad():
            if made is not None:
                try:
                    return made(*given, **named)
                except TorchDynamoException as error:  # of the compiler: nothing was computed yet
                    made = None
                    warn(error)
            return function(*given, **named)

    return run
