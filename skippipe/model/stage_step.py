"""The tasks of a stage on real tensors: forward, head, backward, weight gradients.

`StageStep` holds what a microbatch leaves behind from its forward to the end of its backward, and adds up gradients
over the microbatches that came. A microbatch that comes again after a failure, because a node further on needs it,
may not count: then its input gradient is as before and nothing is added. With bf16, activations and products are bf16,
under autocast; weights, gradients and norms stay fp32.

What a stage adds to a microbatch may be scaled up, for the stages that were skipped; or a bridge stands in for those
between the stage and the one where the path goes on. And the head may also look at the
output of stage 0 alone (early exit), which then learns from that loss too.

A split backward gives input gradients at once, because other nodes wait for them, and weight gradients later. The
layers' linear maps, which hold nearly all weights, defer their weight gradient: backward notes the input and the output
gradient, and the product of the two is made later. Everything else (norms, routers, experts that are not linear
modules) is small or cannot be deferred, and is done with the input gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from skippipe.jit import keep_compiled_forms
from skippipe.model.flat_params import FlatParams
from skippipe.model.model_spec import ModelSpec
from skippipe.model.stage import Bridges, StageModel
from skippipe.optim.config import OptimConfig

DeferredGradients = list[tuple[nn.Parameter, Tensor, Tensor]]
"""Weight, input and output gradient of every linear map whose weight gradient is still to be computed."""
Key = tuple[int, int]
"""Lane and microbatch of the lane."""


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, master: nn.Parameter, deferred: DeferredGradients) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.master = master
        ctx.deferred = deferred
        return functional.linear(inputs, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,) = gradients
        inputs, weight = ctx.saved_tensors
        ctx.deferred.append((ctx.master, inputs, gradient))
        return gradient @ weight, None, None, None


class SplitLinear(nn.Linear):
    """A linear map whose backward pass defers its weight gradient."""

    deferred: DeferredGradients

    def forward(self, inputs: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return super().forward(inputs)
        weight: Tensor = self.weight
        device = inputs.device.type
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
            inputs, weight = inputs.to(dtype), weight.to(dtype)
        output: Tensor = _Linear.apply(inputs, weight.detach(), self.weight, self.deferred)  # type: ignore[no-untyped-call]
        return output if self.bias is None else output + self.bias.to(output.dtype)


def split_linears(layers: nn.Module, deferred: DeferredGradients) -> None:
    """Make every linear map in these layers that is trained defer its weight gradient into this list."""
    for module in layers.modules():
        if type(module) is nn.Linear and module.weight.requires_grad:
            module.__class__ = SplitLinear
            module.deferred = deferred  # type: ignore[assignment]


def add_weight_gradients(deferred: DeferredGradients) -> None:
    """Compute weight gradients that were deferred, and add them to their sums."""
    with torch.no_grad():
        for weight, inputs, gradient in deferred:
            assert weight.grad is not None
            rows, columns = gradient.flatten(0, -2), inputs.flatten(0, -2)
            if rows.dtype == weight.grad.dtype:
                weight.grad.addmm_(rows.T, columns)
            else:
                weight.grad.add_(rows.T @ columns)


class SavedForBackward(NamedTuple):
    """What a microbatch keeps on a node for its backward pass."""

    inputs: Tensor
    outputs: Tensor
    balance: Tensor | None
    """The balancing loss of the stage's routers."""
    early: Tensor | None = None
    """The gradient of the outputs, by the loss of an early exit."""
    bridged: Tensor | None = None
    """The outputs with what their bridge adds, if the path goes over one."""


class EarlyExit(NamedTuple):
    """What the loss of an early exit takes, beside the outputs of stage 0."""

    labels: Tensor
    weight: float
    counts: bool


