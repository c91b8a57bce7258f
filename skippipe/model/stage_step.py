"""The tasks of a stage on real tensors: forward, head, backward, weight gradients.

`StageStep` holds what a microbatch leaves behind from its forward to the end of its backward, and adds up gradients
over the microbatches that came. A microbatch that comes again after a failure, because a node further on needs it,
may not count: then its input gradient is as before and nothing is added. With bf16, activations and products are bf16,
under autocast; weights, gradients and norms stay fp32. Linear maps have copies of their weights in bf16, made once and
shared by all microbatches on their way: autocast would make new ones for each and keep them until its backward pass.
Where activations are recomputed, to save memory, the copies are autocast's, for a layer at a time.

The head takes a large microbatch in pieces, because logits are many times its size.

What a stage adds to a microbatch may be scaled up, for the stages that were skipped; or adapters and a bridge stand in
for those between the stage and the one where the path goes on (see `stand_ins`). And the head may also look at the
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

from skippipe.model.flat_params import FlatParams, WeightCopies
from skippipe.model.model_spec import ModelSpec
from skippipe.model.stage import StageModel, hidden_distances
from skippipe.model.stand_ins import LinearAdapter, StagePlace
from skippipe.optim.config import OptimConfig
from skippipe.stage_subset import StageHop
from skippipe.torch_compile import keep_compiled_forms
from skippipe.workload import head_pieces

DeferredGradients = list[tuple[Tensor, Tensor, Tensor]]
"""Of every linear map whose weight gradient is still to be computed: the sum that it is added to, its input and its
output gradient."""
Key = tuple[int, int]
"""Lane and microbatch of the lane."""


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,
        weight: Tensor,
        _trained: nn.Parameter,  # so that there is a backward pass, whether or not the inputs need one
        total: Tensor,
        deferred: DeferredGradients,
    ) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.total, ctx.deferred = total, deferred
        return functional.linear(inputs, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,) = gradients
        inputs, weight = ctx.saved_tensors
        ctx.deferred.append((ctx.total, inputs, gradient))
        return gradient @ weight, None, None, None, None


class SplitLinear(nn.Linear):
    """A linear map whose backward pass defers its weight gradient."""

    total: Tensor
    """The sum of its weight gradients."""
    deferred: DeferredGradients

    def forward(self, inputs: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return super().forward(inputs)
        weight: Tensor = self.weight
        device = inputs.device.type
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
            inputs, weight = inputs.to(dtype), weight.to(dtype)
        given = inputs, weight.detach(), self.weight, self.total, self.deferred
        output: Tensor = _Linear.apply(*given)  # type: ignore[no-untyped-call]
        return output if self.bias is None else output + self.bias.to(output.dtype)


LINEAR = (nn.Linear, SplitLinear)


def split_linears(layers: nn.Module, deferred: DeferredGradients) -> None:
    """Make every linear map in these layers that is trained, and has a gradient, defer its weight gradient into this
    list."""
    for module in layers.modules():
        if type(module) is nn.Linear and module.weight.requires_grad:
            module.__class__ = SplitLinear
            module.total, module.deferred = module.weight.grad, deferred  # type: ignore[assignment]


def add_weight_gradients(deferred: DeferredGradients) -> None:
    """Compute weight gradients that were deferred, and add them to their sums."""
    with torch.no_grad():
        for total, inputs, gradient in deferred:
            rows, columns = gradient.flatten(0, -2), inputs.flatten(0, -2)
            if rows.dtype == total.dtype:
                total.addmm_(rows.T, columns)
            else:
                total.add_(rows.T @ columns)


class SavedForBackward(NamedTuple):
    """What a microbatch keeps on a node for its backward pass."""

    inputs: Tensor
    outputs: Tensor
    balance: Tensor | None
    """The balancing loss of the stage's routers."""
    early: Tensor | None = None
    """The gradient of the outputs, by the loss of an early exit."""
    crossed: Tensor | None = None
    """What goes on from the stage, if something stands in for others that the path leaves out."""


class EarlyExit(NamedTuple):
    """What the loss of an early exit takes, beside the outputs of stage 0."""

    labels: Tensor
    weight: float
    counts: bool


