"""Decoding with static shapes: the step that adds one token to each sequence, as one CUDA graph.

A step of a batch is hundreds of small kernels, and launching them one by one from Python takes longer than they run.
Here all tensors of the step keep their places: tokens and positions come in the same two tensors, keys and values stay
in the KV cache of the stages. So on a GPU the step is recorded once for each size of batch and
cache, and replayed; it may be compiled before. On a CPU it is the same function as it is.

Rows are slots 0, 1, 2 and so on, of unequal lengths, filled up to a power of two; rows without a sequence compute
something that nobody looks at. While the caller looks at the tokens of a step, the next step runs already, with tokens
that never left the device; if the batch changes meanwhile, it is repeated, which overwrites all it has written.

Decoder layers of this step are those of `fused_layer`; small batches of 16-bit numbers on a GPU with Triton can go
through the kernels of `decode_kernels` instead.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from skippipe.inference.cached_stage import BatchRows, CachedStage, CacheFull, StageCache, StageChain, logits
from skippipe.inference.checkpoint_loader import StagedModel
from skippipe.inference.decode_kernels import AHEAD, MOST_ROWS, DecodeKernels, Prepared, agree, kernels_for, warn_unused
from skippipe.inference.engine import TokenByToken, rows_after
from skippipe.inference.fused_layer import Layer, fused_layers, layer_step, position_mask
from skippipe.inference.request import Generation
from skippipe.inference.sampler import TokenReader, choose
from skippipe.model.stage import StageModel
from skippipe.stage_subset import StageHop, StageSubset
from skippipe.torch_compile import keep_compiled_forms

LEAST_ROOM = 256  # tokens of a slot: each other room is another graph
LEAST_TOKENS = 8192  # of all slots together: rooms and batches are rounded up
MOST_GRAPHS = 32  # of a stage; beyond them it is computed plainly
WARM_UP = 3  # runs before a graph is recorded: kernels are compiled and chosen in them


def recorded(run: Callable[[], Tensor], device: torch.device) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """A graph of the function, and the tensor in which each replay leaves what it returns."""
    with torch.cuda.device(device):
        side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UP):
                run()
        torch.cuda.current_stream().wait_stream(side)
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # other threads may copy meanwhile
            made = run()
    return graph, made


def _rotation_at(rotations: tuple[Tensor, Tensor], positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines of these positions, for all heads."""
    cosines, sines = rotations
    return cosines[0, positions][:, None], sines[0, positions][:, None]


