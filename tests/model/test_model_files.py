"""Model folders of strangers: what is in them is data, whatever it says it is."""

from __future__ import annotations

import ast
import json
import lzma
import re
import shutil
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from skippipe.checkpoint.format import Manifest
from skippipe.checkpoint.hf_export import ModelFolder
from skippipe.data import documents, readers
from skippipe.data.prepare import prepare
from skippipe.data.tokenizer import TextTokenizer, train_bpe
from skippipe.errors import UserError
from skippipe.inference.checkpoint_loader import load, load_stage, read_outline
from skippipe.model import model_files
from skippipe.model.flat_params import layout_of_stage
from skippipe.model.model_spec import ModelSpec, config_from, config_named
from skippipe.model.stage import StageModel, layer_ranges
from skippipe.model_shape import model_named
from skippipe.serving import async_engine
from tests.helpers.models import tiny
from tests.helpers.processes import Command

PROJECT = Path(__file__).parents[2]
LAYERS = (2, 3)
TOKENIZER = train_bpe(["It was the best of links, it was the worst of links. "], 257)
EVIL = "import pathlib\npathlib.Path(__file__).with_name('ran').touch()\nraise SystemExit('the folder runs code')\n"
CUSTOM = {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.EvilModel", "AutoTokenizer": ["evil.Slow", None]}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model to copy."""
    place = tmp_path_factory.mktemp("sound") / "model"
    spec = ModelSpec(tiny("llama", vocab_size=TOKENIZER.size), 5)
    model = ModelFolder(place, LAYERS, spec, TOKENIZER)
    for number, layers in enumerate(layer_ranges(LAYERS)):
        weights = dict(StageModel(spec, layers, ends=number == 0).named_weights())
        names = [each.name for each in layout_of_stage(spec, LAYERS, number)]
        model.store_flat(number, torch.cat([weights[name].detach().flatten() for name in names]))
    return place


@pytest.fixture
def folder(tmp_path: Path, sound: Path) -> Path:
    """A sound model."""
    return shutil.copytree(sound, tmp_path / "model")


def change(file: Path, **fields: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def wants_code(folder: Path, **config: Any) -> None:
    (folder / "evil.py").write_text(EVIL)
    change(folder / "config.json", auto_map=CUSTOM, **config)


@pytest.fixture(autouse=True)
def nobody_is_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Whoever asks is told yes."""
    monkeypatch.setattr("builtins.input", lambda question="": "y")
    yield
    assert not list(tmp_path.rglob("ran")), "code of the folder has been run"


JOB = 'output = "out"\niterations = 1\nmodel.config = "{model}"\ndata.tokenizer = "{tokenizer}"\n'


@pytest.mark.parametrize(
    "words",
    [
        ["train", "job.toml"],
        ["train", "job.toml", "--engine", "one-process"],
        ["grow", "model", "job.toml"],
        ["generate", "model", "It was"],
        ["eval", "model", "--text", "classics-val"],
        ["score", "model", "--text", "classics-val"],
        ["serve", "model", "--port", "0"],
        ["study", "run", "study.toml"],
        ["profile", "--local", "2", "--job", "job.toml"],
    ],
    ids=lambda words: " ".join(words[:2]),
)
def test_code_of_a_model_folder_is_refused_by_every_command(
    words: list[str], folder: Path, skippipe: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    wants_code(folder, model_type="evil")
    (tmp_path / "job.toml").write_text(JOB.format(model=folder, tokenizer=""))
    (tmp_path / "text.txt").write_text("It was the best of times, it was the worst of times. " * 99)
    (tmp_path / "study.toml").write_text(
        f'name = "s"\nmodel = "{folder}"\ntrain = ["text.txt"]\ntests = ["same=text.txt"]\nvocabulary = 300\n'
        '[[variant]]\nname = "v"\nrecipe.skip = "0"\n'
    )
    ran = skippipe(*words)
    assert ran.code == 2, ran.err
    (line,) = [each for each in ran.err.splitlines() if each.startswith("error: ")]
    refused_before = {"grow": True, "score": find_spec("lm_eval") is None}  # no checkpoints; no harness
    if not refused_before.get(words[0]):
        assert "wants Python code from the folder to be run (auto_map: evil.Evil, evil.EvilModel" in line, line
        assert "which is never done here" in line
        assert "model_type 'evil'" in line


@pytest.mark.parametrize(
    "words", [["prepare", "classics-val", "--output", "t", "--tokenizer", "model"], ["generate", "model"]]
)
def test_code_of_a_tokenizer_is_refused(
    words: list[str], folder: Path, skippipe: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (folder / "evil.py").write_text(EVIL)
    change(folder / "tokenizer_config.json", auto_map=CUSTOM, tokenizer_class="EvilTokenizer")
    ran = skippipe(*words)
    assert ran.code == 2
    assert "tokenizer_config.json: wants Python code from the folder to be run" in ran.err
    assert ran.err.count("\n") == 1


def test_where_transformers_has_a_class_of_its_own_that_one_is_used(folder: Path) -> None:
    wants_code(folder)
    change(folder / "tokenizer_config.json", auto_map=CUSTOM)
    config = config_named(str(folder))
    assert not hasattr(config, "auto_map"), "it would travel to nodes, and into exported models"
    assert load(folder).layers == LAYERS
    assert TextTokenizer.load(folder).size == TOKENIZER.size
    told = {**config.to_dict(), "auto_map": CUSTOM}
    assert ModelSpec(config_from(told)).layers == sum(LAYERS)


def test_attention_is_torchs_own(folder: Path) -> None:
    change(folder / "config.json", attn_implementation="somebody/kernel", _attn_implementation="somebody/kernel")
    assert ModelSpec(config_named(str(folder))).config._attn_implementation == "sdpa"


def test_every_call_into_transformers_says_that_no_code_is_trusted() -> None:
    found = 0
    for file in [*PROJECT.glob("skippipe/**/*.py"), *PROJECT.glob("benchmarks/**/*.py")]:
        text = file.read_text(encoding="utf-8")
        if not re.search(r"pickle|marshal|shelve|joblib|dill|\bload\b|from_pretrained|from_config", text):
            continue
        for node in ast.walk(ast.parse(text)):
            names = [each.name for each in node.names] if isinstance(node, (ast.Import, ast.ImportFrom)) else []
            assert not {"pickle", "marshal", "shelve", "joblib", "dill"} & set(names), f"{file}: {names}"
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            if node.func.attr == "load":
                assert ast.unparse(node.func) not in ("torch.load", "np.load", "numpy.load"), f"{file}:{node.lineno}"
            if node.func.attr in ("from_pretrained", "from_config") and ast.unparse(node.func.value) != "cls":
                said = {each.arg: ast.unparse(each.value) for each in node.keywords}
                if "ModelShape" in ast.unparse(node.func.value):  # ours
                    continue
                assert said.get("trust_remote_code") == "False", f"{file}:{node.lineno}"
                if node.func.attr == "from_pretrained":
                    assert said.get("local_files_only") == "True", f"{file}:{node.lineno}"
                found += 1
    assert found >= 5


def test_datasets_that_are_scripts_need_a_library_that_runs_none() -> None:
    (bound,) = re.findall(r'"datasets>=(\d+)', (PROJECT / "pyproject.toml").read_text(encoding="utf-8"))
    assert int(bound) >= 4


# weights


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", "a/b.safetensors", "..", "a\\b", ""])
def test_an_index_names_files_of_its_folder_only(name: str, folder: Path) -> None:
    index = folder / model_files.INDEX
    weights = json.loads(index.read_text())["weight_map"]
    if not name:
        change(index, weight_map=[1])
    else:
        change(index, weight_map={**weights, min(weights): name})
    for read in (load, read_outline):
        with pytest.raises(UserError, match="weight_map"):
            read(folder)


def test_a_stage_alone_is_read_from_its_folder_only(folder: Path, tmp_path: Path) -> None:
    outline = read_outline(folder)
    index = folder / model_files.INDEX
    shutil.copy(next(folder.glob("*.safetensors")), tmp_path / "elsewhere.safetensors")
    change(index, weight_map=dict.fromkeys(json.loads(index.read_text())["weight_map"], "../elsewhere.safetensors"))
    with pytest.raises(UserError, match="is not the name of a file in this folder"):
        load_stage(outline, 0)


def test_one_file_counts_and_not_the_index_of_others(folder: Path) -> None:
    """As after `save_pretrained` into a folder that had a larger model."""
    whole = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        whole.model.norm.weight.fill_(7.0)
    weights = {name: each.detach().clone() for name, each in whole.named_parameters()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    theirs = AutoModelForCausalLM.from_pretrained(folder).model.norm.weight
    for stage in (load(folder).stages[0], load_stage(read_outline(folder), 0)):
        assert torch.equal(dict(stage.named_weights())["model.norm.weight"], theirs)


def test_a_manifest_names_files_of_its_folder_only() -> None:
    said = {"format": "skippipe-checkpoint", "version": 1, "iterations": 1, "layers": [], "steps": [], "seed": 0}
    files = [{"name": "../stage-0.weights.safetensors", "size": 1, "sha256": "0"}]
    with pytest.raises(UserError, match=r"files: '\.\./stage-0"):
        Manifest.from_json({**said, "data": "0", "config": {}, "files": files})


def test_pickled_weights_are_not_read(folder: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return (folder.joinpath("ran").touch, ())

    for file in [*folder.glob("*.safetensors"), folder / model_files.INDEX]:
        file.unlink()
    torch.save({"model.norm.weight": Evil()}, folder / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"no weights in safetensors files, and others \(pickle\) are not read"):
        load(folder)


def test_an_adapter_would_bring_another_folder(folder: Path) -> None:
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "/somewhere/else"}')
    with pytest.raises(UserError, match="is an adapter to another model"):
        load(folder)


def test_files_that_fill_the_memory(folder: Path) -> None:
    with (folder / "tokenizer.json").open("r+b") as file:
        file.truncate(model_files.MOST_BYTES + 1)  # takes no room on disk
    for read in (load, TextTokenizer.load):
        with pytest.raises(UserError, match=r"tokenizer\.json: has 268,435,457 bytes; up to 268,435,456 are read"):
            read(folder)


def test_a_model_of_absurd_sizes(folder: Path) -> None:
    change(folder / "config.json", num_hidden_layers=10**9)
    with pytest.raises(UserError, match="num_hidden_layers: 1,000,000,000 is out of range; give 1 to 10,000"):
        model_named(str(folder))


def test_quantised_weights_are_refused(folder: Path) -> None:
    """A stage would read the numbers of an FP8 model without their scales."""
    change(folder / "config.json", quantization_config={"quant_method": "fp8"})
    with pytest.raises(UserError, match=r"its weights are quantised \(quantization_config: fp8\).* use the model that"):
        read_outline(folder)


def test_a_configuration_that_transformers_does_not_take(folder: Path) -> None:
    change(folder / "config.json", max_position_embeddings=None)
    with pytest.raises(UserError, match=r"Validation error for field 'max_position_embeddings': TypeError"):
        read_outline(folder)


# texts


def test_a_compressed_text_that_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "MOST_UNPACKED", 2)
    bomb = tmp_path / "bomb.xz"
    bomb.write_bytes(lzma.compress(b"a " * 2**21))
    with pytest.raises(UserError, match="more than 2 times as large without compression, which no text is"):
        prepare([bomb], 257, tmp_path / "tokens")


def test_compressed_texts_in_several_pieces(tmp_path: Path) -> None:
    file = tmp_path / "text.xz"
    file.write_bytes(lzma.compress(b"one ") + b"\0" * 8 + lzma.compress(b"two"))
    assert [piece.text for piece in documents.source(file).pieces()] == ["one two"]
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(UserError, match=r"not a whole \.xz file"):
        list(documents.source(file).pieces())


def test_unpacking_takes_bounded_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "text.xz"
    file.write_bytes(lzma.compress(b"word " * 9, preset=9))
    monkeypatch.setattr(readers, "MOST_UNPACKER_BYTES", 2**20)
    with pytest.raises(UserError, match="limit"):
        list(documents.source(file).pieces())


# chat templates are programs


def chat(folder: Path, template: str | None, tools: Sequence[dict[str, Any]] = ()) -> list[int]:
    change(folder / "tokenizer_config.json", chat_template=template)
    gateway: Any = None
    engine = async_engine.AsyncEngine(
        gateway, read_outline(folder).tokenizer(), "m", context=64, vocabulary=TOKENIZER.size, end_tokens=frozenset()
    )
    return engine.encode_chat([{"role": "user", "content": "best"}], tools)


def test_a_template_makes_a_text_of_a_conversation(folder: Path) -> None:
    plain = "{{ messages[0]['content'] }}"
    assert chat(folder, plain) == TOKENIZER.encode("best")
    tool = {"type": "function", "function": {"name": "look", "description": "", "parameters": {}}}
    with_tools = "{% for tool in tools %}{{ tool.function.name }}{% endfor %}" + plain
    assert chat(folder, with_tools, [tool]) == TOKENIZER.encode("lookbest")
    with pytest.raises(async_engine.UnknownTools, match="has no place for them"):
        chat(folder, plain, [tool])
    with pytest.raises(UserError, match="half a character"):
        chat(folder, "{{ tools | tojson }}", [{**tool, "type": "\ud800"}])
    with pytest.raises(UserError, match=r"has no chat template.* use /v1/completions"):
        chat(folder, None)


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__.__base__ }}",
        "{{ cycler.__init__.__globals__.os.system('touch ran') }}",
        "{{ self.__init__.__globals__ }}",
        "{% set _ = messages.append(1) %}",
        "{{ ('%s' | attr('format'))(messages) | attr('__class__') }}{{ raise_exception('no') }}",
        "{% include 'config.json' %}",
        "{{ range(999999999) | list }}",
    ],
)
def test_a_template_gets_nowhere(template: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    with pytest.raises(UserError, match="the model's chat template does not take them"):
        chat(folder, template)


def test_a_template_that_never_ends(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(async_engine, "TEMPLATE_S", 0.05)
    loop = "{% for a in range(99999) %}{% for b in range(99999) %}{% set c = a %}{% endfor %}{% endfor %}"
    with pytest.raises(UserError, match=r"does not take them: it is not done after 0\.05 s"):
        chat(folder, loop)


def test_a_template_that_says_too_much(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(async_engine, "TEMPLATE_CHARACTERS", 1000)
    with pytest.raises(UserError, match="makes 2,000 characters of them; 1,000 at most"):
        chat(folder, "{{ 'a' * 2000 }}")
