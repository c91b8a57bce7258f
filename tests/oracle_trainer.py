"""A second trainer, written from docs/formats.md#training alone: the package's own must agree with it.

It shares no line with the package. The whole model lies in one piece, a microbatch is one graph from its tokens to its
loss, and the optimizer is spelled out. `plans` are parsed plan files, the usual one first; `job` is a parsed job file.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from fractions import Fraction
from hashlib import blake2b, sha256
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM

Json: TypeAlias = dict[str, Any]
Ids: TypeAlias = npt.NDArray[np.generic]
WORD = 2**64
LEARNING: Json = {
    "rate": 3e-4,
    "warmup": 20,
    "iterations": 0,
    "hold": 0.6,
    "floor": 0.1,
    "beta1": 0.9,
    "beta2": 0.95,
    "epsilon": 1e-8,
    "weight_decay": 0.1,
    "clip": 1.0,
}
RECIPE: Json = {"skip": "", "residual": "plain", "gradients": "visitors", "early_exit": 0.0}


@dataclass(frozen=True)
class Done:
    """What is reported of an iteration."""

    length: int  # stages on the longest path
    loss: float
    norm: float
    rate: float


def learning_rate(learning: Json, iterations: int, i: int) -> float:
    peak, warmup, floor, hold = (learning[name] for name in ("rate", "warmup", "floor", "hold"))
    if i < warmup:
        return float(peak * (i + 1) / (warmup + 1))
    whole = learning["iterations"] or max(iterations, warmup + 1)
    p = min(1.0, (i - warmup) / (whole - warmup))
    u = max(0.0, p - hold) / (1 - hold)
    return float(peak * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * u))))


def clipping_factor(clip: float, norm: float) -> float:
    return min(1.0, clip / (norm + 1e-6)) if clip else 1.0


def path_length(skip: str, iterations: int, stages: int, i: int) -> int:
    for phase in skip.split(","):
        turn, _, end = phase.partition(" until ")
        if i < math.ceil((fraction(end) if end else 1) * iterations):
            break
    shares: list[Fraction] = []
    for part in turn.split("+"):
        times, _, share = part.rpartition("x ")
        shares += int(times or 1) * [fraction(share)]
    return stages - math.floor(shares[i % len(shares)] * stages + Fraction(1, 2))


def fraction(text: str) -> Fraction:
    text = text.strip()
    return Fraction(text[:-1]) / 100 if text.endswith("%") else Fraction(text)


def keys(seed: int, epoch: int) -> list[int]:
    digest = blake2b(f"skippipe {seed} {epoch}".encode("ascii"), digest_size=48).digest()
    return [int.from_bytes(digest[at : at + 8], "little") for at in range(0, 48, 8)]


def permuted(seed: int, epoch: int, offset: int, windows: int) -> int:
    h = max(1, math.ceil((windows - 1).bit_length() / 2))
    size: int = 2**h
    v = offset
    while True:
        left, right = divmod(v, size)
        for key in keys(seed, epoch):
            x = (right ^ key) * 0xBF58476D1CE4E5B9 % WORD
            x = (x ^ x // 2**31) * 0x94D049BB133111EB % WORD
            left, right = right, left ^ (x // 2**40 % size)
        v = left * size + right
        if v < windows:
            return v


def generator_seed(seed: int, part: str) -> int:
    return int.from_bytes(sha256(f"{seed}/{part}".encode("ascii")).digest()[:8], "little") // 2


def draw(part: nn.Module, seed: int, name: str, std: float) -> None:
    generator = torch.Generator().manual_seed(generator_seed(seed, name))
    with torch.no_grad():
        for module in part.modules():
            for kind, each in module.named_parameters(recurse=False):
                if each.dim() >= 2:
                    each.normal_(0, std, generator=generator)
                else:
                    each.fill_(0.0 if kind == "bias" else 1.0)


def rounded(x: Tensor, dtype: str) -> Tensor:
    if dtype == "fp32":
        return x
    if dtype == "bf16":
        return x.bfloat16().float()
    blocks = functional.pad(x.flatten(), [0, -x.numel() % 128]).view(-1, 128)
    scale = blocks.abs().amax(1, keepdim=True) / 127
    scale = torch.where(scale < 2.0**-126, 0.0, scale)
    whole = torch.where(scale > 0, blocks * (1 / scale), 0.0).round() * scale
    return whole.flatten()[: x.numel()].view(x.shape)


class Hop(torch.autograd.Function):
    """Rounds what passes, in both directions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: str) -> Tensor:
        ctx.dtype = dtype
        return rounded(x, dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return rounded(gradients[0], ctx.dtype), None


class Trainer:
    def __init__(self, job: Json, plans: list[Json], ids: Ids, config: Any) -> None:
        self.recipe = {**RECIPE, **job.get("recipe", {})}
        self.learning = {**LEARNING, **job.get("learning", {})}
        self.iterations, self.seed = job.get("iterations", 100), job.get("seed", 0)
        pipeline = job.get("pipeline", {})
        if not (pipeline.get("skip") or pipeline.get("plan") or pipeline.get("strategy") == "dtfm"):
            self.recipe["skip"] = self.recipe["skip"] or "1/3 until 65%, 0"
        self.plans = {max(len(lane["path"]) for lane in plan["lanes"]): plan for plan in reversed(plans)}
        self.usual = plans[0]
        self.ids, self.work = ids.astype(np.int64), self.usual["workload"]
        self.microbatches = sum(lane["microbatches"] for lane in self.usual["lanes"])
        self.model: Any = self._drawn(config)
        base, counts = self.model.model, [stage["layers"] for stage in self.usual["stages"]]
        self.layers = [list(range(sum(counts[:s]), sum(counts[: s + 1]))) for s in range(len(counts))]
        owned = [[base.layers[number] for number in stage] for stage in self.layers]
        owned[0] = [base.embed_tokens, *owned[0], base.norm, self.model.lm_head]
        self.weights = [list(nn.ModuleList(parts).parameters()) for parts in owned]  # a tied one once
        self.means = [[(torch.zeros_like(w), torch.zeros_like(w)) for w in stage] for stage in self.weights]
        self.steps = [0] * len(counts)
        self.scores: list[Tensor] = []
        self.routers = [layer.mlp.gate for layer in base.layers if hasattr(layer.mlp, "experts")]
        for router in self.routers:
            router.register_forward_hook(lambda module, given, made: self.scores.append(made[0]))

    def _drawn(self, config: Any) -> Any:
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
        base, std = model.model, config.initializer_range
        for number, layer in enumerate(base.layers):
            draw(layer, self.seed, f"layer {number}", std)
        draw(base.norm, self.seed, "norm", std)
        draw(model.lm_head, self.seed, "head", std)
        draw(base.embed_tokens, self.seed, "embedding", std)  # after the head, which may be the same
        if config.pad_token_id is not None:
            base.embed_tokens.weight.data[config.pad_token_id] = 0
        return model.train()

    def iteration(self, i: int) -> Done:
        plan = self.plan_of(i)
        stage_of = {node: s for s, stage in enumerate(plan["stages"]) for node in stage["nodes"]}
        self.model.zero_grad()
        visitors = [0] * len(self.weights)
        losses: list[float] = []
        for lane in plan["lanes"]:
            visits = [stage_of[node] for node in lane["path"]]
            for _ in range(lane["microbatches"]):
                losses.append(self._there_and_back(visits, *self.batch(i, len(losses))))
                for s in visits:
                    visitors[s] += 1
        if self.recipe["gradients"] == "all":
            visitors = [self.microbatches if count else 0 for count in visitors]
        rate = learning_rate(self.learning, self.iterations, i)
        norm = self._step(visitors, rate)
        longest = max(len(lane["path"]) for lane in plan["lanes"])
        return Done(longest, sum(losses) / len(losses), norm, rate)

    def plan_of(self, i: int) -> Json:
        if not self.recipe["skip"].strip():
            return self.usual
        return self.plans[path_length(self.recipe["skip"], self.iterations, len(self.weights), i)]

    def windows(self, i: int, g: int) -> list[int]:
        n, count = self.work["samples_per_microbatch"], (len(self.ids) - 1) // self.work["sequence_tokens"]
        positions = [(i * self.microbatches + g) * n + j for j in range(n)]
        return [permuted(self.seed, p // count, p % count, count) for p in positions]

    def batch(self, i: int, g: int) -> tuple[Tensor, Tensor]:
        length = self.work["sequence_tokens"]
        rows = np.stack([self.ids[a * length : (a + 1) * length + 1] for a in self.windows(i, g)])
        return torch.from_numpy(rows[:, :-1].copy()), torch.from_numpy(rows[:, 1:].copy())

    def _there_and_back(self, visits: list[int], inputs: Tensor, labels: Tensor) -> float:
        wire, exit_weight = self.work["wire_dtype"], self.recipe["early_exit"]
        drive = (len(self.weights) - 1) / (len(visits) - 1) if self.recipe["residual"] == "scaled" else 1.0
        self.scores.clear()
        with self._precision():
            made = self._through(0, self._entering(self.model.model.embed_tokens(inputs))).float()
            x = Hop.apply(made, wire)  # type: ignore[no-untyped-call]
            for s in visits[1:]:
                given = self._entering(x)
                y = self._through(s, given)
                y = y if drive == 1 else torch.lerp(given, y, drive)
                x = Hop.apply(y.float(), wire)  # type: ignore[no-untyped-call]
            loss = self._loss(x, labels)
            total = loss
            if exit_weight:
                total = total + exit_weight * self._loss(made, labels)
        for scores in self.scores:
            total = total + self._balance(scores)
        torch.autograd.backward(total)
        return loss.item()

    def _entering(self, x: Tensor) -> Tensor:
        return x.bfloat16() if self.work["compute_dtype"] == "bf16" else x

    def _precision(self) -> Any:
        low = self.work["compute_dtype"] == "bf16"
        return torch.autocast("cpu", torch.bfloat16, enabled=low, cache_enabled=False)  # each use casts by itself

    def _through(self, stage: int, x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[1])
        rotation = self.model.model.rotary_emb(x, positions[None])
        behind = positions[:, None] - positions[None, :]
        for number in self.layers[stage]:
            window = self._window(number)
            mask = ((behind >= 0) & (behind < window))[None, None] if window else None
            x = self.model.model.layers[number](
                x, attention_mask=mask, position_ids=positions[None], position_embeddings=rotation
            )
        return x

    def _window(self, layer: int) -> int | None:
        config = self.model.config
        kinds = getattr(config, "layer_types", None)
        window: int | None = getattr(config, "sliding_window", None)
        return window if kinds is None or kinds[layer] == "sliding_attention" else None

    def _loss(self, x: Tensor, labels: Tensor) -> Tensor:
        logits = self.model.lm_head(self.model.model.norm(x)).float()
        return functional.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1))

    def _balance(self, scores: Tensor) -> Tensor:
        config, p = self.model.config, scores.float().softmax(-1)
        chosen = torch.zeros_like(p).scatter_(1, p.topk(config.num_experts_per_tok).indices, 1.0)
        balance: Tensor = p.shape[1] * (chosen.mean(0) * p.mean(0)).sum()
        weight: float = config.router_aux_loss_coef
        return balance * weight / len(self.routers)

    def _step(self, visitors: list[int], rate: float) -> float:
        learning, stages = self.learning, [s for s, count in enumerate(visitors) if count]
        squares = [
            sum(float(w.grad.double().square().sum()) for w in self.weights[s] if w.grad is not None) / visitors[s] ** 2
            for s in stages
        ]
        norm = math.sqrt(sum(squares))
        factor = clipping_factor(learning["clip"], norm)
        for s in stages:
            self.steps[s] += 1
            for weight, means in zip(self.weights[s], self.means[s], strict=True):
                gradient = torch.zeros_like(weight) if weight.grad is None else weight.grad
                self._adam(weight.data, gradient * (factor / visitors[s]), *means, self.steps[s], rate)
        return norm

    def _adam(self, weight: Tensor, g: Tensor, mean: Tensor, square: Tensor, t: int, rate: float) -> None:
        beta1, beta2 = self.learning["beta1"], self.learning["beta2"]
        if weight.dim() >= 2:
            weight.mul_(1 - rate * self.learning["weight_decay"])
        mean.mul_(beta1).add_(g, alpha=1 - beta1)
        square.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        root = square.sqrt() / math.sqrt(1 - beta2**t) + self.learning["epsilon"]
        weight.sub_(rate * (mean / (1 - beta1**t)) / root)

    def named_weights(self) -> dict[str, Tensor]:
        return {name: each.detach() for name, each in self.model.named_parameters()}


def trainer_of(job: Json, output: Path, tokens: Path) -> Trainer:
    """From the files that a run has, and leaves behind."""
    header = json.loads((tokens / "tokens.json").read_text())
    ids = np.fromfile(tokens / header["data"], {"uint16": "<u2", "uint32": "<u4"}[header["type"]])
    files = [output / "plan.json", *sorted(output.glob("plan-*.json"))]
    plans = [json.loads(file.read_text()) for file in files]
    return Trainer(job, plans, ids, AutoConfig.from_pretrained(output / "model"))
