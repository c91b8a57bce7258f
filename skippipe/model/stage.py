"""A stage: consecutive layers of a model as one module. Stage 0 also has the embedding, the final norm and the head.

Bridges and adapters of a stage, for others that a path leaves out, are in `stand_ins`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint, noop_context_fn

from skippipe.model.lora import initial, is_adapter
from skippipe.model.model_spec import ModelSpec, is_linear
from skippipe.model.stand_ins import (
    EPSILON,
    AdaptedLinear,
    Repeated,
    StageAdapters,
    StagePlace,
    StandIns,
    is_stand_in,
    trained_stand_ins,
)
from skippipe.stage_subset import StageHop


class StageModel(nn.Module):
    """The layers of one stage, of which no others are made; master weights are fp32, whatever is computed in."""

    def __init__(
        self, spec: ModelSpec, layers: range, *, ends: bool, recompute: bool = False, place: StagePlace | None = None
    ) -> None:
        """`place`: where it is in the pipeline, for bridges and adapters that are trained with it; None: without."""
        super().__init__()
        self.numbers = layers
        self.recompute = recompute
        self.spec = spec
        self._kinds = [spec.mask_kind(index) for index in layers]
        self.angles = spec.angles(layers)
        self.layers = nn.ModuleList(spec.layer(index) for index in layers)
        self.rotary = spec.rotary()
        self.embedding = spec.embedding() if ends else None
        self.norm = spec.norm() if ends else None
        self.head = spec.head() if ends else None
        if self.embedding is not None and self.head is not None and spec.tied:
            self.head.weight = self.embedding.weight
        self.requires_grad_(not spec.frozen)
        if spec.lora.rank:
            for number, layer in zip(layers, self.layers, strict=True):
                add_lora(layer, f"model.layers.{number}", spec)
        self.devices: tuple[str, ...] = ()
        """Those that its layers are spread over, at inference (see `spread_layers`); empty: it is on one."""
        self.stand_ins: StandIns | None = None if place is None else trained_stand_ins(self, place)
        """For other stages that are missing: those that are trained with it, or loaded beside it."""
        self._of_shape: dict[Any, tuple[Tensor, dict[str, Any], dict[str, Tensor | None]]] = {}
        self._scores: list[Tensor] = []
        self._watch_routers()
        self.eval()  # no dropout, no noise in routers: what is computed again after a loss has to be the same

    def embed(self, tokens: Tensor) -> Tensor:
        assert self.embedding is not None, "only stage 0 embeds"
        hidden: Tensor = self.embedding(tokens)
        return hidden

    def forward(self, hidden: Tensor, starts: Tensor | None = None, only: slice = slice(None)) -> Tensor:
        """The layers' output, in the type of the input: under autocast, layers with experts give fp32.

        `starts` says where conversations begin in the samples, [samples, sequence]: a token attends to those of its
        own alone, and positions are counted from its first. `only`: the layers that run.
        """
        dtype = hidden.dtype
        positions, rotations, masks = self._positions_and_masks(hidden, starts)
        contexts = noop_context_fn if self.adapters is None else self.adapters.checkpoint_contexts
        for layer, kind, angles in list(zip(self.layers, self._kinds, self.angles, strict=True))[only]:
            rotation = rotations[angles]
            inputs = {"attention_mask": masks[kind], "position_ids": positions, "position_embeddings": rotation}
            if self.recompute and torch.is_grad_enabled():
                hidden = checkpoint(layer, hidden, use_reentrant=False, context_fn=contexts, **inputs)
            else:
                hidden = layer(hidden, **inputs)
        return hidden.to(dtype)

    @property
    def adapters(self) -> StageAdapters | None:
        return None if self.stand_ins is None else self.stand_ins.adapters

    def set_hop(self, hop: StageHop | None) -> None:
        """How the path of the next forward passes goes on from here; None: no stage is missing."""
        if self.stand_ins is not None:
            self.stand_ins.set_hop(hop)

    def cross(self, hidden: Tensor, hop: StageHop | None, repeated: Repeated | None = None) -> Tensor:
        """What reaches the stage that the hop leads to: after the stage has taken the place of others, and over a
        bridge, if there is one. `repeated`: what the layers make of hidden states in such a turn; by default of all of
        a sequence at once."""
        if hop is None or self.stand_ins is None:
            return hidden
        recompute = self.recompute and torch.is_grad_enabled()
        return self.stand_ins.cross(hidden, hop, repeated or (lambda given, _turn: self(given)), recompute=recompute)

    def loss(self, hidden: Tensor, labels: Tensor, counted: Tensor | None = None) -> Tensor:
        """The loss of the next token, the mean over all tokens of the microbatch that count: negative labels do not.
        If these are some of its tokens, their part of the mean, where so many were `counted` in all."""
        assert self.norm is not None, "only stage 0 has the head"
        assert self.head is not None
        logits = self.head(self.norm(hidden))
        values, wanted = logits.flatten(0, -2).float(), labels.flatten()
        if counted is None:
            return functional.cross_entropy(values, wanted)
        return functional.cross_entropy(values, wanted, reduction="sum") / counted

    def distilled_loss(
        self, hidden: Tensor, labels: Tensor, teacher: Tensor, distill: float, counted: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The loss of which the share `distill` comes from what a teacher predicts, and that of the text alone;
        `teacher` are its hidden states before the final norm. For the rest as `loss`."""
        assert self.norm is not None and self.head is not None, "only stage 0 has the head"
        with torch.no_grad():
            target = self.head(self.norm(teacher)).flatten(0, -2).float().softmax(-1)
        logits, wanted = self.head(self.norm(hidden)).flatten(0, -2).float(), labels.flatten()
        count = (wanted >= 0).sum() if counted is None else counted
        of_text = functional.cross_entropy(logits, wanted, reduction="sum") / count
        more = torch.where(wanted >= 0, distillation(logits, wanted.clamp(min=0), target), 0.0).sum() / count
        return of_text + distill * more, of_text.detach()

    def balance(self) -> Tensor | None:
        """The weighted balancing loss of the forward pass that just ended; None for dense layers.

        After Switch Transformers (equations 4 to 6), for each layer by itself, so that a stage needs to know nothing
        of the others; the mean over the layers of the whole model, so that a stage's share does not depend on how the
        model was cut.
        """
        scores, self._scores = self._scores, []
        if not scores:
            return None
        total = torch.zeros((), device=scores[0].device)
        for each in scores:
            share = each.float().softmax(-1)
            experts = share.shape[-1]
            chosen = share.topk(self.spec.experts_active, -1).indices
            used = functional.one_hot(chosen, experts).sum(-2).float().mean(0)
            total = total + experts * (used * share.mean(0)).sum()
        everywhere = self.spec.routers(range(self.spec.layers))
        return self.spec.balance_weight * total / everywhere

    def drop_scores(self) -> None:
        """Forget the routers' scores of forward passes that have no balancing loss."""
        self._scores.clear()

    def named_weights(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Under the names that they have in the whole model; adapters and bridges are not among them."""
        yield from (pair for pair in self._named_parameters() if not is_adapter(pair[0]) and not is_stand_in(pair[0]))

    def trained_weights(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The weights that training changes: LoRA's adapters, bridges and adapters for missing stages, or all."""
        yield from (pair for pair in self._named_parameters() if pair[1].requires_grad)

    def frozen_weights(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The others."""
        yield from (pair for pair in self._named_parameters() if not pair[1].requires_grad)

    def linear_maps(self) -> Iterator[tuple[str, nn.Linear]]:
        """Those of its layers that are nothing else, or have adapters beside them, under the names that they have in
        the whole model."""
        for number, layer in zip(self.numbers, self.layers, strict=True):
            for name, module in layer.named_modules(prefix=f"model.layers.{number}"):
                if is_linear(module) or isinstance(module, AdaptedLinear):
                    assert isinstance(module, nn.Linear)
                    yield name, module

    def frozen_to(self, dtype: torch.dtype) -> None:
        """Hold the matrices of linear maps and of the embedding that are not trained in another type: that in which
        they are used. Under autocast these would be cast for every microbatch, and kept until its backward."""
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)) and not module.weight.requires_grad:
                module.weight.data = module.weight.data.to(dtype)

    def _named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        if self.embedding is not None:
            yield from ((f"model.embed_tokens.{name}", each) for name, each in self.embedding.named_parameters())
        for number, layer in zip(self.numbers, self.layers, strict=True):
            yield from ((f"model.layers.{number}.{name}", each) for name, each in layer.named_parameters())
        if self.norm is not None and self.head is not None:
            yield from ((f"model.norm.{name}", each) for name, each in self.norm.named_parameters())
            if not self.spec.tied:
                yield from ((f"lm_head.{name}", each) for name, each in self.head.named_parameters())
        if self.stand_ins is not None:
            yield from self.stand_ins.named_weights()

    def _positions_and_masks(
        self, hidden: Tensor, starts: Tensor | None
    ) -> tuple[Tensor, dict[str, Any], dict[str, Tensor | None]]:
        """Positions, their rotations and the masks: the same for every microbatch of a shape, without conversations."""
        if starts is not None:
            with torch.no_grad():
                places = torch.arange(hidden.shape[1], device=hidden.device).expand(hidden.shape[:2])
                positions = places - torch.where(starts, places, 0).cummax(1).values
                masks = {kind: self.spec.mask(kind, hidden, positions) for kind in dict.fromkeys(self._kinds)}
                return positions, self._rotations(hidden, positions), masks
        key = hidden.shape[1], hidden.dtype, hidden.device
        if key not in self._of_shape:
            with torch.no_grad():
                positions = torch.arange(hidden.shape[1], device=hidden.device).unsqueeze(0)
                one = hidden[:1]  # masks are the same for every sample, however many there are
                masks = {kind: self.spec.mask(kind, one, positions) for kind in dict.fromkeys(self._kinds)}
                self._of_shape[key] = positions, self._rotations(hidden, positions), masks
        return self._of_shape[key]

    def rotation(self, like: Tensor, positions: Tensor, angles: str) -> Any:
        """How these positions turn, by these angles: cosines and sines, of most models."""
        return self.rotary(like, positions, angles) if angles else self.rotary(like, positions)

    def _rotations(self, hidden: Tensor, positions: Tensor) -> dict[str, Any]:
        return {angles: self.rotation(hidden, positions, angles) for angles in dict.fromkeys(self.angles)}

    def _watch_routers(self) -> None:
        found = self.spec.router
        if found is None or self.spec.balance_weight == 0:
            return
        kind, index = found

        def noted(_module: nn.Module, _inputs: Any, output: Any) -> None:
            if torch.is_grad_enabled():
                self._scores.append(output[index] if isinstance(output, tuple) else output)

        for module in self.layers.modules():
            if isinstance(module, kind):
                module.register_forward_hook(noted)


def distillation(logits: Tensor, labels: Tensor, target: Tensor) -> Tensor:
    """Of each token: the cross entropy against the teacher's probabilities, `target`, minus that against the labels."""
    of_labels = logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    return of_labels - (target * logits).sum(-1)  # the logarithms of both sums are the same


def hidden_distances(hidden: Tensor, teacher: Tensor) -> Tensor:
    """Of each sample: the mean square of the difference, when both are divided by their root mean square."""
    width = hidden.shape[-1:]
    one, other = (functional.rms_norm(each.float(), width, eps=EPSILON) for each in (hidden, teacher))
    distances: Tensor = (one - other).square().mean((1, 2))
    return distances


def layer_ranges(counts: tuple[int, ...]) -> list[range]:
    """The layers of each stage."""
    ends = [sum(counts[: index + 1]) for index in range(len(counts))]
    return [range(end - count, end) for count, end in zip(counts, ends, strict=True)]


class LoraLinear(nn.Linear):
    """A linear map that is not trained, with an adapter beside it that is; names are peft's."""

    lora_A: nn.Linear  # noqa: N815 (as peft calls it, and the next)
    lora_B: nn.Linear  # noqa: N815
    lora_scale: float

    def forward(self, input: Tensor) -> Tensor:
        added: Tensor = self.lora_B(self.lora_A(input))
        return super().forward(input) + added * self.lora_scale


def add_lora(layer: nn.Module, name: str, spec: ModelSpec) -> None:
    """Make a `LoraLinear` of every linear map of a layer of this name that is a target."""
    for path, module in list(layer.named_modules(prefix=name)):
        if not is_linear(module) or not spec.lora.takes(path):
            continue
        assert isinstance(module, nn.Linear)
        module.__class__ = LoraLinear  # not a module around it, which would rename its weights
        module.lora_scale = spec.lora.scale  # type: ignore[assignment]
        for part, sizes in (
            ("lora_A", (module.in_features, spec.lora.rank)),
            ("lora_B", (spec.lora.rank, module.out_features)),
        ):
            linear = nn.Linear(*sizes, bias=False)
            if not linear.weight.is_meta:
                linear.weight.data = initial(f"{path}.{part}.weight", tuple(linear.weight.shape), spec.seed)
            module.add_module(part, linear)
