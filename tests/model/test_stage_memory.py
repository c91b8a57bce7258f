"""What a stage keeps and needs in memory is what plans count."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile

from skippipe import workload
from skippipe.model.model_spec import ModelSpec, config_from, llama_config
from skippipe.model.stage import StageModel
from skippipe.model.stage_step import StageStep, TeacherHidden
from skippipe.model.stand_ins import StagePlace
from skippipe.model_shape import ModelShape
from skippipe.optim.config import OptimConfig
from skippipe.stage_subset import StageHop
from skippipe.workload import Workload

SHAPE = ModelShape("small", 2, 64, 4, 2, 16, 192, 512)
SHAPES = [SHAPE, ModelShape("deep", 3, 32, 4, 4, 8, 256, 256), replace(SHAPE, tied_embeddings=True)]
TINY = ModelShape("tiny", 2, 32, 2, 1, 16, 64, 128)
"""For what has nothing to do with sizes: some processors take long for bf16."""
WITHOUT_GATE = replace(SHAPE, name="without a gate", gated=False)
KEY = (0, 0)


def stage_of(shape: ModelShape, work: Workload | None = None, **options: Any) -> StageStep:
    config: Any = llama_config(shape)
    if shape.experts > 1:
        mixture = {"num_local_experts": shape.experts, "num_experts_per_tok": shape.experts_active}
        config = config_from(config.to_dict() | {"model_type": "mixtral", "router_aux_loss_coef": 0.0, **mixture})
    elif not shape.gated:
        config = config_from(config.to_dict() | {"model_type": "arcee", "hidden_act": "relu2"})
    spec = ModelSpec(config, seed=0)
    if work is not None:
        options = {"compute_dtype": work.compute_dtype, "recompute": work.activation_checkpointing, **options}
    return StageStep(spec, range(shape.layers), OptimConfig(), ends=True, **options)


def workload_of(
    shape: ModelShape, compute_dtype: str, checkpointing: bool = False, *, tokens: int = 32, samples: int = 1
) -> Workload:
    """Small, for processors that take long for bf16."""
    return Workload(shape, tokens, samples, 4, compute_dtype=compute_dtype, activation_checkpointing=checkpointing)


def drawn(work: Workload) -> tuple[Tensor, Tensor]:
    """Activations and labels of a microbatch."""
    torch.manual_seed(0)
    sizes = work.samples_per_microbatch, work.sequence_tokens
    return torch.randn(*sizes, work.model.hidden), torch.randint(work.model.vocab, sizes)


def peak_bytes(run: Callable[[], object]) -> int:
    """The most memory that was allocated at one time, beyond what there was."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        run()
    events = found.profiler.kineto_results.events()
    now = most = 0
    for _, size in sorted((each.start_ns(), each.nbytes()) for each in events if each.name() == "[memory]"):
        now += size
        most = max(most, now)
    return most


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("compute_dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("shape", [*SHAPES[:2], WITHOUT_GATE], ids=lambda shape: shape.name)
def test_what_a_microbatch_keeps_is_counted(shape: ModelShape, compute_dtype: str, checkpointing: bool) -> None:
    work = workload_of(shape, compute_dtype, checkpointing)
    step, (hidden, _) = stage_of(shape, work), drawn(work)
    assert kept_bytes(step, hidden) == pytest.approx(work.held_bytes(shape.layers), rel=0.01)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("compute_dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("experts", [4, 16])
def test_experts_keep_and_need_what_is_counted(experts: int, compute_dtype: str, checkpointing: bool) -> None:
    """In fp32, and their gradients all at once. Where a layer is recomputed, not all of it is there at one time."""
    shape = replace(SHAPE, intermediate=96, experts=experts, experts_active=2)
    work = workload_of(shape, compute_dtype, checkpointing, tokens=256)
    step, (hidden, _) = stage_of(shape, work), drawn(work)
    assert kept_bytes(step, hidden) == pytest.approx(work.held_bytes(shape.layers), rel=0.05)
    step.drop_all()
    for _ in range(2):
        step.forward(KEY, hidden)
        found = peak_bytes(lambda: step.backward(KEY, hidden))
    assert (0.7 if checkpointing else 0.9) < found / work.working_bytes(1, shape.layers) < 1.1


@pytest.mark.parametrize("compute_dtype", ["fp32", "bf16"])
def test_a_hop_past_other_stages_keeps_little_if_layers_are_recomputed(compute_dtype: str) -> None:
    work = workload_of(SHAPE, compute_dtype, checkpointing=True)
    step, counted = with_stand_ins(work, rank=8, bridge=4, repeats=1)
    hidden, tensor_bytes = drawn(work)[0], work.held_bytes(0)
    assert kept_bytes(step, hidden, StageHop(0, 1, 2)) == (SHAPE.layers + 1) * tensor_bytes
    assert kept_bytes(step, hidden, StageHop(0, 3, 2)) == counted.held_bytes(SHAPE.layers)


def with_stand_ins(work: Workload, rank: int, bridge: int, repeats: int) -> tuple[StageStep, Workload]:
    """A stage with them, the first of six, and the workload that counts them."""
    shape = work.model
    spec = ModelSpec(llama_config(shape), 0, None, bridge, rank, repeats)
    options: dict[str, Any] = {"compute_dtype": work.compute_dtype, "recompute": work.activation_checkpointing}
    step = StageStep(spec, range(shape.layers), OptimConfig(), ends=False, place=StagePlace(0, 6), **options)
    adapters = shape.adapter_parameters(rank)
    return step, replace(work, adapter_parameters=adapters, bridge_rank=bridge, repeats=repeats)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("compute_dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(("rank", "bridge", "repeats"), [(64, 16, 0), (66, 16, 2), (0, 16, 0), (6, 4, 1)])
def test_what_stands_in_for_stages_keeps_what_is_counted(
    rank: int, bridge: int, repeats: int, compute_dtype: str, checkpointing: bool
) -> None:
    """As large as the model is wide: adapters keep about as much then as they do beside a large model."""
    work = workload_of(SHAPE, compute_dtype, checkpointing)
    step, counted = with_stand_ins(work, rank, bridge, repeats)
    found = kept_bytes(step, drawn(work)[0], StageHop(0, 2 + repeats, 1 + repeats))
    assert found == pytest.approx(counted.held_bytes(SHAPE.layers), rel=0.01)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("compute_dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("repeats", [0, 1])
def test_what_a_backward_pass_of_adapters_needs_is_counted(
    repeats: int, compute_dtype: str, checkpointing: bool
) -> None:
    """Above all the gradients of all adapters, where layers run again."""
    work = workload_of(replace(SHAPE, layers=4), compute_dtype, checkpointing)
    step, counted = with_stand_ins(work, 64, 16, repeats)
    hidden, hop = drawn(work)[0], StageHop(0, 2, 1)
    for _ in range(2):
        step.forward(KEY, hidden, hop=hop)
        found = peak_bytes(lambda: step.backward(KEY, hidden))
    expected = counted.working_bytes(1, 4)
    copied = 4 * SHAPE.largest_adapter_matrix(64) if compute_dtype == "bf16" and not checkpointing else 0
    assert 0.7 * expected < found <= 1.01 * (expected + copied)
    assert found > 0.9 * expected or not repeats


def kept_bytes(step: StageStep, hidden: Tensor, hop: StageHop | None = None) -> int:
    """Bytes that a microbatch on this hop keeps after its forward pass, all but those of weights."""
    step.evaluate(hidden)  # rotations and masks, which all microbatches share
    shared = {each.untyped_storage().data_ptr() for each in step.model.parameters()}
    turns = (pair for _, rotations, _ in step.model._of_shape.values() for pair in rotations.values())
    shared |= {each.untyped_storage().data_ptr() for pair in turns for each in pair}
    found: dict[int, int] = {}

    def note(each: Tensor) -> Tensor:
        storage = each.untyped_storage()
        if storage.data_ptr() not in shared:
            found[storage.data_ptr()] = storage.nbytes()
        return each

    with saved_tensors_hooks(note, lambda each: each):
        step.forward(KEY, hidden, hop=hop)
    for each in step.held[KEY]:
        if each is not None:
            note(each)
    return sum(found.values())


@pytest.mark.parametrize("compute_dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("shape", [SHAPE, SHAPES[2]], ids=["untied", "tied"])
def test_what_the_head_needs_is_counted(shape: ModelShape, compute_dtype: str) -> None:
    work = workload_of(shape, compute_dtype, tokens=128, samples=2)
    step, given = stage_of(shape, work), drawn(work)
    step.head(KEY, *given)
    assert peak_bytes(lambda: step.head(KEY, *given)) == pytest.approx(work._head_work_bytes(), rel=0.03)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("compute_dtype", ["fp32", "bf16"])
def test_what_a_backward_pass_needs_is_counted(compute_dtype: str, checkpointing: bool) -> None:
    """On a CPU, the sum of a bf16 and an fp32 tensor takes a copy in between."""
    work = workload_of(SHAPE, compute_dtype, checkpointing)
    step, (hidden, _) = stage_of(SHAPE, work), drawn(work)
    for _ in range(2):
        step.forward(KEY, hidden)
        found = peak_bytes(lambda: step.backward(KEY, hidden))
    counted = work._layer_work_bytes()
    copied = 4 * SHAPE.hidden * SHAPE.intermediate if compute_dtype == "bf16" and not checkpointing else 0
    assert 0.6 * counted < found <= 1.01 * (counted + copied)


def test_a_head_in_pieces_is_the_same_head(monkeypatch: pytest.MonkeyPatch) -> None:
    work = workload_of(SHAPE, "fp32", tokens=128, samples=2)
    hidden, labels = drawn(work)
    labels[0, 100:] = -100  # these do not count
    found = []
    for most in (2**27, 2**14):
        monkeypatch.setattr(workload, "LOGIT_VALUES", most)
        step = stage_of(SHAPE, work)
        made = step.head(KEY, hidden, labels, share=0.5)
        found.append((*made, step.weights.gradient, step.evaluate_head(hidden, labels)))
    assert workload.head_pieces(labels.numel(), SHAPE.vocab) == 8
    for whole, pieces in zip(*found, strict=True):
        torch.testing.assert_close(pieces, whole, rtol=1e-5, atol=1e-7)


def test_a_head_learns_from_a_teacher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in pieces; and the loss is that of the text."""
    work = workload_of(SHAPE, "fp32", tokens=128, samples=2)
    hidden, labels = drawn(work)
    teacher = TeacherHidden(drawn(work)[0].roll(1, 1), 0.75, 3.0)
    labels[0, 100:] = -100  # these do not count
    step = stage_of(SHAPE, work)
    norm, head = step.model.norm, step.model.head
    assert norm is not None and head is not None
    leaf = hidden.clone().requires_grad_()
    values, counted = head(norm(leaf)), labels.flatten() >= 0
    shares = head(norm(teacher.hidden)).detach().flatten(0, 1)[counted].softmax(-1)
    of_text = functional.cross_entropy(values.flatten(0, 1), labels.flatten())
    of_teacher = functional.cross_entropy(values.flatten(0, 1)[counted], shares)
    units = [functional.normalize(each, dim=-1) * SHAPE.hidden**0.5 for each in (leaf, teacher.hidden)]
    distance = 3.0 * (units[0] - units[1]).square().mean()
    weights = [*norm.parameters(), *head.parameters()]
    total = 0.25 * of_text + 0.75 * of_teacher
    expected = torch.autograd.grad(0.5 * total + distance, [leaf, *weights])
    for most in (2**27, 2**14):
        monkeypatch.setattr(workload, "LOGIT_VALUES", most)
        step.weights.clear_gradient()
        loss, back = step.head(KEY, hidden, labels, share=0.5, teacher=teacher)
        torch.testing.assert_close(loss, 0.5 * of_text.detach())
        for found, wanted in zip((back, *(each.grad for each in weights)), expected, strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("shape", [TINY, replace(TINY, tied_embeddings=True)], ids=["untied", "tied"])
def test_copies_of_weights_compute_what_autocast_does(shape: ModelShape, split: bool) -> None:
    work = workload_of(shape, "bf16")
    hidden, labels = drawn(work)
    step = stage_of(shape, work, split_backward=split)
    model = StageModel(ModelSpec(llama_config(shape), seed=0), range(shape.layers), ends=True)
    outputs, given = step.forward(KEY, hidden), hidden.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(given.to(torch.bfloat16))
        loss = model.loss(leaf := expected.detach().float().requires_grad_(), labels)
    torch.autograd.backward([loss])
    assert leaf.grad is not None
    torch.autograd.backward([expected], [leaf.grad.to(torch.bfloat16)])
    found, back = step.head(KEY, outputs.float(), labels)
    before = step.backward(KEY, back)
    if split:
        step.weight_gradients(KEY)
    assert torch.equal(outputs, expected)
    assert torch.equal(found, loss)
    assert before is not None and given.grad is not None
    assert torch.equal(before, given.grad)
    expected_gradients = {name: each.grad for name, each in model.named_weights()}
    assert sum(each is None for each in expected_gradients.values()) == (not shape.tied_embeddings)  # the embedding
    for slot in step.weights.slots:
        gradient = expected_gradients[slot.name]
        assert gradient is None or torch.equal(slot.of(step.weights.gradient), gradient), slot.name


def test_copies_of_weights_are_made_anew_only_after_a_change() -> None:
    """Not for every piece of an evaluation, and not for the next microbatch: weights change once in an iteration."""
    work = workload_of(TINY, "bf16")
    step, (hidden, _) = stage_of(TINY, work), drawn(work)
    first = step.evaluate(hidden)
    assert step._copies is not None
    for copy, _ in step._copies._pairs:
        copy.zero_()  # which shows that they are in use
    for _ in range(2):
        assert not torch.equal(step.evaluate(hidden), first)
        assert not torch.equal(step.forward(KEY, hidden), first)
        step.drop_all()
    step.weights.write_state(0, step.weights.read_state(0, 1))
    assert torch.equal(step.evaluate(hidden), first)


def test_copies_of_weights_follow_them() -> None:
    work = workload_of(TINY, "bf16")
    step, (hidden, _) = stage_of(TINY, work), drawn(work)
    first = step.evaluate(hidden)
    step.forward(KEY, hidden)  # from now on, a microbatch uses the copies
    step.weights.write_state(0, torch.zeros(len(step.weights.values)))
    assert not torch.equal(step.evaluate(hidden), first)
    step.weights.values.copy_(stage_of(TINY).weights.values)  # by whoever has the tensor
    assert torch.equal(step.evaluate(hidden), first)
    step.drop_all()
    for slot in step.weights.slots:
        slot.of(step.weights.values).zero_()
    assert not torch.equal(step.evaluate(hidden), first)
    step.weights.values.copy_(stage_of(TINY).weights.values)
    assert torch.equal(step.evaluate(hidden), first)
    step.forward(KEY, hidden)
    step.weights.gradient.fill_(1.0)
    step.weights.step(0.1, 1.0)
    assert not torch.equal(step.evaluate(hidden), first)
