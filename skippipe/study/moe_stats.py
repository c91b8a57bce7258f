"""Of a mixture of experts: are all experts used, and do they specialise?"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from skippipe.study.engine import Engine
from skippipe.study.evaluate import EvalText


@torch.no_grad()
def router_use(engine: Engine, texts: dict[str, EvalText], tokens: int) -> dict[str, Any] | None:
    """For every layer and text, the share of tokens that each expert gets; None for a dense model."""
    found = engine.stages[0].spec.router
    if found is None:
        return None
    kind, index = found
    active = engine.stages[0].spec.experts_active
    counted: list[Tensor] = []

    def count(_module: nn.Module, _inputs: Any, output: Any) -> None:
        scores = output[index] if isinstance(output, tuple) else output
        chosen = scores.topk(active, -1).indices.flatten()
        counted.append(torch.bincount(chosen, minlength=scores.shape[-1]))

    routers = [part for stage in engine.stages for part in stage.layers.modules() if isinstance(part, kind)]
    hooks = [router.register_forward_hook(count) for router in routers]
    whole = tuple(range(len(engine.stages)))
    shares: dict[str, Any] = {}
    for name, text in texts.items():
        counted.clear()
        for inputs, labels in text.evaluated(tokens):
            engine.loss_of(inputs, labels, whole, 1.0)
        rounds = torch.stack(counted).view(-1, len(routers), counted[0].shape[0]).sum(0).double()
        shares[name] = [[round(float(each), 4) for each in row] for row in rounds / rounds.sum(-1, keepdim=True)]
    for hook in hooks:
        hook.remove()
    return shares
