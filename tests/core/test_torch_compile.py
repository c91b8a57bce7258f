"""What torch.compile cannot make kernels of is computed as it is written."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from skippipe.torch_compile import compiled_on_device

WITHIN_S = 120.0


def branching(tensor: torch.Tensor, by: float) -> torch.Tensor:
    """Which way it goes is known when it runs: no compiler takes that."""
    return tensor.mul_(by) if tensor.sum() > 0 else tensor


@pytest.mark.parametrize(
    ("options", "reason"),
    [({"backend": "eager"}, ""), ({"options": {"no_such": 1}}, "no_such")],
    ids=["code", "option"],
)
def test_what_is_not_compiled_is_computed_once_and_said_once(options: dict[str, object], reason: str) -> None:
    with pytest.warns(UserWarning, match=f"the step is not compiled, and slower: .*{reason}"):
        run = compiled_on_device(branching, "the step", **options)
        given = torch.ones(3, requires_grad=True).detach()
        assert run(given, by=2.0) is given
    assert given.tolist() == [2.0, 2.0, 2.0]
    with warnings.catch_warnings(action="error"):
        assert run(given, by=2.0).tolist() == [4.0, 4.0, 4.0]


@pytest.fixture
def few_forms() -> Iterator[None]:
    """torch keeps as few forms of a function as it does by itself. Not with `monkeypatch`, which deletes what was not
    in the `__dict__` of a module: torch hides an option that was deleted from all tests that follow."""
    entry = torch._dynamo.config._config["recompile_limit"]
    torch.compiler.reset()
    before, entry.default = entry.default, 8
    with torch._dynamo.config.patch(recompile_limit=8):
        yield
    entry.default = before


@pytest.mark.usefixtures("few_forms")
@pytest.mark.parametrize("threads", [0, 1], ids=["here", "in another thread"])
def test_what_is_compiled_gives_the_same_in_many_forms(threads: int) -> None:
    """More than torch keeps by itself: a node has passes of several kinds on each of its devices, and a thread for
    each."""
    calls = []

    def backend(module: torch.fx.GraphModule, _inputs: object) -> object:
        calls.append(module)
        return module.forward

    run = compiled_on_device(lambda tensor, by: tensor.mul_(by), "the step", backend=backend, dynamic=False)

    def call() -> None:
        for size in range(2, 14):
            given = torch.ones(size)
            for _ in range(2):
                run(given, by=2.0)
            assert given.tolist() == [4.0] * size

    if threads:
        with ThreadPoolExecutor(threads) as pool:
            pool.submit(call).result(WITHIN_S)
    else:
        call()
    assert len(calls) == 12
