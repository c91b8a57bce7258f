"""Decoding side by side with transformers: the same model, the same prompts, in turns.

    python -m benchmarks.decoding [--checkpoint FOLDER [--cut 6]] [--device cuda] [--tokens 128] [--rounds 5]
    python -m benchmarks.decoding --model llama-500m --device cuda --dtype bf16 --only static
    python -m benchmarks.decoding --model llama-1.5b --only kernels [--seconds 45]
    python -m benchmarks.decoding --checkpoint FOLDER --draft 0 --draft 0,1 --only drafts

Tokens/s of decoding, prompts aside: the time for all tokens less the time for the first one. Then drafts: how much
faster than without, by stages that draft, for several texts one after another. Prompts are passages of a text that the
model was not trained on. Without a checkpoint weights are random, as are prompts, and what drafts get right.

With `--only static`: 8 texts of unequal length with static shapes, on a GPU by Triton kernels, and compiled, against
transformers as it comes, and with its static cache, which it compiles on a GPU by itself. Share of the memory rate: the
time in which the weights could be read once, at the rate of a large copy on the device, as a share of the time of a
step. With `--only kernels`: see `benchmarks.decode_kernels`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, cast

import torch
from transformers import AutoModelForCausalLM

from skippipe.data.documents import source
from skippipe.inference.cached_stage import DTYPES, DtypeName, convert
from skippipe.inference.checkpoint_loader import StagedModel, load
from skippipe.inference.engine import Decoder, GenerationEngine, TokenByToken
from skippipe.inference.request import GenerationRequest, SamplingParams
from skippipe.inference.speculative import Speculator, parse_draft, pick_draft
from skippipe.inference.static_decoding import StaticDecoder
from skippipe.model.model_spec import ModelSpec, llama_config
from skippipe.model.stage import StageModel, layer_ranges
from skippipe.model_shape import MODELS, ModelShape
from skippipe.stage_subset import StageSubset
from skippipe.workload import Workload

STAGES = 6
SAMPLE_TOKENS = 48  # by which 'auto' picks a draft
PASSAGE = 20_000  # characters from one prompt to the next
SMALL = ModelShape("small", layers=12, hidden=256, heads=8, kv_heads=4, head_dim=32, intermediate=688, vocab=4096)
GREEDY = SamplingParams(temperature=0)
Prompts = Sequence[tuple[int, ...]]
Work = Callable[[int], object]
"""So many tokens for each prompt."""


class NoText:
    """For random weights."""

    eos_token_id = None

    def decode(self, tokens: Sequence[int], **_options: Any) -> str:
        return " " * len(tokens)


def random_model(device: str, shape: ModelShape = SMALL) -> StagedModel:
    spec = ModelSpec(llama_config(shape, initializer_range=0.1 if shape is SMALL else 0.02), seed=0)
    ranges = enumerate(layer_ranges(Workload(shape).layer_split(STAGES)))
    stages = [StageModel(spec, each, ends=number == 0).eval().to(device) for number, each in ranges]
    return StagedModel(stages, NoText(), 0, 8192, device)


def theirs_of(staged: StagedModel, kind: DtypeName) -> Any:
    """The whole model in transformers, with the same weights; nothing ends a text."""
    with torch.device(staged.device):
        model: Any = AutoModelForCausalLM.from_config(staged.stages[0].spec.config, trust_remote_code=False)  # type: ignore[no-untyped-call]
    weights = {name: each for stage in staged.stages for name, each in stage.named_weights()}
    with torch.no_grad():
        for name, each in model.named_parameters():
            each.copy_(weights[name])
    model.generation_config.eos_token_id = None
    return model.to(device=staged.device, dtype=DTYPES[kind]).eval()


def theirs(model: Any, prompts: Prompts, tokens: int, **options: Any) -> list[list[int]]:
    width = max(map(len, prompts))
    padded = torch.tensor([[*[0] * (width - len(each)), *each] for each in prompts], device=model.device)
    seen = torch.tensor([[0] * (width - len(each)) + [1] * len(each) for each in prompts], device=model.device)
    options |= {"do_sample": False, "max_new_tokens": tokens, "pad_token_id": 0}
    made = model.generate(padded, attention_mask=seen, **options)
    found: list[list[int]] = made[:, width:].tolist()
    return found


def ours(
    staged: StagedModel, decoder: Decoder, prompts: Prompts, tokens: int, how: SamplingParams = GREEDY
) -> list[list[int]]:
    generator = GenerationEngine(staged, decoder, len(prompts), end_tokens=frozenset())
    return [
        generation.output_tokens
        for generation in generator.run(GenerationRequest(prompt, tokens, how) for prompt in prompts)
    ]


def one_by_one(
    staged: StagedModel, how: SamplingParams, prompts: Prompts, decoder: Decoder, tokens: int
) -> list[list[int]]:
    return [output_tokens for prompt in prompts for output_tokens in ours(staged, decoder, [prompt], tokens, how)]


def clock() -> float:
    """On one thread of a CPU, seconds in which this process ran: the machine may be busy with others."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time() if torch.get_num_threads() == 1 else time.perf_counter()