class LayerRunner:
    """Runs the layers of a stage for one token of each row: by Triton kernels where there are some and the batch is
    small, else by `layer_step`, which may be compiled."""

    def __init__(self, kernels: DecodeKernels | None = None, *, compiled: bool = False) -> None:
        self._kernels = self._recorded = kernels
        """Those that are used from now on; and those that steps were recorded with, which write to tensors of theirs
        also after others have failed."""
        self._unchecked = {"layer", "logits"}
        """Kernels that have not run: the first run is compared with the plain computation."""
        self._handed_on: tuple[Tensor, Tensor, Prepared] | None = None
        """The last output, the gain that it was told follows, and what is prepared for a norm with it."""
        self._layer = layer_step
        if compiled:
            keep_compiled_forms()  # sizes of batch and cache
            self._layer = torch.compile(layer_step, dynamic=False, fullgraph=True)

    def run(
        self,
        layers: list[Layer],
        cache: StageCache,
        hidden: Tensor,
        slots: Tensor,
        positions: Tensor,
        rotations: tuple[Tensor, Tensor],
        masks: dict[int | None, Tensor],
        *,
        gathered: bool = False,
        following: Tensor | None = None,
    ) -> Tensor:
        """`rotations` of all positions; `masks` that other stages have used already; `following`: the gain of the norm
        that the output comes to next, if it is handed on as it is."""
        if self._kernels is not None and len(hidden) <= MOST_ROWS and layers[0][0].norm.dtype == hidden.dtype:
            try:
                return self._by_kernels(self._kernels, layers, cache, hidden, slots, positions, rotations, following)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # of whatever kind a compiler has
                self._without_kernels(error)
        rotation = _rotation_at(rotations, positions)
        for (weights, settings), window, stores in zip(layers, cache.windows, cache.stores, strict=True):
            assert stores is not None, "a step before a prompt"
            if window not in masks:
                masks[window] = position_mask(positions, cache.shape[1], window, hidden.dtype)
            hidden = self._layer(
                hidden, weights, settings, stores, slots, positions, rotation, masks[window], gathered=gathered
            )
        return hidden

    def _by_kernels(
        self,
        kernels: DecodeKernels,
        layers: list[Layer],
        cache: StageCache,
        hidden: Tensor,
        slots: Tensor,
        positions: Tensor,
        rotations: tuple[Tensor, Tensor],
        following: Tensor | None,
    ) -> Tensor:
        prepared = self._prepared(hidden, layers[0][0].norm)
        gains = [*(weights.norm for weights, _ in layers[1:]), following]
        for (weights, settings), window, stores, gain in zip(layers, cache.windows, cache.stores, gains, strict=True):
            assert stores is not None, "a step before a prompt"
            output, prepared = kernels.layer(
                hidden, weights, settings, stores, slots, positions, rotations, window,
                prepared=prepared, following=gain,
            )  # fmt: skip
            if "layer" in self._unchecked:  # when warming up: a graph could not wait for the answer
                self._unchecked.remove("layer")
                rotation = _rotation_at(rotations, positions)
                mask = position_mask(positions, cache.shape[1], window, hidden.dtype)
                expected = layer_step(
                    hidden, weights, settings, stores, slots, positions, rotation, mask, gathered=True
                )
                if not agree(output, expected, hidden):
                    raise ArithmeticError("their results are not those of the layer")
            hidden = output
        self._handed_on = None if prepared is None or following is None else (hidden, following, prepared)
        return hidden

    def _prepared(self, hidden: Tensor, gain: Tensor) -> Prepared | None:
        """What the kernel that made this very tensor has prepared for a norm with this gain."""
        handed_on, self._handed_on = self._handed_on, None
        if handed_on is None or handed_on[0] is not hidden or handed_on[1] is not gain:
            return None
        return handed_on[2]

    def logits(self, ends: StageModel, hidden: Tensor) -> Tensor:
        """As `cached_stage.logits`, of hidden states [rows, d]."""
        norm: Any = ends.norm
        head: Any = ends.head
        plain = type(head) is nn.Linear and head.bias is None and hasattr(norm, "variance_epsilon")
        if self._kernels is None or not plain or len(hidden) > MOST_ROWS:
            return logits(ends, hidden)
        try:
            found = self._kernels.product(
                hidden, head.weight, gain=norm.weight, epsilon=norm.variance_epsilon, dtype=torch.float32,
                prepared=self._prepared(hidden, norm.weight),
            )  # fmt: skip
            if "logits" in self._unchecked:
                self._unchecked.remove("logits")
                if not agree(found, logits(ends, hidden)):
                    raise ArithmeticError("their results are not those of the head")
            return found
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            self._without_kernels(error)
            return logits(ends, hidden)

    def _without_kernels(self, error: Exception) -> None:
        self._kernels = None
        warn_unused(f"{type(error).__name__}: {error}")


class StaticStep:
    """The step of one size of batch, on caches of one size: from tokens and positions to logits, all in place.

    To run it twice is to run it once, as it writes the same keys and values.
    """

    def __init__(self, decoding: StaticDecoding, batch: int) -> None:
        self.logits: Tensor
        self._decoding = decoding
        self._tokens = torch.zeros(batch, dtype=torch.long, device=decoding.device)
        self._positions = torch.zeros_like(self._tokens)
        self._rows = torch.arange(batch, device=decoding.device)
        self._graph: torch.cuda.CUDAGraph | None = None

    def load(self, tokens: Sequence[int], positions: Sequence[int]) -> None:
        """Rows without a sequence get a token at position 0 of their slots, which are free."""
        unused = [0] * (len(self._tokens) - len(tokens))
        both = torch.tensor([[*tokens, *unused], [*positions, *unused]])
        if self._tokens.is_cuda:
            both = both.pin_memory().to(self._tokens.device, non_blocking=True)
        self._tokens.copy_(both[0])
        self._positions.copy_(both[1])

    def feed(self, chosen: Tensor) -> None:
        """The tokens that were just chosen are the next ones."""
        self._tokens[: len(chosen)].copy_(chosen)
        self._positions[: len(chosen)].add_(1)

    def launch(self) -> None:
        """On a GPU it is recorded the first time."""
        if self._graph is None and self._tokens.is_cuda:
            self._graph, self.logits = recorded(self._run, self._tokens.device)
        if self._graph is not None:
            self._graph.replay()
        else:
            self.logits = self._run()

    def _run(self) -> Tensor:
        return self._decoding.run(self._tokens, self._positions, self._rows)


