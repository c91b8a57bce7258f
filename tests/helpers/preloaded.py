"""The last that the fork server of tests imports: what would cost every process that is forked from it something."""

from __future__ import annotations

import gc

from skippipe.planner.repair.repair import compile_repair

compile_repair()  # every coordinator would read the machine code from disk
gc.freeze()  # every process would look through all that was imported
