"""The shape of a decoder-only transformer, as a configuration file says it: parameters, operations, values to keep."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from skippipe.errors import UserError
from skippipe.json_fields import Fields, exists, read_json
from skippipe.value_ranges import LAYERS, WIDTH, Range, check_ranges, range_of

PLAIN_MLP = frozenset(("arcee", "jais2", "nemotron", "starcoder2"))
"""Kinds of models whose feed-forward blocks have no gate: two matrices instead of three."""
TIED = frozenset(
    (
        *(
            "cohere",
            "cohere2",
            "cohere2_moe",
            "ernie4_5",
            "ernie4_5_moe",
            "gemma",
            "gemma2",
            "gemma3_text",
            "granite_swa",
        ),
        *("smollm3", "starcoder2", "vaultgemma", "youtu"),
    )
)
"""Kinds of models whose embedding and head are one matrix unless the configuration says otherwise."""
UNSAID = {"gated": True, "shared_intermediate": 0}
"""What a model has in files of versions that did not write it."""
HUNYUAN = "hunyuan_v1_moe"
"""A kind whose experts are as wide as a dense block, and so is what they share, whatever else its configuration has."""
ACTIVE_FIELDS = ("num_experts_per_tok", "moe_k", "moe_topk")
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
"""What a name on the Hugging Face hub looks like; so do some paths."""


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a decoder-only transformer (Llama, Qwen3, Mistral, Mixtral, …)."""

    name: str
    layers: Annotated[int, LAYERS]
    hidden: Annotated[int, WIDTH]
    heads: Annotated[int, WIDTH]
    kv_heads: Annotated[int, WIDTH]
    head_dim: Annotated[int, WIDTH]
    intermediate: Annotated[int, WIDTH]
    """Width of the feed-forward block; of one expert in a mixture."""
    vocab: Annotated[int, Range(1, 10**9)]
    tied_embeddings: bool = False
    experts: Annotated[int, Range(1, 10**5)] = 1
    experts_active: Annotated[int, Range(1, 10**5)] = 1
    gated: bool = True
    """Feed-forward blocks have a gate: three matrices; two without."""
    shared_intermediate: Annotated[int, Range(0, 10**7)] = 0
    """Width of the feed-forward block that all tokens pass beside the experts of a mixture; 0: there is none."""

    def __post_init__(self) -> None:
        check_ranges(self, "model")
        if self.experts_active > self.experts:
            raise UserError(f"model {self.name}: {self.experts_active} of {self.experts} experts cannot be active")
        if self.shared_intermediate and self.experts == 1:
            raise UserError(f"model {self.name}: a shared feed-forward block is beside experts, and there are none")

    @property
    def _attention_parameters(self) -> int:
        return self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)

    @property
    def feed_forward_matrices(self) -> int:
        """Of a feed-forward block: gate, up and down, or the last two."""
        return 3 if self.gated else 2

    @property
    def linear_intermediate(self) -> int:
        """Width of the feed-forward block whose matrices are linear maps: beside experts, of the shared one."""
        return self.intermediate if self.experts == 1 else self.shared_intermediate

    @property
    def active_intermediate(self) -> int:
        """Width of all feed-forward blocks that a token passes in a layer."""
        return self.intermediate * self.experts_active + self.shared_intermediate

    @property
    def _feed_forward_values(self) -> int:
        """What a feed-forward block keeps per token and channel: gate, up, activation, product; or up, activation."""
        return 4 if self.gated else 2

    @property
    def layer_parameters(self) -> int:
        router = self.hidden * self.experts if self.experts > 1 else 0
        width = self.intermediate * self.experts + self.shared_intermediate
        norms = 2 * self.hidden
        return self._attention_parameters + self.feed_forward_matrices * self.hidden * width + router + norms

    @property
    def linear_parameters(self) -> int:
        """Parameters of the linear maps of a layer; experts and their router are none."""
        return self._attention_parameters + self.feed_forward_matrices * self.hidden * self.linear_intermediate

    @property
    def linear_maps(self) -> int:
        """Linear maps of a layer; experts and their router are none."""
        return 4 + (self.feed_forward_matrices if self.linear_intermediate else 0)

    def adapter_parameters(self, rank: int) -> int:
        """Parameters of adapters in a layer: of this rank, beside every linear map. Experts are none."""
        attention = 4 * self.hidden + self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        width = self.linear_intermediate
        return rank * (attention + (self.feed_forward_matrices * (self.hidden + width) if width else 0))

    def largest_adapter_matrix(self, rank: int) -> int:
        """Parameters of the largest matrix of such an adapter."""
        return rank * max(self.hidden, self.heads * self.head_dim, self.linear_intermediate)

    def bridge_parameters(self, rank: int, stages: int) -> int:
        """Parameters of the bridges that begin at stage 0: one for each stage but the next, and one for the head."""
        return (stages - 1) * self.hidden * (2 * rank + 1) if rank else 0

    @property
    def end_parameters(self) -> int:
        """Embedding, final norm and head: what stage 0 holds beside its layers."""
        matrices = 1 if self.tied_embeddings else 2
        return matrices * self.vocab * self.hidden + self.hidden

    @property
    def parameters(self) -> int:
        return self.layers * self.layer_parameters + self.end_parameters

    def layer_flops(self, tokens: int) -> int:
        """Forward operations of one layer on one sequence: two a weight and token, and causal attention."""
        active = self._attention_parameters + self.feed_forward_matrices * self.hidden * self.active_intermediate
        return 2 * tokens * active + 2 * tokens * tokens * self.heads * self.head_dim

    def head_flops(self, tokens: int) -> int:
        return 2 * tokens * self.hidden * self.vocab

    def layer_values_per_token(self, *, rounded: bool, frozen: bool = False) -> int:
        """Values a layer keeps per token for its backward pass (fused kernels recompute attention itself), in the type
        of computing; `rounded`: that is bf16; `frozen`: its norms are not trained."""
        # of both norms the input, which is fp32, what is scaled by their weights, and the output, which in bf16 each of
        # five linear maps rounds for itself, or of four without a gate
        norms = 2 * 2 + 2 + 2 + self.feed_forward_matrices if rounded else 2 + 2 + 2
        norms -= 2 if frozen else 0  # what is scaled
        return (
            norms * self.hidden
            + 2 * self.heads * self.head_dim  # queries, attention output
            + 2 * self.kv_heads * self.head_dim
            + self._feed_forward_values * self.linear_intermediate
        )

    @property
    def expert_values_per_token(self) -> int:
        """Values that the experts of a layer keep per token, in fp32 whatever is computed in: for each expert that a
        token passes its input, its output, and what is between."""
        between = self._feed_forward_values * self.intermediate
        return self.experts_active * (2 * self.hidden + between) if self.experts > 1 else 0

    @property
    def expert_work_per_token(self) -> int:
        """Values that a backward pass of a layer's experts needs per token, in fp32."""
        return self.feed_forward_matrices * self.experts_active * self.intermediate if self.experts > 1 else 0

    @property
    def largest_expert_gradient(self) -> int:
        """Parameters of the largest of all experts' matrices, which are held, and get their gradient, together."""
        return (
            self.experts * (self.feed_forward_matrices - 1) * self.intermediate * self.hidden if self.experts > 1 else 0
        )

    def to_json(self) -> dict[str, Any]:
        """What earlier versions knew without being told is left out, so that they can read the file."""
        return {name: value for name, value in asdict(self).items() if name not in UNSAID or UNSAID[name] != value}

    @classmethod
    def from_json(cls, value: Any, place: str) -> ModelShape:
        entry = Fields(value, place, of=cls)
        shape = cls(**entry.values(added=UNSAID))
        entry.close()
        return shape

    @classmethod
    def from_huggingface(cls, path: Path) -> ModelShape:
        """Read `config.json`, or the folder that holds it; fields of no interest here are passed over."""
        file = path / "config.json" if path.is_dir() else path
        found = read_json(file)
        if isinstance(found, dict) and isinstance(found.get("text_config"), dict):
            whole = {name: found[name] for name in ("tie_word_embeddings",) if found.get(name) is not None}
            found = {**found["text_config"], **whole}  # a model that reads more than text says itself what it ties
        return cls.from_config(found, str(file))

    @classmethod
    def from_config(cls, config: Any, place: str) -> ModelShape:
        """From the fields of a Hugging Face configuration."""
        if not isinstance(config, dict):
            raise UserError(f"{place}: expected a Hugging Face configuration object")

        kind = str(config.get("model_type") or "model")
        size = partial(_size, config, place)
        heads, hidden = size("heads", "num_attention_heads"), size("hidden", "hidden_size")
        experts = size("experts", "num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts", default=1)
        tied = config.get("tie_word_embeddings")
        tied = kind in TIED if tied is None else tied
        if not isinstance(tied, bool):
            raise UserError(f"{place}.tie_word_embeddings: expected true or false, found {tied!r}")
        of_experts = experts > 1 and kind != HUNYUAN
        intermediate = size("intermediate", *("moe_intermediate_size",) * of_experts, "intermediate_size")
        shared = 0
        if kind == HUNYUAN and experts > 1:
            shared = intermediate
        elif experts > 1:
            number = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
            width = ("shared_expert_intermediate_size", "shared_intermediate_size")
            shared = size("shared_intermediate", *number, default=0) * intermediate
            shared = size("shared_intermediate", *width, default=shared)
        return cls(
            name=kind,
            layers=size("layers", "num_hidden_layers"),
            hidden=hidden,
            heads=heads,
            kv_heads=size("kv_heads", "num_key_value_heads", default=heads),
            head_dim=size("head_dim", "head_dim", default=max(1, hidden // heads)),
            intermediate=intermediate,
            vocab=size("vocab", "vocab_size"),
            tied_embeddings=tied,
            experts=experts,
            experts_active=size("experts_active", *ACTIVE_FIELDS, default=1) if experts > 1 else 1,
            gated=kind not in PLAIN_MLP,
            shared_intermediate=shared,
        )


def _size(config: dict[str, Any], place: str, ours: str, *names: str, default: int | None = None) -> int:
    """The first of these fields that a configuration has. A list with one and the same number for all layers counts as
    that number."""
    for name in names:
        value = config.get(name)
        if isinstance(value, list) and value and value.count(value[0]) == len(value):
            value = value[0]
        if value is not None:
            return Fields({name: value}, place).integer(name, range_of(ModelShape, ours))
    if default is None:
        known = " and no ".join(names)
        raise UserError(f"{place}: there is no {known}; is this a decoder-only model's config?")
    return default


MODELS = {
    "llama-tiny": ModelShape("llama-tiny", 12, 64, 4, 4, 16, 192, 2048),
    "llama-30m": ModelShape("llama-30m", 12, 288, 6, 6, 48, 768, 32000),
    "llama-46m": ModelShape("llama-46m", 12, 512, 8, 8, 64, 1376, 8192),
    "llama-300m": ModelShape("llama-300m", 24, 1024, 16, 16, 64, 2816, 8192),
    "llama-500m": ModelShape("llama-500m", 24, 1024, 16, 16, 64, 2816, 50257),
    "llama-1.5b": ModelShape("llama-1.5b", 24, 2048, 16, 16, 128, 5632, 50257),
    "llama-8b": ModelShape("llama-8b", 32, 4096, 32, 8, 128, 14336, 128256),
}


def model_named(name: str) -> ModelShape:
    """A preset by name, else a Hugging Face config.json or the folder around one."""
    if name in MODELS:
        return MODELS[name]
    path = Path(name)
    if not exists(path):
        raise UserError(
            f"model '{name}': neither a preset ({', '.join(MODELS)}) nor a config.json or its folder{_of_hub(name)}"
        )
    return ModelShape.from_huggingface(path)


def _of_hub(name: str) -> str:
    """How to get the config.json of a model on the hub, if this may be its name."""
    if not HUB_NAME.fullmatch(name) or name.endswith(".json") or name.startswith("."):
        return ""
    folder = re.split(r"[^a-z]", name.partition("/")[2].lower())[0] or "model"
    return (
        f"; if it is a name on the Hugging Face hub: 'hf download {name} config.json --local-dir {folder}', and then "
        f"name the folder: {folder}"
    )
