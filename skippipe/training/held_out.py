"""The text of [validation]: where it comes from, and which of its samples are evaluated."""

from __future__ import annotations

from hashlib import sha256

from skippipe.data.documents import source
from skippipe.data.prepare import PrepareProgress, prepare
from skippipe.data.token_file import TokenFile
from skippipe.errors import UserError
from skippipe.runtime.node_config import HeldOut
from skippipe.training.job_config import ValidationConfig
from skippipe.workload import Workload


def held_out_text(validation: ValidationConfig, tokens: TokenFile, reading: PrepareProgress) -> TokenFile | None:
    """The tokens of validation.texts, in a folder within that of the training text: who copies that one has both.
    None: a share of the training text is held out, or nothing."""
    texts = validation.texts
    if not texts:
        return None
    name = sha256("\n".join(source(text).sha256 for text in texts).encode()).hexdigest()[:12]
    return prepare(texts, tokens.tokenizer(), tokens.folder / f"validation-{name}", reading)


def held_out_samples(
    validation: ValidationConfig, work: Workload, tokens: TokenFile, held_out_tokens: TokenFile | None
) -> HeldOut | None:
    """Which samples are evaluated, always the same; None: nothing is held out. UserError if there are too few."""
    if not validation.enabled:
        return None
    found = held_out_tokens or tokens
    windows, each = (len(found) - 1) // work.sequence_tokens, work.samples_per_microbatch
    held_out = windows if held_out_tokens else round(validation.share * windows)
    if held_out < each or (held_out == windows and held_out_tokens is None):
        field = "texts" if held_out_tokens else "share"
        raise UserError(
            f"validation.{field}: {held_out:,} of {windows:,} samples of {work.sequence_tokens:,} tokens are held out, "
            f"and a microbatch has {each}: hold more text out, or train on more"
        )
    microbatches = min(-(-validation.samples // each), held_out // each)
    if held_out_tokens is None:
        return HeldOut(microbatches, held_out)
    return HeldOut(microbatches, 0, found.folder.name, found.fingerprint)