class TeacherHidden(NamedTuple):
    """Hidden states of the whole model for a microbatch that leaves stages out: those that the stage gets, or the
    head."""

    hidden: Tensor
    distill: float
    """Share of the loss that comes from the whole model's predictions; the rest comes from the text."""
    distance_weight: float = 0.0
    """Weight of the distance of the microbatch's own hidden states from these, which is added to the loss."""

    def distance_gradient(self, hidden: Tensor) -> Tensor | float:
        """The gradient of that distance with respect to the microbatch's hidden states."""
        if not self.distance_weight:
            return 0.0
        with torch.enable_grad():
            leaf = hidden.detach().float().requires_grad_()
            return torch.autograd.grad(self.distance_weight * hidden_distances(leaf, self.hidden).mean(), leaf)[0]


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
        place: StagePlace | None = None,
    ) -> None:
        """`offload`: the optimizer's state is held in host memory. `place` is that of `StageModel`."""
        self.model = StageModel(spec, layers, ends=ends, recompute=recompute, place=place).to(device)
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
        self._copies: WeightCopies | None = None
        if self._low_precision:
            self._copies = WeightCopies(self.weights, self._linear_weights(recompute), torch.bfloat16)
        self._loss: Callable[..., Tensor] = self.model.loss
        self._distilled_loss: Callable[..., tuple[Tensor, Tensor]] = self.model.distilled_loss
        if compiled:
            self._compile()
        self._split = split_backward

    def begin(self, key: Key, tokens: Tensor, starts: Tensor | None = None, hop: StageHop | None = None) -> Tensor:
        """The forward pass at the data node. Like any other, it replaces an earlier one of the same microbatch."""
        with self.autocast():
            outputs = self._forward(key, self._rounded(self.model.embed(tokens)), starts=starts, hop=hop)
        self._exit_early(key)
        return outputs

    def forward(
        self,
        key: Key,
        hidden: Tensor,
        residual_scale: float = 1.0,
        starts: Tensor | None = None,
        hop: StageHop | None = None,
    ) -> Tensor:
        """The forward pass of the stage, whose contribution to the residual stream is multiplied by this scale.

        `starts` is where conversations begin (see `StageModel.forward`); `hop` how a path that leaves stages out goes
        on, None for one that visits all."""
        inputs = self._rounded(hidden).detach().requires_grad_()
        return self._forward(key, inputs, residual_scale, starts, hop)

    def head(
        self,
        key: Key,
        hidden: Tensor,
        labels: Tensor,
        *,
        early: float = 0.0,
        share: float = 1.0,
        counts: bool = True,
        teacher: TeacherHidden | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The loss times the `share` of the microbatch in the iteration, and its gradient with respect to the inputs.

        `early` is the weight of a second loss, of this stage's own outputs for the microbatch. Its gradient joins the
        other one at the backward pass. With a `teacher` the gradient is that of distillation; the loss is that of the
        text in any case.
        """
        loss, back = self._head(hidden, labels, share, counts, teacher)
        if early:
            self._exits[key] = EarlyExit(labels, early * share, counts)
            self._exit_early(key)
        if teacher is not None:
            back = back + teacher.distance_gradient(hidden)
        return loss * share, back

    def backward(
        self, key: Key, gradient: Tensor, *, counts: bool = True, teacher: TeacherHidden | None = None
    ) -> Tensor | None:
        """The gradient for the node before; None at the data node, where the microbatch began. A `teacher` adds that
        of the distance between the stage's inputs and those of the teacher."""
        held = self.held.pop(key)
        counts = counts and key not in self.deferred  # or it came before, and counts when what was deferred is added
        roots, gradients = [held.outputs if held.crossed is None else held.crossed], [gradient]
        if held.early is not None and held.crossed is None:
            gradients = [gradient + held.early]
        elif held.early is not None:  # what an early exit looks at comes before what stands in for other stages
            roots.append(held.outputs)
            gradients.append(held.early)
        gradients = [each.to(root.dtype) for root, each in zip(roots, gradients, strict=True)]
        if held.balance is not None:
            roots.append(held.balance)
            gradients.append(torch.ones_like(held.balance))
        back = input_gradient(held.inputs, roots, gradients, counts)
        self.model.drop_scores()  # routers that were recomputed have noted them again: not for the next microbatch
        if self._split and counts:
            self.deferred[key] = self._deferred_now.copy()
        self._deferred_now.clear()
        if back is None:
            return None
        return back.float() if teacher is None else back.float() + teacher.distance_gradient(held.inputs)

    def weight_gradients(self, key: Key, *, counts: bool = True) -> None:
        """Add the weight gradients that a split backward has deferred; one that did not count has deferred none."""
        if counts:
            add_weight_gradients(self.deferred.pop(key))
        else:
            self.deferred.pop(key, None)

    @torch.no_grad()
    def evaluate(self, given: Tensor, starts: Tensor | None = None) -> Tensor:
        """A forward pass through the whole model that leaves nothing behind: of tokens at the data node, else of
        activations."""
        self._refresh_copies()
        self.model.set_hop(None)
        with self.autocast():
            hidden = given if given.is_floating_point() else self.model.embed(given)
            outputs: Tensor = self.model(self._rounded(hidden), starts)
        return outputs

    @torch.no_grad()
    def evaluate_head(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """The loss alone."""
        self._refresh_copies()
        with self.autocast():
            return torch.stack([self._loss(*piece) for piece in self._pieces(hidden, labels)]).sum()

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
        self,
        key: Key,
        inputs: Tensor,
        residual_scale: float = 1.0,
        starts: Tensor | None = None,
        hop: StageHop | None = None,
    ) -> Tensor:
        self.held.pop(key, None)  # before the new one takes its memory; what was deferred is due all the same
        self._refresh_copies()
        self.model.set_hop(hop)
        with self.autocast():
            outputs: Tensor = self.model(inputs, starts)
            if residual_scale != 1.0:
                outputs = torch.lerp(inputs, outputs, residual_scale)
            balance = self.model.balance()
            crossed = self.model.cross(outputs, hop, lambda given, _turn: self.model(given, starts))
            self.model.drop_scores()  # those of repeats
        changed = None if crossed is outputs else crossed
        self.held[key] = SavedForBackward(inputs, outputs, balance, crossed=changed)
        return crossed.detach()

    def _head(
        self, hidden: Tensor, labels: Tensor, weight: float, counts: bool, teacher: TeacherHidden | None = None
    ) -> tuple[Tensor, Tensor]:
        self._refresh_copies()
        pieces = self._pieces(hidden, labels)
        taught = [] if teacher is None else teacher.hidden.view_as(hidden).flatten(0, -2).chunk(len(pieces))
        losses, backs = [], []
        for number, (given, wanted, *counted) in enumerate(pieces):
            inputs = given.detach().requires_grad_()
            with self.autocast():
                if teacher is None:
                    loss = of_text = self._loss(inputs, wanted, *counted)
                else:
                    target = taught[number].view_as(given)
                    loss, of_text = self._distilled_loss(inputs, wanted, target, teacher.distill, *counted)
            back = input_gradient(inputs, [loss], [torch.full_like(loss, weight)], counts)
            assert back is not None
            losses.append(of_text.detach())
            backs.append(back)
        return torch.stack(losses).sum(), torch.cat(backs).view_as(hidden)

    def _pieces(self, hidden: Tensor, labels: Tensor) -> list[tuple[Tensor, ...]]:
        """What the head takes at a time: inputs, labels, and of a piece also how many labels count in all."""
        assert self.model.head is not None, "only stage 0 has the head"
        vocabulary: int = self.model.spec.config.vocab_size
        count = head_pieces(labels.numel(), vocabulary)
        if count == 1:
            return [(hidden, labels)]
        rows, wanted = hidden.flatten(0, -2).chunk(count), labels.flatten().chunk(count)
        counted = (labels >= 0).sum()
        return [(*pair, counted) for pair in zip(rows, wanted, strict=True)]

    def _rounded(self, hidden: Tensor) -> Tensor:
        return hidden.to(torch.bfloat16) if self._low_precision else hidden

    def _linear_weights(self, recompute: bool) -> dict[str, nn.Parameter]:
        """Weights of which there are copies: of the layers and their adapters, unless these are recomputed, and of a
        head of its own."""
        linear = [] if recompute else [each for each in self.model.layers.modules() if type(each) in LINEAR]
        if self.model.head is not None and not self.model.spec.tied:
            linear.append(self.model.head)
        wanted = {id(each.weight) for each in linear}
        for adapter in self.model.adapters.parts if self.model.adapters and not recompute else ():
            assert isinstance(adapter, LinearAdapter)
            wanted |= {id(adapter.down), id(adapter.up)}
        return {name: each for name, each in self.model.trained_weights() if id(each) in wanted}

    def _refresh_copies(self) -> None:
        if self._copies is not None:
            self._copies.refresh()

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
            self._distilled_loss = torch.compile(self.model.distilled_loss, dynamic=False)

    def autocast(self) -> Any:
        device = torch.device(self.device).type  # its cache would keep the copies of a whole stage, each used once
        return torch.autocast(device, torch.bfloat16, enabled=self._low_precision, cache_enabled=False)


def input_gradient(inputs: Tensor, roots: list[Tensor], gradients: list[Tensor], counts: bool) -> Tensor | None:
    """The gradient of the inputs, None if they come from the embedding; if it counts, the weights' are added up."""
    arrived = inputs.is_leaf and inputs.requires_grad
    if counts and any(root.requires_grad for root in roots):  # not where nothing that is trained was used
        torch.autograd.backward(roots, gradients)
        return inputs.grad if arrived else None
    return torch.autograd.grad(roots, [inputs], gradients)[0] if arrived else None
