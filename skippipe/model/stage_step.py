"""The tasks of a node on real tensors: forward, head, backward, weight gradients. One process uses the same.

`StageStep` holds what a microbatch leaves behind from its forward to the end of its backward, and adds up gradients
over the microbatches that came. A microbatch that comes again after a failure, because a node further on needs it,
may not count: then its input gradient is as before and nothing is added. With bf16, what flows between layers is bf16
and so are the products, under autocast; weights, gradients and norms stay fp32.

A stage may be driven: what it adds to a microbatch counts several times. And the head may also look at what stage 0
alone has made of one (early exit), which then learns from that loss too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from skippipe.model.flat_params import FlatParams
from skippipe.model.model_spec import ModelSpec
from skippipe.model.split_backward import Later, add_weight_gradients, split_linears
from skippipe.model.stage import StageModel
from skippipe.optim_config import OptimConfig

Key = tuple[int, int]
"""Lane and microbatch of the lane."""


class SavedForBackward(NamedTuple):
    """What a microbatch keeps on a node for its backward pass."""

    given: Tensor
    made: Tensor
    balance: Tensor | None
    early: Tensor | None = None
    """The gradient of what was made, by the loss of an early exit."""


class EarlyExit(NamedTuple):
    """What the loss of an early exit takes, beside what stage 0 has made."""

    labels: Tensor
    weight: float
    counts: bool


class StageStep:
    def __init__(
        self,
        spec: ModelSpec,
        layers: range,
        learning: OptimConfig,
        *,
        ends: bool,
        device: str = "cpu",
        compute_dtype: str = "fp32",
        recompute: bool = False,
        split_backward: bool = False,
        compiled: bool = False,
    ) -> None:
        self.model = StageModel(spec, layers, ends=ends, recompute=recompute).to(device)
        self.weights = FlatParams(self.model.named_weights(), learning)
        self.device = device
        self.held: dict[Key, SavedForBackward] = {}
        self.put_off: dict[Key, Later] = {}
        self._exits: dict[Key, EarlyExit] = {}
        self._later: Later = []
        self._low_precision = compute_dtype == "bf16"
        if split_backward:
            split_linears(self.model.layers, self._later)
        self._loss: Callable[[Tensor, Tensor], Tensor] = self.model.loss
        if compiled:
            self._compile()
        self._split = split_backward

    def begin(self, key: Key, tokens: Tensor) -> Tensor:
        """The forward pass at the data node. Like any other, it takes the place of an earlier one of the microbatch."""
        with self._autocast():
            made = self._keep(key, self.model.embed(tokens))
        self._exit_early(key)
        return made

    def forward(self, key: Key, hidden: Tensor, drive: float = 1.0) -> Tensor:
        """What the stage adds to what came in is multiplied by `drive`."""
        return self._keep(key, hidden.detach().requires_grad_(), drive)

    def head(
        self, key: Key, hidden: Tensor, labels: Tensor, *, early: float = 0.0, counts: bool = True
    ) -> tuple[Tensor, Tensor]:
        """The loss, and its gradient with respect to what came in.

        `early` is the weight of a second loss, of what this stage alone has made of the microbatch. Its gradient joins
        the other one at the backward pass.
        """
        loss, back = self._headed(hidden, labels, 1.0, counts)
        if early:
            self._exits[key] = EarlyExit(labels, early, counts)
            self._exit_early(key)
        return loss, back

    def backward(self, key: Key, gradient: Tensor, *, counts: bool = True) -> Tensor | None:
        """The gradient for the node before; None at the data node, where the microbatch began."""
        held = self.held.pop(key)
        counts = counts and key not in self.put_off  # or it came before, and counts when what was put off is added
        if held.early is not None:
            gradient = gradient + held.early
        roots, gradients = [held.made], [gradient.to(held.made.dtype)]
        if held.balance is not None:
            roots.append(held.balance)
            gradients.append(torch.ones_like(held.balance))
        back = _back_to(held.given, roots, gradients, counts)
        with torch.no_grad():
            self.model.balance()  # routers that were recomputed have noted their scores again: not for the next one
        if self._split and counts:
            self.put_off[key] = self._later.copy()
        self._later.clear()
        return back

    def weight_gradients(self, key: Key, *, counts: bool = True) -> None:
        """What a split backward has put off; one that did not count has put off nothing."""
        if counts:
            add_weight_gradients(self.put_off.pop(key))
        else:
            self.put_off.pop(key, None)

    def drop(self, key: Key) -> None:
        """Forget a microbatch, if it is here."""
        self.held.pop(key, None)
        self.put_off.pop(key, None)
        self._exits.pop(key, None)

    def forget(self) -> None:
        """Drop whatever is in flight."""
        self.held.clear()
        self.put_off.clear()
        self._exits.clear()
        self._later.clear()

    def _keep(self, key: Key, given: Tensor, drive: float = 1.0) -> Tensor:
        self.held.pop(key, None)  # before the new one takes its memory; what was put off is due all the same
        with self._autocast():
            flows = given.to(torch.bfloat16) if self._low_precision else given
            made: Tensor = self.model(flows)
            if drive != 1.0:
                made = torch.lerp(flows, made, drive)
            self.held[key] = SavedForBackward(given, made, self.model.balance())
        return made.detach()

    def _headed(self, hidden: Tensor, labels: Tensor, weight: float, counts: bool) -> tuple[Tensor, Tensor]:
        given = hidden.detach().requires_grad_()
        with self._autocast():
            loss = self._loss(given, labels)
        back = _back_to(given, [loss], [torch.full_like(loss, weight)], counts)
        assert back is not None
        return loss.detach(), back

    def _exit_early(self, key: Key) -> None:
        """As soon as both are here: what stage 0 has made, and the labels. An heir may run the head first."""
        if key not in self.held or key not in self._exits:
            return
        held, (labels, weight, counts) = self.held[key], self._exits.pop(key)
        _, back = self._headed(held.made.float(), labels, weight, counts)
        self.held[key] = held._replace(early=back)

    def _compile(self) -> None:
        """Layer by layer: they are alike, so one is compiled and all use it. The head with the loss is another."""
        for layer in self.model.layers:
            layer.compile(dynamic=False)
        if self.model.head is not None:
            self._loss = torch.compile(self.model.loss, dynamic=False)

    def _autocast(self) -> Any:
        return torch.autocast(torch.device(self.device).type, torch.bfloat16, enabled=self._low_precision)


def _back_to(given: Tensor, roots: list[Tensor], gradients: list[Tensor], counts: bool) -> Tensor | None:
    """The gradient of what was given, None if that comes out of the embedding; if it counts, the weights' are added."""
    if counts:
        torch.autograd.backward(roots, gradients)
        return given.grad if given.is_leaf else None
    return torch.autograd.grad(roots, [given], gradients)[0] if given.is_leaf else None