def seconds_of(work: Work, tokens: int) -> float:
    began = clock()
    work(tokens)
    return clock() - began


def side_by_side(works: Sequence[Work], tokens: int, rounds: int) -> list[list[float]]:
    """Seconds of decoding in each round, for each of the works, which take turns."""
    for work in works:
        work(1)
        work(tokens)  # warms up
    taken: list[list[float]] = [[] for _ in works]
    for _ in range(rounds):
        for work, mine in zip(works, taken, strict=True):
            first = seconds_of(work, 1)
            mine.append(seconds_of(work, tokens) - first)
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--cut")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--text", default="classics-val", help="that prompts are taken from; default: %(default)s")
    parser.add_argument("--prompts", type=int, default=4, help="of texts with drafts; default: %(default)s")
    parser.add_argument("--draft", action="append", help="stages that draft, as in 0,1; default: all that 'auto' tries")
    parser.add_argument("--temperature", type=float, default=0.0, help="of texts with drafts; default: %(default)s")
    parser.add_argument("--only", choices=("transformers", "static", "drafts", "kernels"))
    parser.add_argument("--seconds", type=float, default=45.0, help="for tiles of kernels; default: %(default)s")
    parser.add_argument("--model", choices=MODELS, help="a shape, with random weights")
    asked = parser.parse_args()
    shape = MODELS[asked.model] if asked.model else SMALL
    if asked.only == "kernels":
        from benchmarks.decode_kernels import measure  # needs Triton

        kind = torch.bfloat16 if asked.device.startswith("cuda") else torch.float32  # the interpreter has no bf16
        measure(shape, asked.device, kind, copy_rate(asked.device), asked.seconds)
        return
    staged = load(asked.checkpoint, asked.cut, asked.device) if asked.checkpoint else random_model(asked.device, shape)
    convert(staged, asked.dtype)
    count = sum(each.numel() for stage in staged.stages for _, each in stage.named_weights())
    print(
        f"{count / 1e6:.1f}M parameters, {len(staged.stages)} stages, {asked.dtype}, {asked.device}, "
        f"{torch.get_num_threads()} threads, {asked.tokens} tokens",
        flush=True,
    )
    parts = {"transformers": against_transformers, "static": with_static_shapes, "drafts": drafts}
    for name in [asked.only] if asked.only else parts:
        parts[name](staged, asked)


def against_transformers(staged: StagedModel, asked: argparse.Namespace) -> None:
    model = theirs_of(staged, asked.dtype)
    whole = StageSubset(tuple(range(len(staged.stages))), len(staged.stages))
    for name, lengths in (("1 text", [32]), ("8 texts", [32] * 8), ("8 texts, unequal", range(4, 68, 8))):
        prompts = prompts_of(staged, lengths, asked)
        decoder = TokenByToken(staged, whole, 2**20)
        works = partial(theirs, model, prompts), partial(ours, staged, decoder, prompts)
        other, mine = side_by_side(works, asked.tokens, asked.rounds)
        made = len(prompts) * (asked.tokens - 1)
        ratio = median(a / b for a, b in zip(other, mine, strict=True))
        pairs = zip(theirs(model, prompts, asked.tokens), ours(staged, decoder, prompts, asked.tokens), strict=True)
        print(
            f"{name}: transformers {made / median(other):,.0f} tokens/s, ours {made / median(mine):,.0f}: "
            f"{ratio:.2f} times as fast (goal 0.9); {sum(a == b for a, b in pairs)} of {len(prompts)} texts the same",
            flush=True,
        )


