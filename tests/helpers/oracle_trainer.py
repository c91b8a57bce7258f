"""A second trainer, written from docs/formats.md#training alone: the package's own must agree with it.

It follows the page sentence by sentence and is made to be read, not to be fast: one microbatch after another.
"""

import copy
import hashlib
import json
import math
import re
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

Json: TypeAlias = dict[str, Any]

LEARNING: Json = {"rate": 0.0003, "warmup": 20, "iterations": 0, "hold": 0.6, "floor": 0.1}
LEARNING |= {"beta1": 0.9, "beta2": 0.95, "epsilon": 1e-8, "weight_decay": 0.1, "clip": 1.0}
RECIPE: Json = {"skip": "", "residual": "plain", "gradients": "visitors", "early_exit": 0.0, "bridges": 0}
RECIPE |= {"distill": 0.0, "distill_hidden": 0.0, "grow": ""}
USUAL_SKIP = "1/3 until 65%, 0"  # of a job that says nothing about paths

BLOCK = 128  # values that share a scale in an int8 hop


@dataclass(frozen=True)
class Done:
    """What one iteration reports."""

    length: int  # stages on the longest path
    loss: float
    norm: float
    rate: float


def learning_rate(learning: Json, iterations: int, i: int) -> float:
    """Return the learning rate of iteration i: a warm-up, a plateau and half a cosine down to the floor."""
    rate, warmup, hold, floor = (learning[name] for name in ("rate", "warmup", "hold", "floor"))
    if i < warmup:
        return float(rate * (i + 1) / (warmup + 1))
    end = learning["iterations"] or max(iterations, warmup + 1)
    progress = min(1.0, (i - warmup) / (end - warmup))
    beyond = max(0.0, progress - hold)
    turned = beyond / (1 - hold) if beyond > 0 else 0.0
    return float(rate * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * turned))))


def clipping_factor(clip: float, norm: float) -> float:
    """Return what gradients of this norm are multiplied by; a clip of 0 leaves them as they are."""
    return 1.0 if clip == 0 else min(1.0, clip / (norm + 1e-6))


def fraction(text: str) -> Fraction:
    """Read a share or an end, written as 0.35, 35% or 7/20, as an exact fraction."""
    text = text.strip()
    return Fraction(text[:-1].strip()) / 100 if text.endswith("%") else Fraction(text.replace(" ", ""))


def repeated(item: str) -> list[Fraction]:
    """Read a share, perhaps with a number of times before it."""
    times, _, share = item.rpartition("x")
    return [fraction(share)] * (int(times) if times else 1)


def shares(turn: str) -> list[list[Fraction]]:
    """Read a turn: shares or mixes with + between them; a mix is shares with & between them, of one iteration."""
    found: list[list[Fraction]] = []
    for item in turn.split("+"):
        if "&" in item:
            found.append([share for part in item.split("&") for share in repeated(part)])
        else:
            found += [[share] for share in repeated(item)]
    return found


def path_lengths(skip: str, iterations: int, stages: int, i: int) -> list[int]:
    """Return how many stages paths visit in iteration i, one number for each share of a mix, by the text of a recipe
    that is not empty."""
    *phases, turn = skip.split(",")
    for phase in phases:
        head, end = re.split(r"\buntil\b", phase)
        if i < math.ceil(fraction(end) * iterations):
            turn = head
            break
    choices = shares(turn)
    lengths = [stages - math.floor(share * stages + Fraction(1, 2)) for share in choices[i % len(choices)]]
    if min(lengths) < 2:
        raise ValueError(f"{skip!r} leaves paths of {min(lengths)} of {stages} stages")
    return lengths


def keys(seed: int, epoch: int) -> list[int]:
    """Return the six keys of the permutation that belongs to this seed and epoch."""
    digest = hashlib.blake2b(f"skippipe {seed} {epoch}".encode("ascii"), digest_size=48).digest()
    return [int.from_bytes(digest[at : at + 8], "little") for at in range(0, 48, 8)]