class StaticDecoding:
    """A chain of stages whose layers are all known to `fuse`, as a function of tokens and positions."""

    def __init__(self, staged: StagedModel, chain: StageChain, layers: list[list[Layer]], runner: LayerRunner) -> None:
        self._staged = staged
        self._chain = chain
        self._layers = layers
        """Weights and settings of each layer of each stage."""
        self._runner = runner
        self.device = next(staged.stages[0].parameters()).device
        self._steps: dict[int, StaticStep] = {}
        self._shape = 0, 0
        self._rotations: list[tuple[Tensor, Tensor]] = []
        """Rotations of each stage; kept, because graphs read them where they are."""

    def step(self, batch: int) -> StaticStep:
        """The step of a batch. Other caches than before make all steps of before useless."""
        shape = self._chain.stages[0].cache.shape
        if shape != self._shape:
            self._steps.clear()
            self._shape = shape
            like = next(self._staged.stages[0].parameters())
            self._rotations = [stage.rotations(shape[1], like) for stage in self._chain.stages]
        if batch not in self._steps:
            self._steps[batch] = StaticStep(self, batch)
        return self._steps[batch]

    def run(self, tokens: Tensor, positions: Tensor, rows: Tensor) -> Tensor:
        """Logits of the tokens that follow, [rows, vocabulary]."""
        chain, ends = self._chain, self._staged.stages[0]
        hidden, masks = ends.embed(tokens), dict[int | None, Tensor]()
        gains: list[Any] = [*(layers[0][0].norm for layers in self._layers[1:]), getattr(ends.norm, "weight", None)]
        tables = zip(chain.visits, chain.stages, self._layers, self._rotations, gains, strict=True)
        for number, stage, layers, rotations, gain in tables:
            output = self._runner.run(layers, stage.cache, hidden, rows, positions, rotations, masks, following=gain)
            hidden = stage.handed_on(hidden, output, *chain.way_on(number))
        return self._runner.logits(ends, hidden)


class Ahead(NamedTuple):
    """A step that was launched before it was asked for."""

    step: StaticStep
    expects: tuple[tuple[Generation, int], ...]
    """The sequence of each row, and how many tokens it has then."""


class StaticDecoder(TokenByToken):
    """All stages of the subset for every token, with static shapes wherever a batch allows it."""

    def __init__(
        self,
        staged: StagedModel,
        subset: StageSubset,
        max_tokens: int,
        *,
        compiled: bool = False,
        kernels: bool = True,
        early: bool | None = None,
        ahead: bool = AHEAD,
    ) -> None:
        """`compiled` by torch.compile; else `kernels` of Triton where they can run; `early` and `ahead`: as of
        `kernels_for`."""
        super().__init__(staged, subset, max(max_tokens, LEAST_TOKENS))
        self._static: StaticDecoding | None = None
        """None: a layer is of a kind that `fused_layers` does not know."""
        layers = [each for each in map(fused_layers, self._whole.stages) if each is not None]
        if len(layers) == len(self._whole.stages):
            device, known = next(staged.stages[0].parameters()).device, [layer for each in layers for layer in each]
            launched = kernels_for(device, known, early=early, ahead=ahead) if kernels and not compiled else None
            self._static = StaticDecoding(staged, self._whole, layers, LayerRunner(launched, compiled=compiled))
        self._ahead: Ahead | None = None

    def begin(self, generations: Sequence[Generation]) -> list[list[int]]:
        if self._static is not None:
            self._reserve(max(each.slot for each in generations) + 1, generations)
        return super().begin(generations)

    @torch.inference_mode()
    def advance(self, generations: Sequence[Generation]) -> list[list[int]]:
        step = self._prepared(generations)
        if step is None:
            return super().advance(generations)
        sampling = [each.request.sampling for each in generations]
        values = step.logits[: len(generations)]
        changed = any(each.changes_logits for each in sampling)
        if changed:
            values = self._changed(values, generations, [])
        highest, chosen = choose(values, sampling, [len(each.tokens) for each in generations])
        reader = TokenReader(highest, chosen)
        if not changed:
            self._launch_ahead(step, chosen, generations)
        return [[token] for token in reader.tokens()]

    def _prepared(self, generations: Sequence[Generation]) -> StaticStep | None:
        """The step of these sequences, launched; None: the batch is not for static shapes."""
        ahead, self._ahead = self._ahead, None
        count = len(generations)
        rows = rows_after(generations, [1] * count)
        if self._static is None or rows.slots != tuple(range(count)):
            return None
        batch = 1 << (count - 1).bit_length()
        if not self._reserve(batch, generations):
            return None
        self._whole.extend(rows)
        step = self._static.step(batch)
        expected = tuple((each, len(each.tokens)) for each in generations)
        if ahead is None or ahead.step is not step or ahead.expects != expected:
            step.load([each.tokens[-1] for each in generations], rows.starts)
            step.launch()
        return step

    def _launch_ahead(self, step: StaticStep, chosen: Tensor, generations: Sequence[Generation]) -> None:
        if max(len(each.tokens) for each in generations) >= self._whole.stages[0].cache.shape[1]:
            return
        step.feed(chosen)
        step.launch()
        self._ahead = Ahead(step, tuple((each, len(each.tokens) + 1) for each in generations))

    def _reserve(self, slots: int, generations: Sequence[Generation]) -> bool:
        """Make room for these sequences to their end; False if there is not enough for slots of equal size."""
        longest = max(each.max_length for each in generations)
        try:
            self._whole.reserve(slots, max(LEAST_ROOM, 1 << (longest - 1).bit_length()))
        except CacheFull:
            return False
        return True


