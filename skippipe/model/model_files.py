"""What is read of a model folder that another program has made: data, and never code.

Hugging Face folders can ask for classes of their own (`auto_map`), which transformers would import from the folder's
Python files, or fetch. Nothing of that kind is run here, whatever is answered to whom: every command that reads a model
or a tokenizer asks `check_model_folder` first, and every call into transformers says `trust_remote_code=False` as well.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from skippipe.errors import UserError
from skippipe.json_fields import read_json

CONFIG, TOKENIZER, ADAPTER = "config.json", "tokenizer_config.json", "adapter_config.json"
ONE_FILE, INDEX, GENERATION = "model.safetensors", "model.safetensors.index.json", "generation_config.json"
READ_WHOLE = (".json", ".jinja", ".model", ".tiktoken", ".txt")  # how files end that are read into memory at once
MOST_BYTES = 2**28  # of such a file; the largest tokenizers that are published have an eighth of it
CODE_FIELD = "auto_map"
TYING_FIELD = "tie_word_embeddings"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
PROBED_ROWS = 64
TEXT_FIELDS = ("bos_token_id", "eos_token_id")  # of a configuration, on which no weight depends


def check_model_folder(folder: Path) -> None:
    """Refuse a folder that only works with code of its own, or with files that no model needs.

    Where transformers has a class of its own for what the folder holds, that one is used and the folder's is not.
    """
    for file in sorted(folder.iterdir()) if folder.is_dir() else ():
        if file.suffix in READ_WHOLE and file.is_file() and file.stat().st_size > MOST_BYTES:
            raise UserError(f"{file}: has {file.stat().st_size:,} bytes; up to {MOST_BYTES:,} are read of such a file")
    config, tokenizer = _fields(folder / CONFIG), _fields(folder / TOKENIZER)
    if config.get(CODE_FIELD) and not _is_known_model(config.get("model_type")):
        raise _wants_code(folder / CONFIG, config, f"model_type '{config.get('model_type')}'")
    if tokenizer.get(CODE_FIELD) and not _is_known_tokenizer(tokenizer.get("tokenizer_class")):
        raise _wants_code(folder / TOKENIZER, tokenizer, f"tokenizer_class '{tokenizer.get('tokenizer_class')}'")
    if (folder / ADAPTER).is_file():
        raise UserError(
            f"{folder / ADAPTER}: is an adapter to another model; merge it into that one, and name the result"
        )


def reads_more(place: Path) -> bool:
    """Whether a folder, or a config.json, is of a model that also reads pictures or sound; its text model is a part."""
    return bool(_config_in(place).get("text_config"))


def tying_said(place: Path) -> bool | None:
    """What the configuration of a folder, or of a model that also reads pictures or sound, says of embedding and head:
    whether they are one matrix; None: nothing."""
    config = _config_in(place)
    parts = [config, config["text_config"]] if isinstance(config.get("text_config"), dict) else [config]
    said = [each[TYING_FIELD] for each in parts if each.get(TYING_FIELD) is not None]
    return bool(said[0]) if said else None


def has_own_head(place: Path) -> bool:
    """Whether the weights of a folder have a head that differs from the embedding. Some rows of both tell."""
    from safetensors import SafetensorError, safe_open  # with torch, which plans do without

    if not place.is_dir():
        return False
    files = sorted(set(weight_map_of(place).values())) or [ONE_FILE]
    rows: dict[str, list[Any]] = {}
    for file in (place / name for name in files if (place / name).is_file()):
        try:
            with safe_open(file, "pt") as opened:
                for name in opened.keys():  # noqa: SIM118 (it is no dictionary)
                    if text_name(name) in (EMBEDDING, HEAD):
                        found = opened.get_slice(name)
                        starts = [part * max(0, found.get_shape()[0] - PROBED_ROWS) // 3 for part in range(4)]
                        rows[text_name(name)] = [found[start : start + PROBED_ROWS] for start in starts]
        except (OSError, SafetensorError) as error:
            raise UserError(f"{file}: cannot be read: {error}") from None
    if rows.keys() != {EMBEDDING, HEAD}:
        return False
    return any(
        ours.shape != theirs.shape or not ours.equal(theirs) for ours, theirs in zip(*rows.values(), strict=True)
    )


def text_name(name: str) -> str:
    """The name that a weight in such a folder has in the text model by itself."""
    if name.startswith("language_model."):
        return name.removeprefix("language_model.")
    if name.startswith("model.language_model."):
        return f"model.{name.removeprefix('model.language_model.')}"
    return name


def weight_map_of(folder: Path) -> dict[str, str]:
    """Name of a weight → the file that holds it, if there is an index. Files lie in the folder, whatever it says. As in
    transformers, an index does not count where all weights are in one file that it does not name."""
    file = folder / INDEX
    found = _fields(file).get("weight_map", {})
    if not isinstance(found, dict):
        raise UserError(f"{file}: weight_map: expected an object, with the name of a file for every weight")
    for name in set(map(str, found.values())):
        check_plain_name(name, f"{file}: weight_map")
    if (folder / ONE_FILE).is_file() and ONE_FILE not in found.values():
        return {}
    return {str(weight): str(name) for weight, name in found.items()}


def check_plain_name(name: str, place: str) -> None:
    """A file is named in a file beside it: by its name, and not by a way to elsewhere."""
    if not name.isprintable() or not name or Path(name).name != name or name in (".", "..") or "\\" in name:
        raise UserError(f"{place}: '{name}' is not the name of a file in this folder")


def _config_in(place: Path) -> dict[str, Any]:
    return _fields(place / CONFIG if place.is_dir() else place)


def _fields(file: Path) -> dict[str, Any]:
    """The fields of a JSON file; none if there is no such file, or if it holds no object."""
    found = read_json(file) if file.is_file() else {}
    return found if isinstance(found, dict) else {}


def _wants_code(file: Path, fields: dict[str, Any], kind: str) -> UserError:
    asked = fields[CODE_FIELD]
    names = [str(each) for each in (asked.values() if isinstance(asked, dict) else [asked])]
    return UserError(
        f"{file}: wants Python code from the folder to be run ({CODE_FIELD}: {', '.join(names)[:200]}), which is never "
        f"done here, and transformers has nothing of its own for {kind}; use a model that it has a class for"
    )


def _is_known_model(kind: Any) -> bool:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


def _is_known_tokenizer(kind: Any) -> bool:
    from transformers.models.auto import tokenization_auto

    found: Any = tokenization_auto.tokenizer_class_from_name(kind) if isinstance(kind, str) else None
    return found is not None
