"""What several tests of the transport share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.helpers.mailboxes import Net, network


@pytest.fixture
def net() -> Iterator[Net]:
    """Mailboxes with encrypted connections."""
    with network("curve") as made:
        yield made
