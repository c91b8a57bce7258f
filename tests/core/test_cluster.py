"""Cluster files: what is good comes back unchanged, what is bad is named with its place and its fix."""

from __future__ import annotations

import json
from itertools import combinations, permutations
from math import inf
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skippipe.cluster import Cluster, Node, with_relay
from skippipe.errors import UserError
from skippipe.json_fields import json_text
from skippipe.presets import PRESETS, data, preset, random_cluster, regions
from tests.helpers.plans import change, clusters, uniform_cluster

SCHEMA = data("cluster.schema.json")


@given(clusters(devices=True))
def test_file_and_back_unchanged(cluster: Cluster) -> None:
    text = json_text(cluster.to_json())
    assert Cluster.from_json(json.loads(text)) == cluster
    jsonschema.validate(json.loads(text), SCHEMA)


def test_save_and_load(tmp_path: Path) -> None:
    cluster = regions(5)
    cluster.save(tmp_path / "deep" / "cluster.json")
    assert Cluster.load(tmp_path / "deep" / "cluster.json") == cluster
    assert [file.name for file in (tmp_path / "deep").iterdir()] == ["cluster.json"]


BAD = {
    "missing node": (change("nodes.2", ...), "latency_s: 2 nodes need 2 rows, found 3"),
    "no nodes": (change("nodes", []), "latency_s: 0 nodes need 0 rows"),
    "negative bandwidth": (
        change("bandwidth_bytes_per_s.1.2", -5.0),
        "bandwidth_bytes_per_s[1][2] (from 'n1' to 'n2')",
    ),
    "NaN": (change("latency_s.0.1", float("nan")), "latency_s[0][1] (from 'n0' to 'n1'): nan"),
    "infinite": (change("nodes.0.flops_per_s", float("inf")), "nodes[0].flops_per_s: inf is not a finite number"),
    "not square": (change("latency_s.1", [0.0, 0.0]), "latency_s[1]: 3 nodes need 3 numbers in each row, found 2"),
    "duplicate name": (change("nodes.2.name", "n0"), "nodes[2].name: 'n0' is already the name of nodes[0]"),
    "unknown field": (
        change("bandwith_bytes", 3),
        "bandwith_bytes: unknown field; did you mean 'bandwidth_bytes_per_s'?",
    ),
    "unknown node field": (change("nodes.1.gpus", 3), "nodes[1].gpus: unknown field; known here: name"),
    "misspelled optional field": (
        change("nodes.1.device", 2),
        "nodes[1].device: unknown field; did you mean 'devices'",
    ),
    "field of a node": (change("devices", 2), "devices: is a field of nodes, each has its own: move it to nodes[0]."),
    "missing field": (change("nodes.1.memory_bytes", ...), "nodes[1].memory_bytes: missing"),
    "no memory": (change("nodes.1.memory_bytes", 0), "nodes[1].memory_bytes: 0 is out of range; give 1 to 9,007"),
    "half a byte": (change("nodes.1.memory_bytes", 10.5), "nodes[1].memory_bytes: expected a whole number"),
    "text for number": (change("nodes.1.flops_per_s", "fast"), "nodes[1].flops_per_s: expected a number"),
    "true for number": (change("hop_overhead_s", True), "hop_overhead_s: expected a number, found true or false"),
    "text in matrix": (change("latency_s.0.1", "1"), "latency_s[0][1]: expected a number"),
    "null": (change("nodes.0.location", None), "nodes[0].location: expected a text"),
    "surrogate": (change("nodes.0.location", "\ud800"), "nodes[0].location: '\\ud800' has characters that cannot"),
    "escape in name": (change("name", "\x1b[31mred"), "name: '\\x1b[31mred' has characters that cannot be printed"),
    "astronomic memory": (
        change("nodes.1.memory_bytes", 10**40),
        "nodes[1].memory_bytes: a number of some 41 digits",
    ),
    "null overhead": (change("hop_overhead_s", None), "hop_overhead_s: expected a number, found null"),
    "two files or one": (
        change("nodes.2.name", "N0"),
        "nodes[2].name: 'N0' and 'n0', the name of nodes[0].name,",
    ),
    "a way to elsewhere": (change("nodes.1.name", "../n1"), "nodes[1].name: '../n1' would be a way to another folder"),
    "newline in name": (change("nodes.0.name", "a\nb"), "nodes[0].name"),
    "no device": (change("nodes.1.devices", 0), "nodes[1].devices: 0 is out of range; give 1 to 64"),
    "unknown mode": (
        change("nodes.1.device_mode", "half"),
        "nodes[1].device_mode: 'half' is none of replicas",
    ),
    "newer version": (change("version", 4), "version: version 4 is not known here; this release reads 1 and 2 and 3"),
    "another kind of file": (change("format", "skippipe-plan"), "format: this is a 'skippipe-plan' file"),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_files_are_named_in_one_line(kind: str, tmp_path: Path) -> None:
    spoil, message = BAD[kind]
    raw = uniform_cluster(3).to_json()
    spoil(raw)
    file = tmp_path / "bad.json"
    file.write_text(json.dumps(raw))
    with pytest.raises(UserError) as caught:
        Cluster.load(file)
    assert str(caught.value).startswith(f"{file}: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not valid JSON"),
        ("[]", "expected an object"),
        ('{"format": "skippipe-cluster", "format": "x"}', "'format' is given twice"),
        ("[" * 100_000, "not valid JSON"),
        ('{"version": ' + "9" * 5000 + "}", "not valid JSON"),
        ("[]", "the file: expected an object"),
    ],
)
def test_files_that_are_no_clusters_at_all(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "bad.json"
    file.write_text(text)
    with pytest.raises(UserError, match=message):
        Cluster.load(file)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file"):
        Cluster.load(tmp_path / "none.json")
    with pytest.raises(UserError, match="this is a folder"):
        Cluster.load(tmp_path)


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("nodes", [1, 2, 13, 40])
def test_presets_of_any_size(name: str, nodes: int) -> None:
    cluster = preset(f"{name}:{nodes}")
    assert len(cluster) == nodes
    assert cluster.doubts == []
    jsonschema.validate(json.loads(json_text(cluster.to_json())), SCHEMA)


def test_figures_in_another_unit_are_doubted() -> None:
    nodes = tuple(Node(name, "here", 312, 24) for name in "ab")
    cluster = Cluster("ours", nodes, np.full((2, 2), 67.0), np.full((2, 2), 900.0))
    assert cluster.doubts == [
        "latency_s: 67 seconds from 'a' to 'b'; or are these milliseconds?",
        "bandwidth_bytes_per_s: 900 bytes a second from 'a' to 'b'; or are these Mbit/s?",
        "flops_per_s: 312 of 'a'; or are these TFLOP/s?",
        "memory_bytes: 24 of 'a'; or are these GiB?",
    ]


def test_regions_are_the_published_ones_with_the_slip_corrected() -> None:
    cluster = regions(12)
    nl, london = cluster.number["nl-0"], cluster.number["london-0"]
    assert cluster.bandwidth_bytes_per_s[nl, london] == pytest.approx(0.2425 * 2**30)
    assert [node.location for node in cluster.nodes][:3] == ["Belgium", "Canada", "Germany"]


def test_random_clusters_are_unequal_and_repeatable() -> None:
    cluster = random_cluster(20, seed=7)
    assert cluster == random_cluster(20, seed=7)
    assert cluster != random_cluster(20, seed=8)
    assert len({node.flops_per_s for node in cluster.nodes}) > 10
    assert len({node.memory_bytes for node in cluster.nodes}) > 1
    assert not np.allclose(cluster.bandwidth_bytes_per_s, cluster.bandwidth_bytes_per_s.T)


def test_homes_are_limited_by_their_lines() -> None:
    cluster = preset("homes:20:7")
    assert cluster == preset("homes:20:7") != preset("homes:20")
    for node in cluster.nodes:
        assert node.upload_bytes_per_s is not None and node.download_bytes_per_s is not None
        assert 20e6 / 8 <= node.upload_bytes_per_s <= 200e6 / 8
        assert 2 <= node.download_bytes_per_s / node.upload_bytes_per_s <= 10
    for sender, receiver in permutations(cluster.nodes, 2):
        _, bandwidth = cluster.hop(sender.name, receiver.name)
        assert bandwidth == min(sender.upload_bytes_per_s or 0, receiver.download_bytes_per_s or 0)


@pytest.mark.parametrize(
    "text", ["homes:3:4:5", "mars:3", "regions:0", "regions:x", "regions:3:4", "random:3:4:5", "random:-3"]
)
def test_presets_that_do_not_exist(text: str) -> None:
    with pytest.raises(UserError):
        preset(text)


@given(clusters(), st.data())
def test_what_goes_through_a_relay_at_once_is_no_more_than_it_carries(cluster: Cluster, drawn: st.DataObject) -> None:
    """Whatever links send at one time, at their full rate or that of their sender; links to others stay as they are."""
    among = drawn.draw(st.sets(st.integers(0, len(cluster) - 1)), label="nodes")
    rate = drawn.draw(st.floats(1e3, 1e9), label="rate")
    pairs = {frozenset(pair) for pair in combinations(among, 2)}
    found, carried = with_relay(cluster, pairs, rate), 0.0
    for a, b in permutations(range(len(cluster)), 2):
        before, after = (float(each.bandwidth_bytes_per_s[a, b]) for each in (cluster, found))
        assert after <= before and (after == before or {a, b} <= among)
    for a in among:
        out = sum(float(found.bandwidth_bytes_per_s[a, b]) for b in among - {a})
        carried += min(out, found.nodes[a].upload_bytes_per_s or inf)
        if any(cluster.bandwidth_bytes_per_s[a, b] for b in set(range(len(cluster))) - among):
            assert found.nodes[a] == cluster.nodes[a], "its upload is for other links, too"
    assert len(among) < 2 or carried <= max(rate, len(among)) * (1 + 1e-9)
    assert with_relay(found, pairs, rate) == found


def test_what_some_cannot_send_through_a_relay_is_for_the_others() -> None:
    """Three nodes with uploads of 2, 20 and 100 bytes a second, and a relay that carries 62."""
    every = np.full((3, 3), 1000.0)
    nodes = tuple(Node(f"n{each}", "here", 1e9, 2**30, upload) for each, upload in enumerate((2.0, 20.0, 100.0)))
    pairs = {frozenset(pair) for pair in combinations(range(3), 2)}
    found = with_relay(Cluster("c", nodes, 0 * every, every), pairs, 62.0)
    assert [node.upload_bytes_per_s for node in found.nodes] == [2.0, 20.0, 40.0]
    wide = with_relay(Cluster("c", nodes, 0 * every, every), pairs, 122.0)
    assert wide == Cluster("c", nodes, 0 * every, every), "it takes all that they can send"
    limited = with_relay(Cluster("c", nodes, 0 * every, every), pairs, inf, 30.0)
    assert [node.upload_bytes_per_s for node in limited.nodes] == [2.0, 20.0, 30.0]


def test_links_through_a_relay_divide_what_it_carries_beside_others() -> None:
    """Of the four nodes one can be called, so the others' uploads are not for the relay alone."""
    rates = np.array([[0, 5, 100, 7], [100, 0, 100, 7], [100, 100, 0, 7], [7, 7, 7, 0]], dtype=float)
    nodes = tuple(Node(f"n{each}", "here", 1e9, 2**30) for each in range(4))
    pairs = {frozenset(pair) for pair in combinations(range(3), 2)}
    found = with_relay(Cluster("c", nodes, 0 * rates, rates), pairs, 120.0).bandwidth_bytes_per_s
    assert found.tolist() == [[0, 5, 35, 7], [20, 0, 20, 7], [20, 20, 0, 7], [7, 7, 7, 0]]