def decoder_for(staged: StagedModel, subset: StageSubset, max_tokens: int) -> TokenByToken:
    """On a GPU with static shapes, not compiled, which would take longer than most texts; else plainly."""
    static = torch.device(staged.device).type == "cuda"
    return StaticDecoder(staged, subset, max_tokens) if static else TokenByToken(staged, subset, max_tokens)


class StaticStage(CachedStage):
    """A stage and its KV cache, for a node that serves, that passes batches of single tokens as one CUDA graph.

    As when decoding, but from hidden states to hidden states, and rows may name any slots, whose keys and values are
    gathered for attention. Rows that fill a batch up to a power of two are copies of the first: they write the same
    values to the same places. Prompts, and stages whose layers `fused_layers` does not know, are computed plainly.
    """

    def __init__(self, model: StageModel, max_tokens: int) -> None:
        super().__init__(model, max_tokens)
        self._layers = fused_layers(self)
        device = next(model.parameters()).device
        self._runner = LayerRunner(kernels_for(device, self._layers or ()))
        self._steps: dict[Hashable, StageStaticStep] = {}
        self._shape = 0, 0

    @torch.inference_mode()
    def forward(
        self, hidden: Tensor, rows: BatchRows, residual_scale: float = 1.0, hop: StageHop | None = None
    ) -> Tensor:
        if self._layers is None or not rows.single or any(each is None for each in self.cache.stores):
            return super().forward(hidden, rows, residual_scale, hop)
        self.cache.reserve(max(rows.slots) + 1, rows.end)
        if self.cache.shape != self._shape:  # graphs of before write where the cache was
            self._shape = self.cache.shape
            self._steps.clear()
        batch = 1 << (len(rows.slots) - 1).bit_length()
        key = batch, residual_scale, hop
        if key not in self._steps:
            if len(self._steps) >= MOST_GRAPHS:
                return super().forward(hidden, rows, residual_scale, hop)
            self._steps[key] = StageStaticStep(
                self, self._runner, self._layers, batch, hidden[:1, 0], residual_scale, hop
            )
        self.cache.extend(rows)
        return self._steps[key].run(hidden, rows)


class StageStaticStep:
    """The step of one size of batch."""

    def __init__(
        self,
        stage: CachedStage,
        runner: LayerRunner,
        layers: list[Layer],
        batch: int,
        like: Tensor,
        residual_scale: float,
        hop: StageHop | None,
    ) -> None:
        self._stage, self._runner, self._layers = stage, runner, layers
        self._way_on = residual_scale, hop
        self._rotations = stage.rotations(stage.cache.shape[1], like)  # kept, because a graph reads them where they are
        self._hidden = torch.zeros(batch, like.shape[-1], dtype=like.dtype, device=like.device)
        self._where = torch.zeros(2, batch, dtype=torch.long, device=like.device)
        """Slots and positions."""
        self._graph: torch.cuda.CUDAGraph | None = None
        self._output: Tensor

    def run(self, hidden: Tensor, rows: BatchRows) -> Tensor:
        count, missing = len(rows.slots), len(self._hidden) - len(rows.slots)
        slots, positions = rows.slots + rows.slots[:1] * missing, rows.starts + rows.starts[:1] * missing
        self._where.copy_(torch.tensor([slots, positions]))
        self._hidden[:count].copy_(hidden[:, 0])
        self._hidden[count:].copy_(hidden[:1, 0].expand(missing, -1))
        if self._hidden.is_cuda:
            if self._graph is None:
                self._graph, self._output = recorded(self._step, self._hidden.device)
            self._graph.replay()
        else:
            self._output = self._step()
        return self._output[:count, None].clone()

    def _step(self) -> Tensor:
        slots, positions = self._where
        output = self._runner.run(
            self._layers, self._stage.cache, self._hidden, slots, positions, self._rotations, {}, gathered=True
        )
        return self._stage.handed_on(self._hidden, output, *self._way_on)
