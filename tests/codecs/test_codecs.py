"""A codec is one file and one line: what planner, messages and training ask of it goes through the registry."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch

import skippipe
from skippipe.codecs import CODECS, GRADIENTS, Buffer, Codec, CodecId, EncodedTensor, decode, encode, smaller_than
from skippipe.codecs.int8 import Int8
from skippipe.collectives import COLLECTIVES
from skippipe.cost_model import cost_model_of
from skippipe.planner.problem_spec import fastest_of
from skippipe.transport.message import Hop, Limits, Malformed, Message, from_frames, to_frames
from skippipe.workload import Workload
from tests.helpers.executors import noise
from tests.helpers.plans import TINY, uniform_cluster
from tests.helpers.small_run import small_run

torch.set_num_threads(1)


class TopK(Codec):
    """Of the values, the half that is largest, without zeros: all places, then all values."""

    id = "top-k"
    number = 100
    error_bound = "the median magnitude"
    error_feedback = True
    fixed_size = False

    def expected_bytes(self, values: int) -> int:
        return 8 * -(-values // 2)

    def encode(self, flat: torch.Tensor) -> torch.Tensor:
        places = flat.abs().topk(-(-len(flat) // 2)).indices.sort().values
        places = places[flat[places] != 0]
        return torch.cat([places.int().view(torch.uint8), flat[places].float().view(torch.uint8)])

    def decode(self, raw: torch.Tensor, values: int) -> torch.Tensor:
        half = len(raw) // 2
        flat = torch.zeros(values, device=raw.device)
        flat[raw[:half].view(torch.int32).long()] = raw[half:].view(torch.float32)
        return flat

    def malformed(self, data: Buffer, shape: tuple[int, ...]) -> str:
        if len(data) % 8:
            return f"{len(data)} bytes are no pairs of place and value"
        places = np.frombuffer(data, np.int32, len(data) // 8)
        ascending = not len(places) or (places[0] >= 0 and places[-1] < np.prod(shape) and (np.diff(places) > 0).all())
        return "" if ascending else "places that are not in the tensor"


@pytest.fixture
def top_k(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(CODECS, TopK.id, TopK())
    return TopK.id


def message(body: EncodedTensor) -> Message:
    return Message(Hop(0, 0, 0, 0), body)


def test_numbers_and_ids_are_those_of_messages_and_files_from_before() -> None:
    names = (
        "fp32 bf16 int8 fp8 fp8-e5m2 int4 int4-stochastic int2 int6 int6-stochastic int4-tile32 int4-tile32-stochastic "
        "int4-rank8 int4-rank8-stochastic"
    )
    assert {codec.number: name for name, codec in CODECS.items()} == dict(enumerate(names.split(), 2))
    assert get_args(CodecId) == tuple(CODECS)
    assert [name for name, codec in CODECS.items() if codec.lossless] == ["fp32"]
    assert smaller_than("fp32") == "bf16" and smaller_than("bf16") == "int8"
    assert smaller_than("int8") == "int6" and smaller_than("fp8") == "int4-tile32" and smaller_than("int4") is None


@pytest.mark.parametrize("codec", CODECS.values(), ids=list(CODECS))
def test_the_docs_name_every_codec(codec: Codec) -> None:
    page = (Path(__file__).parents[2] / "docs" / "formats.md").read_text()
    assert f"| `{codec.id}` | {codec.number} | {codec.error_bound} |" in page


def test_the_schema_names_every_codec_and_collective() -> None:
    schema = json.loads((Path(skippipe.__file__).parent / "resources" / "plan.schema.json").read_text())
    fields = schema["properties"]["workload"]["properties"]
    assert fields["wire_dtype"]["enum"] == list(CODECS)
    assert fields["gradient_dtype"]["enum"] == list(GRADIENTS) == [*CODECS, *(f"rank-{2**n}" for n in range(2, 7))]
    assert fields["collective"]["enum"] == list(COLLECTIVES)


@pytest.mark.parametrize("name", CODECS)
def test_the_reference_rounds_as_a_hop_does(name: str) -> None:
    for shape in ((2, 300), (2, 128, 130)):
        tensor = noise(3, *shape)
        assert torch.equal(CODECS[name].rounded(tensor).float(), decode(encode(tensor, name)))


class Transposed(Int8):
    """One whose blocks go down the columns of a tensor."""

    def encode_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        return super().encode_tensor(tensor.mT)

    def decode_tensor(self, raw: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        return super().decode_tensor(raw, (*shape[:-2], shape[-1], shape[-2])).mT


def test_a_codec_of_blocks_that_writes_tensors_in_a_way_of_its_own_rounds_so() -> None:
    codec = Transposed()
    for shape in ((2, 300), (2, 128, 130)):
        tensor = noise(3, *shape) * torch.arange(shape[-1])
        assert torch.equal(codec.rounded(tensor), codec.decode_tensor(codec.encode_tensor(tensor), shape))
        assert not torch.equal(codec.rounded(tensor), CODECS["int8"].rounded(tensor))


@pytest.mark.slow
def test_the_benchmark_runs_where_only_torch_is() -> None:
    """As on a machine with a GPU: no numba, nor what planner, transport and command need."""
    code = (
        "import sys; sys.modules.update(dict.fromkeys(['numba', 'llvmlite', 'ortools', 'zmq', 'typer', 'msgspec']))\n"
        "from benchmarks.codecs import main; sys.argv[1:] = ['--mib', '1', *sys.argv[1:]]; main()"
    )
    names = ["int8", "fp8", "int6", "int2"]
    done = subprocess.run([sys.executable, "-c", code, *names], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()[1:]] == names


def test_a_codec_whose_size_depends_on_content_through_frames(top_k: str) -> None:
    full, zero = noise(1, 4, 50), torch.zeros(4, 50)
    assert encode(full, top_k).nbytes == CODECS[top_k].expected_bytes(200) == 800
    assert encode(zero, top_k).nbytes == 0
    limits = Limits(payload_bytes=2**12)
    for tensor in (full, zero):
        sent = message(encode(tensor, top_k))
        header, payload = to_frames(sent)
        (back, _) = from_frames([header, payload[:96], payload[96:]], limits)
        assert back == sent and isinstance(back.body, EncodedTensor)
        assert torch.equal(decode(back.body), CODECS[top_k].rounded(tensor))
    assert decode(encode(full, top_k)).count_nonzero() == 100


def test_what_a_sparse_codec_cannot_have_made_is_refused_before_anything_is_built(top_k: str) -> None:
    limits = Limits(payload_bytes=2**12)
    header, payload = to_frames(message(encode(noise(1, 200), top_k)))
    for bad, reason in (
        (bytes(payload)[:-1], "no pairs"),
        (b"\xff" * 800, "not in the tensor"),
        (np.array([200], np.int32).tobytes() + bytes(4), "not in the tensor"),
    ):
        with pytest.raises(Malformed, match=reason):
            from_frames([header, bad], limits)
    few_bytes_for_many_values, nothing = to_frames(message(EncodedTensor(top_k, (2**31, 4), b"")))
    with pytest.raises(Malformed, match="at most 4096 bytes are taken"):
        from_frames([few_bytes_for_many_values, nothing], limits)


def test_plans_reckon_with_the_expected_size(top_k: str) -> None:
    work = Workload(TINY, 32, 1, 4, wire_dtype=top_k, gradient_dtype=top_k)
    dense = Workload(TINY, 32, 1, 4, wire_dtype="fp32", gradient_dtype="fp32")
    assert work.activation_bytes == dense.activation_bytes  # half the values, with their places
    costs = cost_model_of(uniform_cluster(4), work, (4, 4))
    assert costs.gradient_bytes == tuple(8 * -(-work.stage_parameters(stage, 4) // 2) for stage in range(2))
    assert Workload.from_json(work.to_json()) == work
    assert fastest_of(f"fp32,{top_k},bf16", "wire") == "bf16"
    assert smaller_than(top_k) == "bf16"


def test_a_run_with_a_codec_of_its_own_rounds_as_one_process_does(top_k: str) -> None:
    """Activations and gradients: to the bit in the first forward, and replicas stay alike."""
    run, dense = (small_run(2, wire_dtype=codec, gradient_dtype=codec) for codec in (top_k, "fp32"))
    found = [report.loss for report in run.cluster.reports]
    assert found[0] == pytest.approx(run.losses[0], rel=1e-7)
    assert found[0] != pytest.approx(dense.losses[0], rel=1e-5)
    assert all(torch.equal(replicas[0], other) for replicas in run.weights for other in replicas[1:])
    assert not torch.equal(run.weights[1][0], dense.weights[1][0])