def permuted(seed: int, epoch: int, offset: int, windows: int) -> int:
    """Return the window at this offset of an epoch: a Feistel network, walked until it is inside the range."""
    half = max(1, ((windows - 1).bit_length() + 1) // 2)
    low = (1 << half) - 1
    value = offset
    while True:
        left, right = value >> half, value & low
        for key in keys(seed, epoch):
            mixed = ((right ^ key) * 0xBF58476D1CE4E5B9) % 2**64
            mixed = ((mixed ^ (mixed >> 31)) * 0x94D049BB133111EB) % 2**64
            left, right = right, left ^ ((mixed >> 40) & low)
        value = (left << half) | right
        if value < windows:
            return value


def generator_seed(seed: int, part: str) -> int:
    """Return what seeds torch before the weights of this part of the model are drawn."""
    digest = hashlib.sha256(f"{seed}/{part}".encode("ascii")).digest()
    return int.from_bytes(digest[:8], "little") // 2


def rounded(values: Tensor, wire: str) -> Tensor:
    """Return what a hop makes of a tensor; with int8, each block of the flattened tensor has a scale of its own."""
    if wire == "fp32":
        return values.clone()
    if wire == "bf16":
        return values.to(torch.bfloat16).float()
    blocks = nn.functional.pad(values.reshape(-1), (0, -values.numel() % BLOCK)).reshape(-1, BLOCK)
    scale = blocks.abs().amax(dim=1, keepdim=True) / 127
    result = torch.where(scale < 2.0**-126, 0.0, torch.round(blocks * (1 / scale)) * scale)
    return result.reshape(-1)[: values.numel()].reshape(values.shape)


class Hop(torch.autograd.Function):
    """H of the page: rounds what goes forward and the gradient that comes back; itself it is not differentiated."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, wire: str, wire_back: str) -> Tensor:
        ctx.wire_back = wire_back
        return rounded(values, wire)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return rounded(gradients[0], ctx.wire_back), None, None


hop: Any = Hop.apply


class Trainer:
    """All weights, the state of the optimizer and the plans of one run."""

    def __init__(self, job: Json, plans: list[Json], ids: np.ndarray, config: Any) -> None:
        """Take a parsed job, its plans (the usual one first), the ids of the text and a transformers configuration."""
        self.iterations = int(job.get("iterations", 100))
        self.seed = int(job.get("seed", 0))
        self.recipe: Json = RECIPE | job.get("recipe", {})
        self.learning: Json = LEARNING | job.get("learning", {})
        pipeline = job.get("pipeline", {})
        unsaid = not pipeline.get("skip") and not pipeline.get("plan") and pipeline.get("strategy") != "dtfm"
        default = "0" if job.get("model", {}).get("weights") else USUAL_SKIP
        self.skip: str = self.recipe["skip"] or (default if unsaid else "")
        self.plans = plans
        self.workload: Json = plans[0]["workload"]
        self.microbatches = int(self.workload["microbatches"])
        self.samples = int(self.workload["samples_per_microbatch"])
        self.tokens = int(self.workload["sequence_tokens"])
        self.wire = {(i, j): both for i, j, *both in self.workload.get("wire_dtypes", [])}
        self.dtype = torch.bfloat16 if self.workload["compute_dtype"] == "bf16" else torch.float32
        self.ids = torch.from_numpy(np.asarray(ids).astype(np.int64))
        self.windows = (len(self.ids) - 1) // self.tokens
        self.config = copy.deepcopy(config)
        self._build()

    def _build(self) -> None:
        """Make the model, draw its weights part by part, and share its layers out to the stages."""
        attention = "eager" if self.config._attn_implementation == "eager" else "sdpa"
        with torch.random.fork_rng(devices=[]):
            make: Any = AutoModelForCausalLM.from_config
            self.model: Any = make(self.config, dtype=torch.float32, attn_implementation=attention)
            body = self.model.model
            parts: dict[str, nn.Module] = {"embedding": body.embed_tokens, "norm": body.norm}
            parts |= {f"layer {number}": layer for number, layer in enumerate(body.layers)}
            if not self.config.tie_word_embeddings:
                parts["head"] = self.model.lm_head
            for name, part in parts.items():
                torch.manual_seed(generator_seed(self.seed, name))
                for module in part.modules():
                    self.model._init_weights(module)
        self.model.train()
        self.layers: list[list[tuple[nn.Module, Tensor | None]]] = []  # of each stage, with their masks
        masks, first = self._masks(), 0
        for stage in self.plans[0]["stages"]:
            span = range(first, first + stage["layers"])
            self.layers.append([(body.layers[number], masks[number]) for number in span])
            first = span.stop
        self.weights: list[list[Any]] = [[w for layer, _ in stage for w in layer.parameters()] for stage in self.layers]
        # Of a tied weight, the keys of a dictionary keep one.
        self.weights[0] += dict.fromkeys([body.embed_tokens.weight, *body.norm.parameters(), self.model.lm_head.weight])
        self.bridges = self._bridges(self.config.hidden_size, self.recipe["bridges"])
        for name, weight in self.bridges.items():
            self.weights[int(name.split(".")[1])].append(weight)
        self.steps = [0] * len(self.layers)
        self.moments = {w: (torch.zeros_like(w), torch.zeros_like(w)) for stage in self.weights for w in stage}
        self._watch_routers()

    def _bridges(self, d: int, r: int) -> dict[str, nn.Parameter]:
        """Make the weights of all bridges, by name; none if their rank is 0."""
        found: dict[str, nn.Parameter] = {}
        for p in range(len(self.layers) - 1 if r else 0):
            n = len(self.layers) - p - 1
            chance = torch.Generator().manual_seed(self.seed * 1_000_003 + p)
            found[f"bridges.{p}.down"] = nn.Parameter(torch.randn(n, d * r, generator=chance) / math.sqrt(d))
            found[f"bridges.{p}.up"] = nn.Parameter(torch.zeros(n, r * d))
            found[f"bridges.{p}.gain"] = nn.Parameter(torch.zeros(n * d))
        return found

    def _bridged(self, z: Tensor, s: int, q: int) -> Tensor:
        """Send what stage s has made over its bridge to stage q, if there is one."""
        if not self.bridges or q == s + 1:
            return z
        d, at = z.shape[-1], q - s - 2
        down, up, gain = (self.bridges[f"bridges.{s}.{part}"] for part in ("down", "up", "gain"))
        v = nn.functional.rms_norm(z, (d,), eps=1e-6)
        return z + (v @ down[at].view(d, -1) @ up[at].view(-1, d) + v * gain.view(-1, d)[at])

    def _masks(self) -> list[Tensor | None]:
        """Return the mask of each layer: none where the kernel's own will do, a band where a window slides."""
        count, window = self.config.num_hidden_layers, getattr(self.config, "sliding_window", None)
        kinds = getattr(self.config, "layer_types", None)
        sliding = [kind == "sliding_attention" for kind in kinds] if kinds else [bool(window)] * count
        distance = torch.arange(self.tokens)[:, None] - torch.arange(self.tokens)
        causal = (distance >= 0)[None, None]
        band = causal & (distance < (window or self.tokens))
        if self.model.config._attn_implementation == "eager":
            added = [torch.where(seen, 0.0, torch.finfo(self.dtype).min).to(self.dtype) for seen in (causal, band)]
            return [added[slides] for slides in sliding]
        return [band if slides and self.tokens >= (window or 0) else None for slides in sliding]

    def _watch_routers(self) -> None:
        """Let every router leave its part of the balancing loss in a list when it runs."""
        self.balance: list[Tensor] = []
        factor = getattr(self.config, "router_aux_loss_coef", None) or 0.0
        routers = [layer.mlp.gate for layer in self.model.model.layers if hasattr(layer.mlp, "gate")]

        def watch(_module: nn.Module, _inputs: Any, outputs: Any) -> None:
            """Add one visit's loss; the first output of a router is its logits."""
            p = torch.softmax(outputs[0].float(), dim=-1)
            chosen = p.detach().topk(self.config.num_experts_per_tok, dim=-1).indices
            q = torch.zeros_like(p).scatter(-1, chosen, 1.0)
            self.balance.append(factor / len(routers) * p.shape[-1] * (q.mean(dim=0) * p.mean(dim=0)).sum())

        if factor > 0:
            for router in routers:
                router.register_forward_hook(watch)

    def plan_of(self, i: int) -> Json:
        """Return the plan of iteration i."""
        if not self.skip:
            return self.plans[0]
        lengths = path_lengths(self.skip, self.iterations, len(self.layers), i)
        each, more = divmod(self.microbatches, len(lengths))
        wanted: Counter[int] = Counter()
        for number, length in enumerate(lengths):
            wanted[length] += each + (number < more)
        return next(plan for plan in self.plans if carried(plan) == wanted)

    def batch(self, i: int, number: int) -> tuple[Tensor, Tensor]:
        """Return inputs and labels of a microbatch, one row for each sample."""
        rows = []
        for sample in range(self.samples):
            epoch, offset = divmod((i * self.microbatches + number) * self.samples + sample, self.windows)
            start = permuted(self.seed, epoch, offset, self.windows) * self.tokens
            rows.append(self.ids[start : start + self.tokens + 1])
        text = torch.stack(rows)
        return text[:, :-1], text[:, 1:]

    def _stage(self, stage: int, x: Tensor) -> Tensor:
        """Send a tensor through the layers of a stage; what comes in and what goes out has the dtype of compute."""
        x, positions = x.to(self.dtype), torch.arange(self.tokens)[None]
        turns = self.model.model.rotary_emb(x, positions)
        for layer, mask in self.layers[stage]:
            x = layer(x, attention_mask=mask, position_ids=positions, position_embeddings=turns)
        return x.to(self.dtype)

    def _loss(self, x: Tensor, labels: Tensor) -> Tensor:
        """Return the mean cross entropy of the final norm and the head."""
        logits = self.model.lm_head(self.model.model.norm(x)).float()
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

    def _dtypes(self, i: str, j: str) -> tuple[str, str]:
        """Return the codecs of what goes from node i to j, and of its gradient, which comes from j to i."""
        usual = [self.workload["wire_dtype"]] * 2
        return self.wire.get((i, j), usual)[0], self.wire.get((j, i), usual)[1]

    @torch.no_grad()
    def _taught(self, inputs: Tensor) -> list[Tensor]:
        """Return what the whole model makes of inputs after each stage, over links with the usual codec."""
        x, found = self.model.model.embed_tokens(inputs), []
        for stage in range(len(self.layers)):
            x = hop(self._stage(stage, x).float(), *[self.workload["wire_dtype"]] * 2)
            found.append(x)
        return found

    def microbatch(self, visits: list[int], path: list[str], inputs: Tensor, labels: Tensor) -> float:
        """Send one microbatch forward and backward, add to the gradients, and return its loss."""
        wires = [self._dtypes(i, j) for i, j in zip(path, path[1:] + path[:1], strict=True)]
        scaled, c = self.recipe["residual"] == "scaled", (len(self.layers) - 1) / max(1, len(visits) - 1)
        self.balance.clear()
        with torch.autocast("cpu", torch.bfloat16, enabled=self.dtype == torch.bfloat16, cache_enabled=False):
            h = self._stage(0, self.model.model.embed_tokens(inputs)).float()
            following = [*visits[1:], len(self.layers)]
            x = hop(self._bridged(h, 0, following[0]), *wires[0])
            taught = self._taught(inputs) if self.recipe["distill"] and len(visits) < len(self.layers) else []
            came = [x]
            for stage, q, wire in zip(visits[1:], following[1:], wires[1:], strict=True):
                x = x.to(self.dtype)
                y = self._stage(stage, x)
                z = torch.lerp(x, y, c) if scaled else y
                x = hop(self._bridged(z, stage, q).float(), *wire)
                came.append(x)
            loss = self._loss(x, labels)
            total = sum(self.balance, start=loss)
            if self.recipe["early_exit"] > 0:
                total = total + self.recipe["early_exit"] * self._loss(h, labels)
            if taught:
                logits, wanted = (self.model.lm_head(self.model.model.norm(each)) for each in (x, taught[-1]))
                of_teacher = -(wanted.detach().softmax(-1) * logits.log_softmax(-1)).sum(-1).mean()
                total = total + self.recipe["distill"] * (of_teacher - loss)
            for mine, s in zip(came, following if taught else [], strict=False):
                units = [nn.functional.rms_norm(each, each.shape[-1:], eps=1e-6) for each in (mine, taught[s - 1])]
                total = total + self.recipe["distill_hidden"] * (units[0] - units[1]).square().mean()
        torch.autograd.backward(total)
        return float(loss.detach())

    def iteration(self, i: int) -> Done:
        """Train for one iteration; iterations have to come in their order."""
        plan = self.plan_of(i)
        stage_of = {node: number for number, stage in enumerate(plan["stages"]) for node in stage["nodes"]}
        visitors = [0] * len(self.layers)
        losses: list[float] = []
        for weight in self.moments:
            weight.grad = torch.zeros_like(weight)
        for lane in plan["lanes"]:
            visits = [stage_of[node] for node in lane["path"]]
            for _ in range(lane["microbatches"]):
                losses.append(self.microbatch(visits, lane["path"], *self.batch(i, len(losses))))
                for stage in visits:
                    visitors[stage] += 1
        divisors = [self.microbatches if self.recipe["gradients"] == "all" else count for count in visitors]
        visited = [stage for stage, count in enumerate(visitors) if count]
        squares = [sum(float(w.grad.double().square().sum()) for w in self.weights[s]) for s in visited]
        norm = math.sqrt(sum(square / divisors[s] ** 2 for s, square in zip(visited, squares, strict=True)))
        rate = learning_rate(self.learning, self.iterations, i)
        factor = clipping_factor(self.learning["clip"], norm)
        for stage in visited:
            self._step(stage, factor / divisors[stage], rate)
        return Done(longest(plan), math.fsum(losses) / len(losses), norm, rate)

    @torch.no_grad()
    def _step(self, stage: int, factor: float, rate: float) -> None:
        """Let a stage take one step of AdamW, with the factor times its sum of gradients."""
        self.steps[stage] += 1
        beta1, beta2, epsilon = (self.learning[name] for name in ("beta1", "beta2", "epsilon"))
        slow1, slow2 = 1 - beta1 ** self.steps[stage], 1 - beta2 ** self.steps[stage]
        for weight in self.weights[stage]:
            gradient, (m, v) = weight.grad * factor, self.moments[weight]
            if weight.dim() >= 2:
                weight.mul_(1 - rate * self.learning["weight_decay"])
            m.mul_(beta1).add_(gradient, alpha=1 - beta1)
            v.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
            weight.addcdiv_(m, (v.sqrt() / math.sqrt(slow2)).add_(epsilon), value=-rate / slow1)

    def named_weights(self) -> dict[str, Tensor]:
        """Return all weights under the names that transformers gives them; a tied one has the embedding's."""
        return {name: weight.detach() for name, weight in [*self.model.named_parameters(), *self.bridges.items()]}


def longest(plan: Json) -> int:
    """Return the number of nodes on the longest path of a plan."""
    return max(len(lane["path"]) for lane in plan["lanes"])


def carried(plan: Json) -> Counter[int]:
    """Return how many microbatches of a plan visit how many stages."""
    found: Counter[int] = Counter()
    for lane in plan["lanes"]:
        found[len(lane["path"])] += lane["microbatches"]
    return found


class GrowingTrainer:
    """Trainers of one run whose model grows, one for each depth: each goes on where the one before it ends."""

    def __init__(self, job: Json, plans: list[Json], young: dict[int, Json], ids: np.ndarray, config: Any) -> None:
        """Take what the trainer of the whole model takes, and the plans of smaller ones by their numbers of stages."""
        whole = Trainer(job, plans, ids, config)
        self.iterations, stages = whole.iterations, plans[0]["stages"]
        self.divisions = [math.ceil(fraction(end) * self.iterations) for end in whole.recipe["grow"].split(",")]
        without: Json = {"skip": "0", "bridges": 0, "distill": 0.0, "distill_hidden": 0.0}
        smaller = {**job, "recipe": whole.recipe | without}
        self.trainers: list[Trainer] = []
        for begin, end in pairwise([0, *self.divisions]):
            lengths = [path_lengths(whole.skip, self.iterations, len(stages), i) for i in range(begin, end)]
            ((length,),) = set(map(tuple, lengths))  # one share, all along
            shallow = copy.deepcopy(config)
            shallow.num_hidden_layers = sum(stage["layers"] for stage in [*stages[: length - 1], stages[-1]])
            self.trainers.append(Trainer(smaller, [young[length]], ids, shallow))
        self.trainers.append(whole)
        self.depth = 0

    def iteration(self, i: int) -> Done:
        """Train for one iteration; if the run is divided before it, the model grows first."""
        if i in self.divisions:
            self.depth += 1
            grow(self.trainers[self.depth - 1], self.trainers[self.depth])
        return self.trainers[self.depth].iteration(i)

    def named_weights(self) -> dict[str, Tensor]:
        """Return all weights of the model, as deep as it is by now."""
        return self.trainers[self.depth].named_weights()


def copied_layers(smaller: list[int], deeper: list[int]) -> list[int]:
    """Return which layer of the smaller model each of the deeper one copies; both are given by the layers of stages."""
    size = smaller[0] if len({*smaller, *deeper}) == 1 else 1  # layers of a unit
    a, b = sum(smaller) // size, sum(deeper) // size
    units = [k if k < a - 1 else a - 1 if k == b - 1 else 1 + (k - a + 1) % max(1, a - 2) for k in range(b)]
    return [unit * size + place for unit in units for place in range(size)]


@torch.no_grad()
def grow(smaller: Trainer, deeper: Trainer) -> None:
    """Give a deeper model the weights and the optimizer's state of a smaller one; its bridges stay as they are."""
    copied = copied_layers(*([len(stage) for stage in each.layers] for each in (smaller, deeper)))
    sources = dict(smaller.model.named_parameters())
    for name, weight in deeper.model.named_parameters():
        source = sources[re.sub(r"(?<=^model\.layers\.)\d+", lambda number: str(copied[int(number[0])]), name)]
        for mine, its in zip((weight, *deeper.moments[weight]), (source, *smaller.moments[source]), strict=True):
            mine.copy_(its)
    steps = [taken for taken, stage in zip(smaller.steps, smaller.layers, strict=True) for _ in stage]  # of each layer
    of_copies = iter([steps[layer] for layer in copied])
    deeper.steps = [min(next(of_copies) for _ in stage) for stage in deeper.layers]


def trainer_of(job: Json, output: Path, tokens: Path) -> Trainer | GrowingTrainer:
    """Make the trainer of a run from its job, the folder it has written and its folder of tokens."""
    files = {path.stem: json.loads(path.read_text()) for path in sorted(output.glob("plan*.json"))}
    young = {len(plan["stages"]): plan for name, plan in files.items() if name.startswith("plan-of-")}
    plans = [files.pop("plan"), *(plan for name, plan in files.items() if not name.startswith("plan-of-"))]
    header = json.loads((tokens / "tokens.json").read_text())
    ids = np.fromfile(tokens / header["data"], dtype="<u2" if header["type"] == "uint16" else "<u4")
    config = AutoConfig.from_pretrained(output / "model")
    config.vocab_size = header["vocabulary"]
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        value = getattr(config, name, None)
        if isinstance(value, int) and value >= header["vocabulary"]:
            setattr(config, name, None)
    growing = job.get("recipe", {}).get("grow")
    return GrowingTrainer(job, plans, young, ids, config) if growing else Trainer(job, plans, ids, config)