def with_static_shapes(staged: StagedModel, asked: argparse.Namespace) -> None:
    """Printed one by one: a GPU is lent for a short time, and what comes last may not be reached."""
    model = theirs_of(staged, asked.dtype)
    whole = StageSubset(tuple(range(len(staged.stages))), len(staged.stages))
    prompts = prompts_of(staged, range(4, 68, 8), asked)
    card = asked.device.startswith("cuda")
    ways: dict[str, dict[str, Any]] = {"static shapes": {}}
    if card:  # where its kernels cannot run, the first is as the last, after a warning
        ways = {
            "static shapes, Triton, ahead": {"early": False},
            "static shapes, Triton, ahead, early": {"early": True},
            "static shapes, Triton": {"ahead": False, "early": False},
            "static shapes, compiled": {"compiled": True},
            "static shapes, not compiled": {"kernels": False},
        }
    works: dict[str, Work] = {
        name: partial(ours, staged, StaticDecoder(staged, whole, 2**20, **options), prompts)
        for name, options in ways.items()
    }
    works |= {
        "transformers": partial(theirs, model, prompts),
        "transformers, static cache": partial(theirs, model, prompts, cache_implementation="static"),
        "plain": partial(ours, staged, TokenByToken(staged, whole, 2**20), prompts),
    }
    ends = staged.stages[0]
    assert ends.embedding is not None
    looked_up = 0 if ends.spec.tied else next(ends.embedding.parameters()).nbytes  # of which a step reads a few rows
    weight_bytes = sum(each.nbytes for stage in staged.stages for _, each in stage.named_weights()) - looked_up
    rate = copy_rate(asked.device)
    print(f"{weight_bytes / 1e9:.2f} GB of weights a step, memory rate {rate / 1e12:.2f} TB/s", flush=True)
    expected = theirs(model, prompts, asked.tokens)
    first_s = 0.0
    for name, work in works.items():
        try:
            (taken,) = side_by_side([work], asked.tokens, asked.rounds)
            same = sum(a == b for a, b in zip(cast(list[list[int]], work(asked.tokens)), expected, strict=True))
        except Exception as error:  # one that cannot be compiled there does not hide the others
            print(f"{name}: {type(error).__name__}: {str(error)[:500]}", flush=True)
            continue
        step_s = median(taken) / (asked.tokens - 1)
        first_s = first_s or step_s
        print(
            f"{name}: {len(prompts) / step_s:,.0f} tokens/s, {1e3 * step_s:.3f} ms a step, "
            f"{weight_bytes / rate / step_s:.0%} of the memory rate (goal 50%); "
            f"the first is {step_s / first_s:.2f} times as fast; {same} of {len(prompts)} texts the same",
            flush=True,
        )


def copy_rate(device: str) -> float:
    """Bytes a second that a large copy reads and writes."""
    source = torch.empty(2**32 if device.startswith("cuda") else 2**24, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    taken = []
    for _ in range(5):
        began = clock()
        target.copy_(source)
        taken.append(clock() - began)
    return 2 * len(source) / min(taken)


def drafts(staged: StagedModel, asked: argparse.Namespace) -> None:
    total = len(staged.stages)
    if total == 1:
        print("drafts: the model is in one piece; say --cut")
        return
    if not asked.checkpoint:
        print("drafts: the weights are random, so what drafts get right says nothing about trained models")
    whole = StageSubset(tuple(range(total)), total)
    prompts = prompts_of(staged, [32] * asked.prompts, asked)
    plain = TokenByToken(staged, whole, 2**20)
    texts = partial(one_by_one, staged, SamplingParams(temperature=asked.temperature), prompts)
    expected = texts(plain, asked.tokens)
    auto = pick_draft(staged, whole, [*prompts[0], *expected[0][:SAMPLE_TOKENS]], clock=clock)
    print(f"'auto' picks {auto.name if auto else 'none'}", flush=True)
    tried = [StageSubset(tuple(range(kept)), total) for kept in range(1, total)]
    tried += [StageSubset((*range(kept), total - 1), total) for kept in range(1, total - 1)]
    for draft in [parse_draft(each, whole) for each in asked.draft] if asked.draft else tried:
        decoder = Speculator(staged, whole, draft, 2**20, clock=clock)
        works = partial(texts, plain), partial(texts, decoder)
        without, drafted = side_by_side(works, asked.tokens, asked.rounds)
        ratios = [a / b for a, b in zip(without, drafted, strict=True)]
        same = texts(decoder, asked.tokens) == expected
        print(
            f"draft {draft.name}: {median(ratios):.2f} times as fast as without ({min(ratios):.2f} to "
            f"{max(ratios):.2f}); {decoder.record.acceptance:.0%} right, {decoder.record.tokens_per_pass:.2f} tokens a "
            f"pass; {'the same texts' if same else 'OTHER TEXTS'}",
            flush=True,
        )


def prompts_of(staged: StagedModel, lengths: Sequence[int], asked: argparse.Namespace) -> list[tuple[int, ...]]:
    if asked.checkpoint:
        text = "".join(piece.text for piece in source(asked.text).pieces())
        passages = [text[(PASSAGE * number) % len(text) :][:PASSAGE] for number in range(1, len(lengths) + 1)]
        return [
            tuple(staged.tokenizer(passage)["input_ids"][:length])
            for passage, length in zip(passages, lengths, strict=True)
        ]
    rate = torch.Generator().manual_seed(0)
    vocabulary = staged.stages[0].spec.config.vocab_size
    return [tuple(torch.randint(1, vocabulary, (length,), generator=rate).tolist()) for length in lengths]


if __name__ == "__main__":
    main()
