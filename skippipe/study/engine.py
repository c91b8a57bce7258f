"""Training in one process, fast: all microbatches of an iteration in one batch, those at the same stage together.

The stages and weights are the ones that nodes train; so are the rules for gradients and steps. What differs is the
order of sums: a test compares it with `ReferenceTrainer`, microbatch by microbatch, and that with real nodes.

Nothing in the loop waits for the device: the loss is a tensor, read when it is needed. On a GPU, how many visit which
stage decides which kernels run, and who they are is data: so passes of one shape are recorded once and then replayed
(a CUDA graph). Small models are otherwise held up by Python, not by the card.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby, pairwise
from typing import Any

import torch
from torch import Tensor

from skippipe.codecs import compile_on_device
from skippipe.model.flat_params import FlatParams
from skippipe.model.model_spec import ModelSpec
from skippipe.model.stage import StageModel, distillation, hidden_distances, layer_ranges
from skippipe.model.stand_ins import Bridges, StageAdapters, adapter_scale, bridges_of
from skippipe.optim.config import OptimConfig
from skippipe.skip_schedule import SkipSchedule
from skippipe.stage_subset import Visits
from skippipe.study.config import HopCodecs, Traffic
from skippipe.study.cuda_graphs import GraphCache
from skippipe.study.least_squares import fit_bridges, fit_repeats
from skippipe.study.path_sampling import StudyShape, StudyStep, group_by_stage
from skippipe.study.traffic import Subspace, gradient_sum, sent
from skippipe.torch_compile import keep_compiled_forms

OUTPUT_MAPS = (".o_proj", ".down_proj")  # what a layer adds to the residual stream comes out of these


class Engine:
    def __init__(
        self,
        spec: ModelSpec,
        layers: tuple[int, ...],
        learning: OptimConfig,
        recipe: SkipSchedule,
        *,
        traffic: Traffic = Traffic(),  # noqa: B008
        device: str = "cpu",
        low_precision: bool = False,
        compiled: bool = False,
        frozen: Sequence[StageModel] | None = None,
        stand_in_learning: OptimConfig | None = None,
    ) -> None:
        """`stand_in_learning` is that of bridges and adapters, if it is another one. `frozen` are the stages of a
        finished model: of these only bridges and adapters can be trained (healing)."""
        self.recipe, self.traffic = recipe, traffic
        self.learning, self._stand_in_learning = learning, stand_in_learning or learning
        self.device = device
        self._ranges = list(enumerate(layer_ranges(layers)))
        stages = frozen or [StageModel(spec, each, ends=index == 0) for index, each in self._ranges]
        self.stages = [stage.requires_grad_(frozen is None).to(device) for stage in stages]
        trained = self.stages if frozen is None else ()
        self.weights = [FlatParams(stage.named_weights(), learning, compiled=compiled) for stage in trained]
        self._lay_bridges(self._new_bridges(spec))
        self.adapters = self._new_adapters(self.stages, spec.seed)
        later = self._stand_in_learning
        self.adapter_weights = [FlatParams(each.to(device).named_parameters(), later) for each in self.adapters]
        self._low_precision, self.compiled = low_precision, compiled
        self._sum = gradient_sum(traffic, self._learned)
        self._subspace = self._new_subspace(spec)
        self._loss: Callable[[Tensor, Tensor], Tensor] = self.stages[0].loss
        self._teaching: Callable[[Tensor, Tensor, Tensor], Tensor] = self._distillation
        self._distance: Callable[[Tensor, Tensor], Tensor] = hidden_distances
        if compiled:
            keep_compiled_forms()  # of a layer: with adapters or without, with gradients or without, of many samples
            compile_on_device()
            for stage in self.stages:
                for layer in stage.layers:
                    layer.compile()
            self._loss = torch.compile(self.stages[0].loss)
            self._teaching = torch.compile(self._distillation)
            self._distance = torch.compile(hidden_distances)
        can_record = device.startswith("cuda") and spec.router is None  # who goes to which expert is not data
        self._recordings = GraphCache(device) if can_record else None

    def begin_again(
        self,
        spec: ModelSpec,
        learning: OptimConfig,
        recipe: SkipSchedule,
        traffic: Traffic = Traffic(),  # noqa: B008
        stand_in_learning: OptimConfig | None = None,
    ) -> None:
        """As new, with another seed, recipe or traffic, but adapters of the same rank; what was compiled stays."""
        assert recipe.adapters == self.recipe.adapters
        before = self._recorded_with
        self.recipe, self.learning, self.traffic = recipe, learning, traffic
        self._stand_in_learning = later = stand_in_learning or learning
        if self._recordings and self._recorded_with != before:
            self._recordings = GraphCache(self.device)
        stages = [StageModel(spec, layers, ends=index == 0) for index, layers in self._ranges]
        adapters = self._new_adapters(stages, spec.seed)
        new = [(FlatParams(each.named_weights(), learning), learning) for each in stages]
        new += [(FlatParams(each.named_parameters(), later), later) for each in adapters]
        for weights, (first, how) in zip([*self.weights, *self.adapter_weights], new, strict=True):
            weights.values.copy_(first.values)
            weights.reset(how)
        bridges = self._new_bridges(spec)
        if self._recorded_with != before:
            self._lay_bridges(bridges)
            self._sum = gradient_sum(traffic, self._learned)
            self._subspace = self._new_subspace(spec)
        else:  # where recordings know them to be
            for each, weights in zip(bridges, self.bridge_weights, strict=True):
                weights.values.copy_(FlatParams(each.named_parameters(), later).values)
                weights.reset(later)
            if self._sum:
                self._sum.forget()
            if self._subspace:
                self._subspace.forget()

    def _new_subspace(self, spec: ModelSpec) -> Subspace | None:
        return Subspace(self.traffic, spec.shape.hidden, self.device) if self.traffic.subspace else None

    def _new_bridges(self, spec: ModelSpec) -> list[Bridges]:
        return bridges_of(len(self.stages), spec.shape.hidden, self.recipe.bridges, spec.seed)

    def _new_adapters(self, stages: list[StageModel], seed: int) -> list[StageAdapters]:
        rank = self.recipe.adapters
        return [StageAdapters(stage, rank, seed, self.recipe.repeats) for stage in stages] if rank else []

    def _lay_bridges(self, bridges: list[Bridges]) -> None:
        """Each is held by the stage at which it begins, beside its weights: so models are exported without them."""
        self.bridges = [each.to(self.device) for each in bridges]
        self.bridge_weights = [FlatParams(each.named_parameters(), self._stand_in_learning) for each in self.bridges]

    @torch.no_grad()
    def fit_stand_ins(
        self,
        batches: Iterable[Tensor],
        wire: str = "",
        *,
        bridges: bool = True,
        repeats: bool = True,
        progress: Callable[[int, int], None] = lambda done, of: None,
    ) -> None:
        """Make bridges, or repeats, or both the maps that come closest to what they stand for, on these token ids;
        `wire`: with this codec on hops. `progress` is called with the number of stages that are done, and of all."""
        progress(0, len(self.stages))
        states = [self._whole_states(each, wire) for each in batches]
        reached = [self.recipe.repeats] * len(self.stages)
        if repeats and self.recipe.repeats:
            with self.autocast(), torch.compiler.set_stance("force_eager"):  # what is compiled calls no hooks
                reached = fit_repeats(self.stages, self.adapters, states, progress)
        if bridges:
            fit_bridges(self.bridges, states, reached)

    @torch.no_grad()
    def grow(self, donors: Mapping[int, int], *, preserving: bool = False) -> None:
        """Make stages copies of others, with the state that the optimizer gives to grown layers. `preserving`: their
        output projections begin as zero."""
        for new, old in donors.items():
            self.weights[new].grow_from(self.weights[old])
            for name, map_ in self.stages[new].linear_maps() if preserving else ():
                if name.endswith(OUTPUT_MAPS):
                    map_.weight.zero_()

    @property
    def _recorded_with(self) -> tuple[Any, ...]:
        """What recordings depend on beside their shape."""
        recipe = self.recipe
        of_recipe = recipe.early_exit, recipe.gradients, recipe.bridges, recipe.distill, recipe.distill_hidden
        return self.learning.clip, self.traffic, recipe.hop_rank, bool(recipe.heal), *of_recipe

    @property
    def _learned(self) -> list[FlatParams]:
        return [*self.weights, *self.bridge_weights, *self.adapter_weights]

    @property
    def parameters(self) -> int:
        return sum(len(each.values) for each in self._learned)

    def iteration(
        self,
        number: int,
        inputs: Tensor,
        labels: Tensor,
        visits: Sequence[Visits],
        *,
        young: bool = False,
        healing: bool = False,
        rate: float | None = None,
        hops: HopCodecs | None = None,
    ) -> Tensor:
        """Inputs and labels are [microbatches × samples, sequence]; the loss before the step, still on its device.

        `young`: the stages that are visited are the whole model yet, and stand for no others. `healing`: only bridges
        and adapters learn. `rate`: instead of the one that `learning` has for this iteration. `hops`: their codecs,
        where traffic has others later than in its first iteration.
        """
        size = len(visits) // self.traffic.parts
        samples = len(inputs) // len(visits)
        replicas = [
            self._shaped(visits[first : first + size], samples, young, healing) for first in range(0, len(visits), size)
        ]
        shapes = tuple(replace(shape, hops=hops or self.traffic.hops()) for shape, _, _ in replicas)
        where = [each.to(self.device, non_blocking=True) for _, *both in replicas for each in both]
        if self._recordings is None:
            loss = self._gradients(shapes, inputs, labels, *where)
        else:
            loss = self._recordings.run(shapes, self._gradients, (inputs, labels, *where))
        rate = self.learning.rate_at(number) if rate is None else rate
        for weights, _ in self._learning_in(StudyShape.merged(shapes)):
            weights.step(rate, 1.0)
        if healing:
            for weights in self.weights:
                weights.gradient.zero_()
        return loss

    def _shaped(
        self, visits: Sequence[Visits], samples: int, young: bool, healing: bool
    ) -> tuple[StudyShape, Tensor, Tensor]:
        """What `_through` needs to know of these paths: their shape, the places and the samples that are taught."""
        steps = group_by_stage(visits)
        next_stage = [dict(pairwise((*each, len(self.stages)))) for each in visits]
        targets = [next_stage[row][stage] for stage, rows in steps for row in rows]
        missing = [0 if young else len(self.stages) - len(each) for each in visits]
        skipping = [row for row, count in enumerate(missing) if count]
        shape = StudyShape(
            len(visits),
            tuple(
                StudyStep(stage, len(rows), () if young else self._drives(stage, rows, visits)) for stage, rows in steps
            ),
            skipping=len(skipping) if self.bridges or self.adapters or self.recipe.distill else 0,
            healing=healing,
        )
        rows = [row * samples + sample for _, each in steps for row in each for sample in range(samples)]
        places = torch.tensor(
            [
                rows,
                [target for target in targets for _ in range(samples)],
                [missing[row] for _, each in steps for row in each for _ in range(samples)],
            ]
        )
        taught = torch.tensor([row * samples + sample for row in skipping for sample in range(samples)])
        return shape, places, taught

    @torch.no_grad()
    def loss_of(self, inputs: Tensor, labels: Tensor, visits: Visits, drive: float, wire: str = "") -> Tensor:
        """The mean loss of these samples; as `hidden_of`."""
        with self.autocast():
            return self._loss(self.hidden_of(inputs, visits, drive, wire), labels)

    @torch.no_grad()
    def hidden_of(self, inputs: Tensor, visits: Visits, drive: float, wire: str = "") -> Tensor:
        """What these samples are after these stages, each but stage 0 driven so much; over bridges and with adapters,
        if there are any, where stages are missing. `wire`: the codec of hops, whatever it was in training."""
        with self.autocast():
            hidden = embedded = self._embed(inputs)
            missing = torch.full((len(hidden),), len(self.stages) - len(visits), device=self.device)
            whole = len(visits) == len(self.stages)
            for stage, target in pairwise((*visits, len(self.stages))):
                self._set_adapters(None if whole else missing, target - stage - 1)
                made = self.stages[stage](hidden)
                hidden = made if stage == 0 or drive == 1.0 else torch.lerp(hidden, made, drive)
                for turn in range(1, min(self.recipe.repeats, target - stage - 1) + 1):
                    hidden = self._repeat(stage, turn, hidden)
                if self.bridges and target > stage + 1:
                    hidden = self.bridges[stage](hidden, torch.full((len(hidden),), target, device=self.device))
                hidden = self._sent(hidden, embedded, wire)
        return hidden

    def _sent(self, hidden: Tensor, embedded: Tensor, wire: str, back: str = "") -> Tensor:
        """What arrives of activations of tokens with these embeddings."""
        if self._subspace is None:
            return sent(hidden, wire, back)
        return self._subspace.sent(hidden, embedded, wire, back)

    def _gradients(self, shapes: Sequence[StudyShape], inputs: Tensor, labels: Tensor, *where: Tensor) -> Tensor:
        """Forward and backward, replica by replica; then the gradients are what a step follows: means, clipped."""
        whole = StudyShape.merged(shapes)
        losses = []
        for replica, (shape, given, wanted) in enumerate(
            zip(shapes, inputs.chunk(len(shapes)), labels.chunk(len(shapes)), strict=True)
        ):
            places, taught = where[2 * replica : 2 * replica + 2]
            losses.append(self._backward(shape, given, wanted, places, taught, 1 / len(shapes)))
            if self._sum:
                self._sum.add(replica, [weights for weights, _ in self._learning_in(whole)])
        if self._subspace:
            self._subspace.follow()
        self._clip(whole)
        return torch.stack(losses).mean()

    def _backward(
        self, shape: StudyShape, inputs: Tensor, labels: Tensor, places: Tensor, taught: Tensor, part: float
    ) -> Tensor:
        """Forward and backward of microbatches that are such a part of all.

        `taught` are the samples that skip stages.
        """
        distills = bool(shape.skipping and self.recipe.distill) and self._stands_in(shape)
        teacher = self._teacher(_chosen(inputs, taught), shape.hops.wire) if distills else None
        with self.autocast():
            hidden, balance, early, apart = self._through(shape, inputs, places, taught, teacher)
            loss = self._loss(hidden, labels)
            total = loss + balance
            if self.recipe.early_exit:
                total = total + self.recipe.early_exit * self._loss(early, labels)
            if teacher is not None:
                share = self.recipe.distill * shape.skipping / shape.microbatches
                total = total + share * self._teaching(_chosen(hidden, taught), teacher[-1], _chosen(labels, taught))
                if self.recipe.distill_hidden:
                    total = total + self.recipe.distill_hidden / len(inputs) * apart
        (total if part == 1 else total * part).backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def _stands_in(self, shape: StudyShape) -> bool:
        """Whether there are adapters and a teacher yet; they wait for healing, if there is any."""
        return shape.healing or not self.recipe.heal

    def _teacher(self, inputs: Tensor, wire: str) -> Tensor:
        """The hidden states of the whole model after each stage, or only after the last if no others are needed."""
        found = self._whole_states(inputs, wire)
        return torch.stack(found if self.recipe.distill_hidden else found[-1:])

    @torch.no_grad()
    def _whole_states(self, inputs: Tensor, wire: str = "") -> list[Tensor]:
        """The hidden states of the whole model after each stage; `wire`: with this codec on hops."""
        self._set_adapters(None)
        found = []
        with self.autocast():
            hidden = embedded = self._embed(inputs)
            for stage in self.stages:
                hidden = stage(hidden)
                found.append(hidden)
                hidden = self._sent(hidden, embedded, wire)
        return found

    def _distillation(self, hidden: Tensor, teacher: Tensor, labels: Tensor) -> Tensor:
        """What the mean loss becomes more by when the next token is taken from the teacher instead of the text."""
        norm, head = self.stages[0].norm, self.stages[0].head
        assert norm is not None and head is not None
        with torch.no_grad():
            target = head(norm(teacher)).float().softmax(-1)
        return distillation(head(norm(hidden)).float(), labels, target).mean()

    def _set_adapters(self, missing: Tensor | None, left_out: Tensor | int = 0) -> None:
        """Adapters for the next forward pass, through one stage, of samples that skip so many stages each, and of these
        so many by the hop from that stage."""
        scale = None
        if missing is not None:
            here = torch.as_tensor(left_out, device=self.device).expand(len(missing))
            scale = adapter_scale(missing, here, len(self.stages), self.recipe.adapters, self.recipe.hop_rank)
        for each in self.adapters:
            each.scale = scale

    def _repeat(self, stage: int, turn: int, hidden: Tensor) -> Tensor:
        """What a stage makes of its own output in the place of the stage so many after it."""
        return self.adapters[stage].repeat(turn, hidden, lambda given, _turn: self.stages[stage](given))

    def _through(
        self, shape: StudyShape, inputs: Tensor, places: Tensor, taught: Tensor, teacher: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The final hidden states, the balancing loss of routers, the output of stage 0 alone, and the sum of the
        distances of hidden states from the teacher's, which has those of the samples that are taught.

        `places` has three rows: the samples that pass the stage of each step, where each goes from there, and how many
        stages it skips.
        """
        hidden = early = embedded = self._embed(inputs)
        balance = apart = torch.zeros((), device=self.device)
        samples = len(inputs) // shape.microbatches
        visitors = torch.split(places, [step.visitors * samples for step in shape.steps], dim=1)
        for step, (here, targets, missing) in zip(shape.steps, visitors, strict=True):
            model = self.stages[step.stage]
            stands_in = shape.skipping and self._stands_in(shape)
            self._set_adapters(missing if stands_in else None, targets - step.stage - 1)
            all_visit = step.visitors == shape.microbatches
            given = hidden if all_visit else _chosen(hidden, here)
            made = model(given)
            made = _driven(given, made, step.drives, samples)
            added = model.balance()
            if added is not None:  # the mean over its microbatches, of which each counts as one of all
                balance = balance + added * (step.visitors / shape.microbatches)
            if step.stage == 0:
                early = made if all_visit else hidden.index_copy(0, here, made)
            if stands_in:
                left_out = (targets - step.stage - 1).view(-1, 1, 1)
                for turn in range(1, min(self.recipe.repeats, len(self.stages) - step.stage - 1) + 1):
                    made = torch.where(left_out >= turn, self._repeat(step.stage, turn, made), made)
                model.drop_scores()  # those of repeats
            if shape.skipping and step.stage < len(self.bridges):
                made = self.bridges[step.stage](made, targets)
            if teacher is not None and self.recipe.distill_hidden:
                row = torch.searchsorted(taught, here).clamp(max=len(taught) - 1)
                apart = apart + (self._distance(made, teacher[targets - 1, row]) * (missing > 0)).sum()
            theirs = embedded if all_visit else embedded.detach()[here]
            made = self._sent(made, theirs, *shape.hops)
            hidden = made if all_visit else hidden.index_copy(0, here, made)
        return hidden, balance, early, apart

    def _learning_in(self, shape: StudyShape) -> list[tuple[FlatParams, float]]:
        """What takes a step, and by what its gradient is multiplied to be the mean over those who visited its stage.

        Bridges and adapters are their stage's: who visited that and went on another way counts with a gradient of zero.
        """
        by_visitors = self.recipe.gradients == "visitors"
        means = {
            stage: shape.microbatches / visitors if by_visitors else 1.0 for stage, visitors in shape.counts.items()
        }
        found = [] if shape.healing else [(self.weights[stage], mean) for stage, mean in sorted(means.items())]
        if shape.skipping:
            for held in (self.bridge_weights, self.adapter_weights if self._stands_in(shape) else []):
                found += [(held[stage], mean) for stage, mean in sorted(means.items()) if stage < len(held)]
        return found

    def _clip(self, shape: StudyShape) -> None:
        """As `ReferenceTrainer` and nodes do; here gradients are sums over visitors, divided by all microbatches."""
        learning = self._learning_in(shape)
        norms = [torch.linalg.vector_norm(each.gradient) * mean for each, mean in learning]
        norm = torch.linalg.vector_norm(torch.stack(norms))
        clip = self.learning.clip / (norm + 1e-6) if self.learning.clip else torch.ones_like(norm)
        clip = torch.where(torch.isfinite(norm), clip.clamp(max=1.0), 0.0)
        for each, mean in learning:
            each.gradient.mul_(clip * mean)

    def _embed(self, inputs: Tensor) -> Tensor:
        hidden = self.stages[0].embed(inputs)
        return hidden.to(torch.bfloat16) if self._low_precision else hidden

    def _drives(self, stage: int, rows: Sequence[int], visits: Sequence[Visits]) -> tuple[tuple[float, int], ...]:
        """Of the rows at a stage, as many after one another as have the same; empty: none is driven."""
        each = [self.recipe.residual_scale(len(self.stages), len(visits[row])) for row in rows] if stage else []
        return tuple((drive, len(list(same))) for drive, same in groupby(each)) if set(each) - {1.0} else ()

    def autocast(self) -> Any:
        """The precision that the model is computed in."""
        return torch.autocast(torch.device(self.device).type, torch.bfloat16, enabled=self._low_precision)


def _driven(given: Tensor, made: Tensor, drives: tuple[tuple[float, int], ...], samples: int) -> Tensor:
    if not drives:
        return made
    counts = [count * samples for _, count in drives]
    pairs = zip(torch.split(given, counts), torch.split(made, counts), drives, strict=True)
    return torch.cat(
        [after if drive == 1.0 else torch.lerp(before, after, drive) for before, after, (drive, _) in pairs]
    )


class _SelectRows(torch.autograd.Function):
    """Rows of a tensor, each chosen once: so its gradient is put back in its place, where `index_select` would add."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.count = len(whole)
        return whole.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (rows,), (gradient,) = ctx.saved_tensors, gradients
        whole = gradient.new_zeros(ctx.count, *gradient.shape[1:])
        return whole.index_copy_(0, rows, gradient), None


def _chosen(whole: Tensor, rows: Tensor) -> Tensor:
    return _SelectRows.apply(whole, rows)  # type: ignore[no-any-return, no-untyped-call]
