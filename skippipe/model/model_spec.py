"""The parts of a model, made one by one: any Hugging Face decoder-only configuration with a list of layers.

`ModelSpec` asks transformers for the model's skeleton on the meta device, which takes no memory, and from it makes
single parts for real: a layer, or the two ends (embedding; final norm and head). The weights of a part depend only on
the seed and on which part it is, so a layer comes out the same on whatever node and in whatever stage it is made.
"""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Callable
from copy import copy, deepcopy
from functools import cache, partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from skippipe.errors import UserError, first_line
from skippipe.model.lora import LoraConfig
from skippipe.model.model_files import CODE_FIELD, check_model_folder, has_own_head, reads_more, tying_said
from skippipe.model_shape import MODELS, ModelShape, model_named

log = logging.getLogger(__name__)
_Language: Any = AutoModelForCausalLM  # untyped
QUANTISED_FIELD = "quantization_config"
ATTENTION = ("sdpa", "eager")  # torch's own; other names in a folder's config are kernels to be fetched
EXAMPLES = "llama, qwen3, mistral"
TESTED = frozenset(
    (
        *("afmoe", "arcee", "aria_text", "bitnet", "cohere", "cohere2", "cohere2_moe", "cwm", "deepseek_v3"),
        *("diffllama", "dots1", "ernie4_5", "ernie4_5_moe", "exaone4", "exaone_moe", "flex_olmo", "flint", "gemma"),
        *("gemma2", "gemma3_text", "glm", "glm4", "glm4_moe", "glm4_moe_lite", "gpt_oss", "granite", "granite_swa"),
        *("granitemoe", "granitemoe_swa", "granitemoeshared", "helium", "hunyuan_v1_dense", "hunyuan_v1_moe"),
        *("hy_v3", "hyperclovax", "jais2", "kolibri1", "laguna", "llama", "mellum", "mimo_v2_flash", "minimax_m2"),
        *("ministral", "ministral3", "mistral", "mixtral", "nemotron", "olmo", "olmo2", "olmo3", "olmoe", "phi3"),
        *("phimoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "seed_oss", "smollm3", "solar_open", "stablelm"),
        *("starcoder2", "vaultgemma", "youtu"),
    )
)
"""Kinds of models whose stages compute what transformers computes (`tests/model/test_architectures.py`)."""
SCALES = (
    *("embedding_multiplier", "mup_enabled", "logits_scaling", "logit_scale", "lm_head_multiplier"),
    *("final_logit_softcapping",),
)
"""Fields of a configuration by which a model changes embeddings or logits, unless they are 1; models differ in how."""
OTHERWISE = frozenset(("doge", "nanochat"))
"""Kinds whose models do more between embedding, layers and head than stages do, and do not show it."""
ROUTER_BIAS = "e_score_correction_bias"
"""A value beside the weights by which routers choose experts. No gradient comes to it, so it can be held, stored and
handed on as a weight, and stays as it is."""
MASKS: dict[str, Callable[..., Any]] = {
    "full_attention": create_causal_mask,
    "sliding_attention": create_sliding_window_causal_mask,
}
LISTS_BY_LAYER = ("intermediate_size", "moe_intermediate_size", "moe_topk", "num_shared_expert")
"""Other fields that may be lists with a value for each layer."""
LAYER = re.compile(r"model\.layers\.(\d+)\.")
"""The beginning of a weight's name that says which layer it is of."""


def config_named(name: str, vocabulary: int | None = None, layers: int = 0) -> Any:
    """The configuration of a preset, or of a Hugging Face config.json or its folder; `vocabulary` and `layers` replace
    its own."""
    if name in MODELS:
        config = llama_config(MODELS[name])
    else:
        if not reads_more(Path(name)):
            model_named(name)  # says what is missing, in one line
        path = Path(name)
        check_model_folder(path if path.is_dir() else path.parent)
        try:
            config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        except Exception as error:  # any error of its hundred configurations
            raise UserError(f"model '{name}': {first_line(error)}") from None
        _check_not_quantised(config, name)
        config = _text_part(config, tying_said(path))
        _check_not_quantised(config, name)
        if config.tie_word_embeddings and has_own_head(path):
            config.tie_word_embeddings = False  # as in transformers: weights count for more than what is said of them
        config.__dict__.pop(CODE_FIELD, None)  # neither followed nor handed on
        if config.model_type not in TESTED:
            warn_untested(config.model_type)
    if vocabulary is not None:
        config.vocab_size = vocabulary
        for token in ("bos_token_id", "eos_token_id", "pad_token_id"):
            found = getattr(config, token, None)
            if any((each or 0) >= vocabulary for each in (found if isinstance(found, list) else [found])):
                setattr(config, token, None)
    return _with_layers(config, layers, name) if layers not in (0, config.num_hidden_layers) else config


def _check_not_quantised(config: Any, name: str) -> None:
    if quantised := getattr(config, QUANTISED_FIELD, None):
        how = quantised.get("quant_method") if isinstance(quantised, dict) else quantised
        raise UserError(
            f"model '{name}': its weights are quantised ({QUANTISED_FIELD}: {how}), which is not supported; use "
            "the model that they were made of"
        )


def _text_part(config: Any, tied: bool | None) -> Any:
    """Of a model that also reads pictures or sound: the configuration of what reads and writes text. `tied`: what its
    file says of embedding and head; None: nothing, and then the text model is as such models are."""
    text = getattr(config, "text_config", None)
    if text is None:
        return config
    if not hasattr(text, "model_type"):
        raise UserError(f"a {config.model_type} configuration whose text_config is none of a model")
    if text.model_type not in TESTED:
        raise UserError(
            f"a {config.model_type} model reads more than text, and its text model ({text.model_type}) is not among "
            f"those that were tested: stages are made of models like {EXAMPLES}"
        )
    _warn_of_parts(config.model_type, text.model_type)
    if tied is not None:
        text.tie_word_embeddings = tied
    return text


@cache
def _warn_of_parts(kind: str, text: str) -> None:
    log.warning("a %s model reads more than text: its text model (%s) is used", kind, text)


@cache
def warn_untested(kind: str) -> None:
    log.warning("%s models are not among those that were tested: compare what they write with transformers", kind)


def _with_layers(config: Any, layers: int, name: str) -> Any:
    """The same model with another number of layers; UserError if it does not say of which kind they would be."""
    fields = config.to_dict()
    there = fields["num_hidden_layers"]
    for field, value in fields.items():
        if not isinstance(value, list) or len(value) != there or not ("layer" in field or field in LISTS_BY_LAYER):
            continue
        kinds = {str(kind) for kind in value}
        if len(kinds) > 1:
            raise UserError(
                f"model.layers: '{name}' has {field} of several kinds ({', '.join(sorted(kinds))}), and does not say "
                f"which of them {layers} layers would have: name a config.json that does, in model.config"
            )
        fields[field] = value[:1] * layers
    return config_from({**fields, "num_hidden_layers": layers})


def _has_kernels(config: Any) -> bool:
    """Whether torch's attention kernels compute what the model does: not if it caps scores, or has sinks."""
    kind = _Language._model_mapping.get(type(config), None)
    return getattr(kind, "_supports_sdpa", True) and not getattr(config, "attn_logit_softcapping", None)


def config_from(fields: dict[str, Any]) -> Any:
    """The configuration that these fields were written from."""
    left_out = ("model_type", "transformers_version", CODE_FIELD)
    kept = {name: value for name, value in fields.items() if name not in left_out}
    return AutoConfig.for_model(fields["model_type"], **kept)


def llama_config(shape: ModelShape, **others: Any) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        intermediate_size=shape.intermediate,
        vocab_size=shape.vocab,
        tie_word_embeddings=shape.tied_embeddings,
        bos_token_id=None,
        eos_token_id=None,
        **{"max_position_embeddings": 8192, **others},
    )


