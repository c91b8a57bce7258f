"""The command `generate`: text by a trained model, whole or with stages missing."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from skippipe.cli.options import (
    Checkpoint,
    Cut,
    Devices,
    Dtype,
    Keep,
    ResidualScale,
    Stages,
    check_paths,
    option,
    work_option,
)
from skippipe.errors import UserError
from skippipe.value_ranges import CONTEXT, SEED, Range

if TYPE_CHECKING:
    from skippipe.inference.checkpoint_loader import StagedModel
    from skippipe.inference.engine import Decoder
    from skippipe.inference.request import GenerationRequest, TokenOutput
    from skippipe.stage_subset import StageSubset

SAMPLING, DRAFT = "Sampling", "Drafts"
SAMPLE_TOKENS = 48  # that the model writes before 'auto' compares drafts


def generate(
    checkpoint: Checkpoint,
    prompts: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="PROMPT|-",
            help="How the text begins; several are written together. '-': read it from stdin.",
            show_default="a new text",
        ),
    ] = None,
    max_tokens: Annotated[
        int, Range(1, CONTEXT.most), option(SAMPLING, "Tokens to write, at most, after each prompt.")
    ] = 128,
    temperature: Annotated[
        float,
        Range(0, 1_000),
        option(
            SAMPLING,
            "0: always the likeliest token. 1: by the model's probabilities. Between: likelier tokens get likelier.",
        ),
    ] = 0.8,
    top_k: Annotated[
        int, Range(0, 10**9), option(SAMPLING, "Sample from so many of the likeliest tokens.", "0: all")
    ] = 0,
    top_p: Annotated[
        float,
        Range(0, 1, above=True),
        option(SAMPLING, "Sample from the likeliest tokens that together have this probability.", "1: all"),
    ] = 1.0,
    seed: Annotated[int, SEED, option(SAMPLING, "Same seed and prompt, same text (and same --keep).")] = 0,
    stop: Annotated[
        list[str] | None, option(SAMPLING, "End before this string; \\n is a new line. May be given several times.")
    ] = None,
    stages: Stages = None,
    keep: Keep = None,
    residual_scale: ResidualScale = "plain",
    cut: Cut = None,
    draft: Annotated[
        str | None,
        option(
            DRAFT,
            "Stages that draft, as in 0,1, scaled by --residual-scale; then all verify the drafted tokens in one "
            "pass. The text stays the same. Fastest are those that the others go on from: 0,1 rather than 0,3. 'auto' "
            "tries some and picks.",
        ),
    ] = None,
    draft_tokens: Annotated[
        int | None, Range(1, 10**4), option(DRAFT, "Tokens of a draft.", "as many as pay, by how many were accepted")
    ] = None,
    batch_size: Annotated[int, Range(1, 10**4), work_option("Prompts that are worked on at a time.")] = 8,
    context: Annotated[
        int | None,
        CONTEXT,
        work_option(
            "Tokens of prompt and text together, at most. Set it if the model was trained on shorter samples "
            "than its config allows.",
            "as the model's config says",
        ),
    ] = None,
    device: Devices = "cpu",
    dtype: Dtype = "fp32",
    stats: Annotated[bool, work_option("Print at the end, on stderr, how fast it was.", None, "--stats")] = False,
) -> None:
    """Generate text with a trained model, whole or with stages missing.

    Text goes to stdout as it is generated, without the prompt. Ctrl-C ends it and keeps the text so far.

    \b
        skippipe generate austen "It is a truth" --keep 1/2
        skippipe generate run "It is a truth"
        skippipe generate run "It is a truth" --keep 1/2 --residual-scale scaled
        skippipe generate run "It is a truth" --draft auto --stats
        cat letter.txt | skippipe generate model/ - --cut 6 --stages 0,1,3,5
        skippipe generate run Emma Elinor --temperature 0 --stop "\\n\\n"

    Example: skippipe generate run "It is a truth" --max-tokens 40
    """
    os.environ.setdefault("TQDM_DISABLE", "1")  # or transformers draws a bar for every folder that it loads
    if stages and keep:
        raise UserError("--stages names the stages and --keep draws them: give one of the two")
    if draft_tokens and not draft:
        raise UserError("--draft-tokens: give the stages that draft with --draft, as in --draft 0,1 or --draft auto")
    if top_p == 0:
        raise UserError(
            "--top-p 0 leaves no token to sample: give a share above 0, or --temperature 0 for the likeliest"
        )
    check_paths(checkpoint)
    texts = [_read(prompt) for prompt in prompts or [""]]
    from skippipe.inference.cached_stage import convert
    from skippipe.inference.checkpoint_loader import load
    from skippipe.inference.engine import GenerationEngine
    from skippipe.inference.request import GenerationRequest, SamplingParams
    from skippipe.stage_subset import parse_subsets

    staged = load(checkpoint, cut, device, context)
    convert(staged, dtype)
    subset = parse_subsets(
        len(staged.stages), [stages] if stages else [], [keep] if keep else [], residual_scale, 1, seed
    )[0]
    if keep and len(subset.stages) < subset.total:
        print(f"stages {', '.join(map(str, subset.stages))} of {subset.total}", file=sys.stderr, flush=True)
    stops = tuple(text.replace("\\n", "\n") for text in stop or ())
    sampling = SamplingParams(temperature, top_k, top_p, seed)
    requests = [GenerationRequest(_tokens(staged, text), max_tokens, sampling, stops) for text in texts]
    cache_tokens = min(batch_size, len(requests)) * max(request.max_length(staged.context) for request in requests)
    decoder = _decoder(staged, subset, cache_tokens, requests[0], draft, residual_scale, draft_tokens)
    generator = GenerationEngine(staged, decoder, batch_size)
    printer = _Printer(texts)
    try:
        generator.run(requests, printer.add)
    finally:  # Ctrl-C too
        printer.close()
        if stats:
            _report(subset, decoder, requests, printer)


def _decoder(
    staged: StagedModel,
    subset: StageSubset,
    cache_tokens: int,
    first: GenerationRequest,
    draft: str | None,
    residual_scale: str,
    draft_tokens: int | None,
) -> Decoder:
    from skippipe.inference.static_decoding import decoder_for

    plain = decoder_for(staged, subset, cache_tokens)
    if draft is None:
        return plain
    from skippipe.inference.engine import GenerationEngine
    from skippipe.inference.request import GenerationRequest, SamplingParams
    from skippipe.inference.speculative import Speculator, parse_draft, pick_draft

    if draft != "auto":
        return Speculator(staged, subset, parse_draft(draft, subset, residual_scale), cache_tokens, draft_tokens)
    likeliest = GenerationRequest(first.prompt, min(SAMPLE_TOKENS, first.max_tokens), SamplingParams(temperature=0))
    (sample,) = GenerationEngine(staged, plain, end_tokens=frozenset()).run([likeliest])
    picked = pick_draft(staged, subset, sample.tokens, residual_scale)
    return Speculator(staged, subset, picked, cache_tokens, draft_tokens) if picked else plain


def _read(prompt: str) -> str:
    try:
        text = sys.stdin.read().removesuffix("\n") if prompt == "-" else prompt
        text.encode()
    except UnicodeError:
        raise UserError("the prompt is not text in UTF-8") from None
    return text


def _tokens(staged: StagedModel, text: str) -> tuple[int, ...]:
    """The tokens of a text; of an empty one, the token that begins a text."""
    return tuple(staged.tokenizer(text)["input_ids"]) or (staged.prefix,)


class _Printer:
    """Prints one text after another, each as it is generated; later texts are kept until their turn."""

    def __init__(self, prompts: Sequence[str]) -> None:
        self.began_s = time.monotonic()
        self.first_s: float | None = None
        """When the first token was generated."""
        self.tokens = 0
        self._prompts = prompts
        self._kept = [""] * len(prompts)
        self._finished = [False] * len(prompts)
        self._turn = 0
        self._begin()

    def add(self, output: TokenOutput) -> None:
        self.first_s = self.first_s or time.monotonic()
        self.tokens += 1
        self._kept[output.request] += output.text
        self._finished[output.request] = output.finish_reason is not None
        self._print()
        while self._finished[self._turn] and self._turn + 1 < len(self._prompts):
            self._next()

    def close(self) -> None:
        while any(self._kept[self._turn + 1 :]):
            self._next()
        print(flush=True)

    def _next(self) -> None:
        print("\n")
        self._turn += 1
        self._begin()
        self._print()

    def _begin(self) -> None:
        if len(self._prompts) > 1:  # as head(1) does for files
            line = " ".join(self._prompts[self._turn].split())
            print(f"==> {line if len(line) <= 60 else line[:59] + '…'} <==")

    def _print(self) -> None:
        print(self._kept[self._turn], end="", flush=True)
        self._kept[self._turn] = ""


def _report(subset: StageSubset, decoder: Decoder, requests: Sequence[GenerationRequest], printer: _Printer) -> None:
    from skippipe.inference.speculative import Speculator

    if printer.first_s is None:
        return
    read, then_s = sum(len(request.prompt) for request in requests), max(time.monotonic() - printer.first_s, 1e-9)
    print(
        f"stages {subset.name}: {read:,} tokens read, {printer.tokens:,} written; the first after "
        f"{printer.first_s - printer.began_s:.2f} s, then {(printer.tokens - 1) / then_s:,.1f} a second",
        file=sys.stderr,
    )
    if isinstance(decoder, Speculator):
        record = decoder.record
        print(
            f"drafts by stages {decoder.draft.name}: {record.acceptance:.0%} of {record.tested:,} tokens accepted, "
            f"{record.tokens_per_pass:.2f} tokens a pass",
            file=sys.stderr,
        )
