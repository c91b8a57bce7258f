"""What is carried to a GPU machine is whole."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, distribution

from benchmarks.gpu_bundle import PACKAGES

THERE = ("torch", "transformers", "tokenizers", "safetensors", "numpy")  # with all that they need


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def needs(names: tuple[str, ...]) -> set[str]:
    """These packages, and what they need without extras, as far as it is installed here."""
    found: set[str] = set()
    waiting = [normal(name) for name in names]
    while waiting:
        name = waiting.pop()
        try:
            wanted = distribution(name).requires or ()
        except PackageNotFoundError:
            continue
        if name not in found:
            found.add(name)
            waiting += [normal(re.split(r"[^\w.-]", each)[0]) for each in wanted if "extra ==" not in each]
    return found


def test_nothing_is_missing_that_a_package_of_the_bundle_needs() -> None:
    assert needs(PACKAGES) <= {normal(each) for each in PACKAGES} | needs(THERE)