class ModelSpec:
    """A configuration and a seed, and perhaps adapters or bridges: enough to make any part of the model."""

    def __init__(
        self,
        config: Any,
        seed: int = 0,
        lora: LoraConfig | None = None,
        bridges: int = 0,
        adapters: int = 0,
        repeats: int = 0,
    ) -> None:
        """`bridges` and `adapters`: the ranks of those that are trained for paths that leave stages out, 0: there are
        none; `repeats`: turns of `StageAdapters` beside a stage's own."""
        self.config = config
        self.seed = seed
        self.bridges, self.adapters, self.repeats = bridges, adapters, repeats
        self.lora = LoraConfig()
        if getattr(config, "_attn_implementation", None) not in ATTENTION:
            config._attn_implementation = "sdpa" if _has_kernels(config) else "eager"
        try:
            with torch.device("meta"):
                self.skeleton: Any = _Language.from_config(config, trust_remote_code=False)
        except Exception as error:  # any error of its hundred models
            raise UserError(f"transformers makes no language model of this: {first_line(error)}") from None
        self._base: Any = getattr(self.skeleton, self.skeleton.base_model_prefix, None)
        for part in ("embed_tokens", "layers", "norm", "rotary_emb"):
            if not hasattr(self._base, part):
                raise UserError(
                    f"a {config.model_type} model has no '{part}': stages can be made of models that have "
                    f"embed_tokens, layers, norm and rotary_emb, as {EXAMPLES} do"
                )
        self._check_between_parts()
        if lora is not None and lora.rank:
            self.lora = lora.resolved(self._linear_maps())

    def _check_between_parts(self) -> None:
        """UserError if there is more to the model than its parts, of which its stages are made."""
        config, embedding = self.config, self._base.embed_tokens
        if type(embedding) is not nn.Embedding and not hasattr(embedding, "scalar_embed_scale"):
            raise UserError(
                f"a {config.model_type} model has embeddings of its own ({type(embedding).__name__}), which stages do "
                f"not know: they are made of models like {EXAMPLES}"
            )
        if config.model_type in OTHERWISE:
            raise UserError(
                f"a {config.model_type} model does more between its layers than stages do: they are made of models "
                f"like {EXAMPLES}"
            )
        scales = [name for name in SCALES if getattr(config, name, None) not in (None, 0, 1)]
        if scales and config.model_type not in TESTED:
            raise UserError(
                f"a {config.model_type} model scales its embeddings or logits ({', '.join(scales)}), and is not among "
                f"those that were tested: stages are made of models like {EXAMPLES}"
            )
        if kinds := sorted({self.mask_kind(layer) for layer in range(self.layers)} - MASKS.keys()):
            raise UserError(f"layers of the kind '{kinds[0]}' are not supported; {', '.join(MASKS)} are")
        state = self.skeleton.state_dict(keep_vars=True)
        values = {name.rpartition(".")[2] for name, each in state.items() if not isinstance(each, nn.Parameter)}
        _ = self.router  # UserError if it has several
        if values := values - {ROUTER_BIAS}:
            named = ", ".join(sorted(values))
            raise UserError(
                f"a {config.model_type} model has values beside its weights ({named}), which stages do not hold: they "
                f"are made of models like {EXAMPLES}"
            )

    @property
    def shape(self) -> ModelShape:
        return ModelShape.from_config(self.config.to_dict(), f"a {self.config.model_type} model")

    @property
    def parameters(self) -> int:
        """All of them, whereas `shape` counts those of a model like Llama or Mixtral."""
        return sum(each.numel() for each in self.skeleton.parameters())

    @property
    def layers(self) -> int:
        return len(self._base.layers)

    @property
    def tied(self) -> bool:
        return bool(self.config.tie_word_embeddings)

    @property
    def heals(self) -> bool:
        """Whether only bridges and adapters for paths that leave stages out are trained."""
        return self.adapters > 0

    @property
    def frozen(self) -> bool:
        """Whether the model's own weights are not trained."""
        return self.heals or self.lora.rank > 0

    def without_adapters(self) -> ModelSpec:
        """The model by itself, without bridges too."""
        found = copy(self)
        found.lora, found.bridges, found.adapters, found.repeats = LoraConfig(), 0, 0, 0
        return found

    def _linear_maps(self) -> list[str]:
        """Names of the linear maps of all layers."""
        return [name for name, each in self._base.layers.named_modules() if is_linear(each)]

    def layer(self, index: int) -> nn.Module:
        with _NothingDrawn():
            made: nn.Module = type(self._base.layers[index])(self.config, index)
        self._initialised(made, f"layer {index}")
        for module in made.modules():
            bias = module._buffers.pop(ROUTER_BIAS, None)
            if bias is not None:
                module.register_parameter(ROUTER_BIAS, nn.Parameter(bias))
        return made

    def embedding(self) -> nn.Module:
        config, like = self.config, self._base.embed_tokens
        sizes = config.vocab_size, config.hidden_size, like.padding_idx
        scale = getattr(config, "embedding_multiplier", None) or 1.0
        if getattr(config, "mup_enabled", False):
            scale = config.hidden_size**0.5
        with _NothingDrawn():
            if hasattr(like, "scalar_embed_scale"):
                made: nn.Module = type(like)(*sizes, embed_scale=like.scalar_embed_scale)
            else:
                made = nn.Embedding(*sizes) if scale == 1 else ScaledEmbedding(scale, *sizes)
        return self._initialised(made, "embedding")

    def norm(self) -> nn.Module:
        made: nn.Module = deepcopy(self._base.norm)  # models differ in what norms are made from
        for name, each in made.named_parameters(recurse=False):
            made.register_parameter(name, nn.Parameter(torch.empty(each.shape)))
        return self._initialised(made, "norm")

    def head(self) -> nn.Module:
        config, like = self.config, self.skeleton.get_output_embeddings()
        scale = getattr(config, "logit_scale", None) or 1.0
        scaling = getattr(config, "logits_scaling", None) or 1.0  # most models divide by it
        scale *= scaling if config.model_type == "hyperclovax" else 1 / scaling
        cap = getattr(config, "final_logit_softcapping", None)
        kind = nn.Linear if scale == 1 and not cap else partial(ScaledHead, scale, cap)
        with _NothingDrawn():
            made = kind(like.in_features, like.out_features, bias=like.bias is not None)
        return self._initialised(made, "head")

    def rotary(self) -> nn.Module:
        made: nn.Module = type(self._base.rotary_emb)(config=self.config)
        return made

    @property
    def holds_scores(self) -> bool:
        """Whether its attention is computed step by step, from a mask and with all scores in memory at once."""
        return bool(self.config._attn_implementation == "eager")

    def angles(self, layers: range) -> list[str]:
        """Of each of these layers: of which kind of layers it has the angles by which positions turn; empty: all have
        the same."""
        by_kind = "layer_type" in inspect.signature(type(self._base.rotary_emb).forward).parameters
        return [self.mask_kind(layer) if by_kind else "" for layer in layers]

    def mask_kind(self, layer: int) -> str:
        """The kind of attention mask that a layer has."""
        kinds = getattr(self.config, "layer_types", None)
        if kinds is not None:
            return str(kinds[layer])
        return "sliding_attention" if getattr(self.config, "sliding_window", None) else "full_attention"

    def mask(self, kind: str, hidden: Tensor, positions: Tensor) -> Tensor | None:
        """The attention mask of a kind; None where the kernel's own causal mask is enough."""
        mask: Tensor | None = MASKS[kind](
            config=self.config,
            inputs_embeds=hidden,
            attention_mask=None,
            past_key_values=None,
            position_ids=positions,
        )
        return mask

    @property
    def router(self) -> tuple[type[nn.Module], int] | None:
        """The module that scores the experts, and which of its outputs are the scores; None for a dense model."""
        recorded = (getattr(self.skeleton, "_can_record_outputs", None) or {}).get("router_logits")
        recorded = recorded or (getattr(self._base, "_can_record_outputs", None) or {}).get("router_logits")
        if recorded is None:
            return None
        if isinstance(recorded, list):
            raise UserError(
                f"a {self.config.model_type} model has routers of several kinds: stages are made of models like "
                f"{EXAMPLES}"
            )
        return recorded.target_class, recorded.index

    @property
    def experts_active(self) -> int:
        return self.shape.experts_active

    @property
    def balance_weight(self) -> float:
        """The weight of the balancing loss in the loss of a microbatch."""
        return float(getattr(self.config, "router_aux_loss_coef", 0.0))

    def routers(self, layers: range) -> int:
        """How many of the layers are mixtures of experts."""
        found = self.router
        if found is None:
            return 0
        return sum(isinstance(part, found[0]) for index in layers for part in self._base.layers[index].modules())

    def _initialised(self, module: nn.Module, part: str) -> nn.Module:
        digest = sha256(f"{self.seed}/{part}".encode()).digest()
        with torch.random.fork_rng(devices=[]):
            # torch.manual_seed would seed other devices too: until they are used, it keeps a stack trace for each call.
            torch.default_generator.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
            for each in module.modules():
                self.skeleton._init_weights(each)
        return module


