"""What several tests of the runtime share."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture
def quiet_nodes() -> Iterator[None]:
    """Nodes say what they drop, which is a lot."""
    log = logging.getLogger("skippipe.runtime")
    log.setLevel(logging.ERROR)
    yield
    log.setLevel(logging.NOTSET)
