"""Optional dependencies."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from skippipe.errors import UserError


def require(package: str, extra: str, purpose: str) -> Any:
    """The imported package; UserError with how to install it if it is missing."""
    try:
        return import_module(package)
    except ImportError as error:
        if error.name not in (package, None):  # it is there, but something below it is broken
            raise UserError(f"{purpose} needs the package '{package}', which cannot be imported: {error}") from None
        raise UserError(
            f"{purpose} needs the package '{package}': install it with pip install 'skippipe[{extra}]'"
        ) from None