class ScaledEmbedding(nn.Embedding):
    """Embeddings that a model multiplies by a number of its configuration."""

    def __init__(self, scale: float, *sizes: Any) -> None:
        super().__init__(*sizes)
        self.scale = scale

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * self.scale


class ScaledHead(nn.Linear):
    """A head whose logits a model multiplies, or caps, by numbers of its configuration."""

    def __init__(self, scale: float, cap: float | None, inputs: int, outputs: int, bias: bool) -> None:
        super().__init__(inputs, outputs, bias)
        self.scale, self.cap = scale, cap

    def forward(self, input: Tensor) -> Tensor:
        logits = super().forward(input) * self.scale
        return logits if self.cap is None else torch.tanh(logits / self.cap) * self.cap


class _NothingDrawn(TorchFunctionMode):
    """Modules that are made in this context begin with zeros: what torch would draw for them is thrown away for what
    the seed says, and takes more than half as long."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _DRAWS:
            return func(*args, **(kwargs or {}))
        tensor: Tensor = args[0] if args else kwargs["tensor"]
        with torch.no_grad():
            return tensor.zero_()


_DRAWS = (Tensor.uniform_, Tensor.normal_, nn.init.kaiming_uniform_, nn.init.uniform_, nn.init.normal_)


def is_linear(module: nn.Module) -> bool:
    """Whether it is a linear map and nothing else."""
    return type(module) is nn.Linear


MOST_WORKERS = 64  # on the CPU of one node


def parse_devices(text: str) -> list[str]:
    """The devices that a text names: `cpu`, `cpu:4` (four workers), `cuda` (all that are there), `cuda:1`, `cuda:0-3`.

    UserError unless this machine has them."""
    kind, _, numbers = text.partition(":")
    first, _, last = numbers.partition("-")
    if kind == "cpu" and first.isdecimal() and not last and 1 <= int(first) <= MOST_WORKERS:
        return ["cpu"] * int(first)
    if kind == "cuda" and first.isdecimal() and last.isdecimal() and int(first) < int(last) < MOST_WORKERS:
        check_device(f"cuda:{int(last)}")
        return [f"cuda:{number}" for number in range(int(first), int(last) + 1)]
    if kind not in ("cpu", "cuda") or (numbers and (kind == "cpu" or not numbers.isdecimal())):
        raise UserError(f"device '{text}': expected cpu, cpu:K (K workers), cuda, cuda:N or cuda:N-M")
    check_device(text)
    if text == "cuda":
        return [f"cuda:{number}" for number in range(torch.cuda.device_count())]
    return [text]


def check_device(device: str) -> None:
    """UserError unless this machine has the device."""
    kind, _, index = device.partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdigit()):
        raise UserError(f"device '{device}': expected cpu, cuda or cuda:N")
    if kind == "cuda":
        found = torch.cuda.device_count()
        if not found:
            raise UserError(f"device '{device}': {why_no_cuda()}")
        if int(index or 0) >= found:
            raise UserError(f"device '{device}': this machine has {found} CUDA devices; use another, or cpu")


def why_no_cuda() -> str:
    """Why torch finds no CUDA device on this machine, and what to do."""
    if torch.version.cuda is None and torch.version.hip is None:
        return f"torch {torch.__version__} is built without CUDA; install a build with CUDA (pytorch.org), or use cpu"
    return (
        f"torch {torch.__version__} is built for GPUs and sees none on this machine; check nvidia-smi and "
        "CUDA_VISIBLE_DEVICES, or use cpu"
    )
