"""What torch.compile cannot make kernels of is computed as it is written."""

from __future__ import annotations

import warnings

import pytest
import torch

from skippipe.jit import compiled_on_device


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


def test_what_is_compiled_gives_the_same_in_many_forms(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than torch keeps by itself: a node has passes of several kinds on each of its devices."""
    monkeypatch.setattr(torch._dynamo.config, "recompile_limit", 8)
    calls = []

    def backend(module: torch.fx.GraphModule, _inputs: object) -> object:
        calls.append(module)
        return module.forward

    run = compiled_on_device(lambda tensor, by: tensor.mul_(by), "the step", backend=backend, dynamic=False)
    for size in range(2, 14):
        given = torch.ones(size)
        for _ in range(2):
            run(given, by=2.0)
        assert given.tolist() == [4.0] * size
    assert len(calls) == 12