class StageStep:
    """A stage of the model, its weights and gradients, and the microbatches that are on their way through it."""

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
        offload: bool = False,
        bridges: Bridges | None = None,
    ) -> None:
        """`offload`: the optimizer's state is held in host memory."""
        self.model = StageModel(spec, layers, ends=ends, recompute=recompute, bridges=bridges).to(device)
        if compute_dtype == "bf16":
            self.model.frozen_to(torch.bfloat16)
        trained, frozen = self.model.trained_weights(), self.model.frozen_weights()
        self.weights = FlatParams(trained, learning, frozen, offload=offload, compiled=compiled)
        self.device = device
        self.held: dict[Key, SavedForBackward] = {}
        self.deferred: dict[Key, DeferredGradients] = {}
        """Weight gradients that a split backward has deferred, by microbatch."""
        self._exits: dict[Key, EarlyExit] = {}
        self._deferred_now: DeferredGradients = []
        """Those of the backward pass that is running."""
        self._low_precision = compute_dtype == "bf16"
        if split_backward:
            split_linears(self.model.layers, self._deferred_now)
        self._loss: Callable[[Tensor, Tensor], Tensor] = self.model.loss
        if compiled:
            self._compile()
        self._split = split_backward

    def begin(self, key: Key, tokens: Tensor, starts: Tensor | None = None, target: int = 0) -> Tensor:
        """The forward pass at the data node. Like any other, it replaces an earlier one of the same microbatch."""
        with self.autocast():
            outputs = self._forward(key, self.model.embed(tokens), starts=starts, target=target)
        self._exit_early(key)
        return outputs

    def forward(
        self, key: Key, hidden: Tensor, residual_scale: float = 1.0, starts: Tensor | None = None, target: int = 0
    ) -> Tensor:
        """The forward pass of the stage, whose contribution to the residual stream is multiplied by this scale.

        `starts` is where conversations begin (see `StageModel.forward`); `target` the stage where the path goes on, or
        the number of stages for the head: past other stages it goes over a bridge, if there are any."""
        return self._forward(key, hidden.detach().requires_grad_(), residual_scale, starts, target)

    def head(
        self,
        key: Key,
        hidden: Tensor,
        labels: Tensor,
        *,
        early: float = 0.0,
        share: float = 1.0,
        counts: bool = True,
    ) -> tuple[Tensor, Tensor]:
        """The loss times the `share` of the microbatch in the iteration, and its gradient with respect to the inputs.

        `early` is the weight of a second loss, of this stage's own outputs for the microbatch. Its gradient joins the
        other one at the backward pass.
        """
        loss, back = self._head(hidden, labels, share, counts)
        if early:
            self._exits[key] = EarlyExit(labels, early * share, counts)
            self._exit_early(key)
        return loss * share, back

    def backward(self, key: Key, gradient: Tensor, *, counts: bool = True) -> Tensor | None:
        """The gradient for the node before; None at the data node, where the microbatch began."""
        held = self.held.pop(key)
        counts = counts and key not in self.deferred  # or it came before, and counts when what was deferred is added
        roots, gradients = [held.outputs if held.bridged is None else held.bridged], [gradient]
        if held.early is not None and held.bridged is None:
            gradients = [gradient + held.early]
        elif held.early is not None:  # what an early exit looks at comes before the bridge
            roots.append(held.outputs)
            gradients.append(held.early)
        gradients = [each.to(root.dtype) for root, each in zip(roots, gradients, strict=True)]
        if held.balance is not None:
            roots.append(held.balance)
            gradients.append(torch.ones_like(held.balance))
        back = input_gradient(held.inputs, roots, gradients, counts)
        with torch.no_grad():
            self.model.balance()  # routers that were recomputed have noted their scores again: not for the next one
        if self._split and counts:
            self.deferred[key] = self._deferred_now.copy()
        self._deferred_now.clear()
        return back

    def weight_gradients(self, key: Key, *, counts: bool = True) -> None:
        """Add the weight gradients that a split backward has deferred; one that did not count has deferred none."""
        if counts:
            add_weight_gradients(self.deferred.pop(key))
        else:
            self.deferred.pop(key, None)

    @torch.no_grad()
    def evaluate(self, given: Tensor, starts: Tensor | None = None) -> Tensor:
        """A forward pass that leaves nothing behind: of tokens at the data node, else of activations."""
        with self.autocast():
            hidden = given if given.is_floating_point() else self.model.embed(given)
            outputs: Tensor = self.model(hidden.to(torch.bfloat16) if self._low_precision else hidden, starts)
        return outputs

    @torch.no_grad()
    def evaluate_head(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """The loss alone."""
        with self.autocast():
            return self._loss(hidden, labels)

    def drop(self, key: Key) -> None:
        """Forget a microbatch, if it is here."""
        self.held.pop(key, None)
        self.deferred.pop(key, None)
        self._exits.pop(key, None)

    def drop_all(self) -> None:
        """Forget all microbatches."""
        self.held.clear()
        self.deferred.clear()
        self._exits.clear()
        self._deferred_now.clear()

    def _forward(
        self, key: Key, inputs: Tensor, residual_scale: float = 1.0, starts: Tensor | None = None, target: int = 0
    ) -> Tensor:
        self.held.pop(key, None)  # before the new one takes its memory; what was deferred is due all the same
        with self.autocast():
            hidden = inputs.to(torch.bfloat16) if self._low_precision else inputs
            outputs: Tensor = self.model(hidden, starts)
            if residual_scale != 1.0:
                outputs = torch.lerp(hidden, outputs, residual_scale)
            bridges, bridged = self.model.bridges, None
            if bridges is not None and target > bridges.stage + 1:
                bridged = bridges(outputs, torch.full((len(outputs),), target, device=outputs.device))
            self.held[key] = SavedForBackward(inputs, outputs, self.model.balance(), bridged=bridged)
        return (outputs if bridged is None else bridged).detach()

    def _head(self, hidden: Tensor, labels: Tensor, weight: float, counts: bool) -> tuple[Tensor, Tensor]:
        inputs = hidden.detach().requires_grad_()
        with self.autocast():
            loss = self._loss(inputs, labels)
        back = input_gradient(inputs, [loss], [torch.full_like(loss, weight)], counts)
        assert back is not None
        return loss.detach(), back

    def _exit_early(self, key: Key) -> None:
        """Run the early exit as soon as stage 0's outputs and the labels are both here. A node that takes over a lost
        node's microbatches may run the head first."""
        if key not in self.held or key not in self._exits:
            return
        held, (labels, weight, counts) = self.held[key], self._exits.pop(key)
        _, back = self._head(held.outputs.float(), labels, weight, counts)
        self.held[key] = held._replace(early=back)

    def _compile(self) -> None:
        """Compile layer by layer: they are alike, so one is compiled and all use it. Head and loss are another."""
        keep_compiled_forms()  # of a layer: on each device of the node, with gradients or without
        for layer in self.model.layers:
            layer.compile(dynamic=False)
        if self.model.head is not None:
            self._loss = torch.compile(self.model.loss, dynamic=False)

    def autocast(self) -> Any:
        return torch.autocast(torch.device(self.device).type, torch.bfloat16, enabled=self._low_precision)


def input_gradient(inputs: Tensor, roots: list[Tensor], gradients: list[Tensor], counts: bool) -> Tensor | None:
    """The gradient of the inputs, None if they come from the embedding; if it counts, the weights' are added up."""
    arrived = inputs.is_leaf and inputs.requires_grad
    if counts and any(root.requires_grad for root in roots):  # an embedding that is not trained, alone, is not
        torch.autograd.backward(roots, gradients)
        return inputs.grad if arrived else None
    return torch.autograd.grad(roots, [inputs], gradients)[0] if arrived else None
