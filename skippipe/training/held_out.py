"""The text of [validation]: where it comes from, and which of its samples are evaluated."""

from __future__ import annotations

from dataclasses import replace
from hashlib import sha256

from skippipe.data.documents import sources
from skippipe.data.prepare import PrepareProgress, prepare
from skippipe.data.token_file import TokenFile
from skippipe.errors import UserError
from skippipe.runtime.node_config import HeldOut, NodeConfig
from skippipe.training.job_tables import DataConfig, ValidationConfig


def held_out_text(
    validation: ValidationConfig, data: DataConfig, tokens: TokenFile, reading: PrepareProgress
) -> TokenFile | None:
    """The tokens of validation.texts, read as the training text is, in a folder within that of it: who copies that one
    has both. None: a share of the training text is held out, or nothing."""
    texts = validation.texts
    if not texts:
        return None
    read = repr(sources(texts)), data.field, data.loss_on
    name = sha256("\n".join(read).encode()).hexdigest()[:12]
    folder = tokens.folder / f"validation-{name}"
    found = prepare(texts, tokens.tokenizer(), folder, reading, field=data.field, loss_on=data.loss_on)
    if (found.marks is None) != (tokens.marks is None):
        raise UserError("validation.texts: conversations and plain text do not go together: use what data.texts are")
    return found


def held_out_samples(validation: ValidationConfig, node_config: NodeConfig, tokens: TokenFile | None) -> HeldOut | None:
    """Which samples are evaluated, always the same; None: nothing is held out. `tokens` are of validation.texts.
    UserError if there are too few."""
    if not validation.enabled:
        return None
    text = None if tokens is None else HeldOut(1, 0, tokens.folder.name, tokens.fingerprint)
    whole = replace(node_config, held_out=text).held_out_sampler() or node_config.sampler()
    held_out = round(validation.share * whole.windows) if text is None else whole.windows
    if held_out < whole.samples or (text is None and held_out == whole.windows):
        raise UserError(
            f"validation.{'share' if text is None else 'texts'}: {held_out:,} of {whole.windows:,} samples of "
            f"{whole.sequence:,} tokens are held out, and a microbatch has {whole.samples}: hold more text out, or "
            "train on more"
        )
    microbatches = min(-(-validation.samples // whole.samples), held_out // whole.samples)
    return HeldOut(microbatches, held_out) if text is None else replace(text, microbatches=microbatches)
