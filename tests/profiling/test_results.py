"""Several measurements of the same nodes and links: put together, doubted, kept in a file."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given

from skippipe.cluster import Cluster
from skippipe.errors import UserError
from skippipe.profiling.estimators import STEADY, LinkEstimate, NodeEstimate
from skippipe.profiling.results import (
    KEPT,
    ProfileResult,
    load_results,
    merge_results,
    outliers,
    results_file,
    save_results,
)
from tests.helpers.plans import clusters
from tests.helpers.profiling import agrees


def result(
    when: str = "1", flops: float = 1e9, bandwidth: float = 1e6, latency_s: float = 0.01, **others: Any
) -> ProfileResult:
    nodes = {name: NodeEstimate("here", 2**30, flops, 0.1, 0.2) for name in ("a", "b")}
    link = LinkEstimate(latency_s, bandwidth)
    return replace(ProfileResult(when, "w", nodes, {("a", "b"): link, ("b", "a"): link}), **others)


def test_results_are_merged_by_medians() -> None:
    cluster = merge_results([result(bandwidth=1e6), result(bandwidth=9e9, flops=2e9), result(bandwidth=1.2e6)], "three")
    assert cluster.bandwidth_bytes_per_s[0, 1] == 1.2e6
    assert cluster.nodes[0].flops_per_s == 1e9
    shaky = {("a", "b"): LinkEstimate(0.5, 5e3, 2 * STEADY)}
    cluster = merge_results([result(), result(links=shaky)], "one of them unsteady")
    assert cluster.bandwidth_bytes_per_s[0, 1] == 1e6
    assert cluster.latency_s[0, 1] == 0.01
    assert merge_results([result(links=shaky)], "better than none").bandwidth_bytes_per_s[0, 1] == 5e3


def test_the_newest_word_on_who_is_there() -> None:
    cut = result("2", links={("a", "b"): None}, nodes={}, missing=("c",))
    of_c = ProfileResult("1", "w", {"c": NodeEstimate("there", 1, 1.0)}, {})
    cluster = merge_results([result(), of_c, cut], "cut")
    assert [node.name for node in cluster.nodes] == ["a", "b"]
    assert cluster.bandwidth_bytes_per_s.tolist() == [[0, 0], [1e6, 0]]
    assert merge_results([cut, result("3")], "again").bandwidth_bytes_per_s[0, 1] == 1e6
    with pytest.raises(UserError, match="no node has been measured"):
        merge_results([cut], "nobody")


def test_speeds_of_other_work_are_left_alone() -> None:
    cluster = merge_results([result(flops=5e9, work="another model"), result()], "two models")
    assert cluster.nodes[0].flops_per_s == 1e9
    assert not outliers([result(flops=5e9, work="another model"), result()])


def test_outliers_are_named() -> None:
    assert not outliers([result(), result()])
    assert outliers([result(), result(latency_s=0.0104, bandwidth=1.2e6)]) == []
    far = outliers([result(), result(), result(flops=3e9, bandwidth=2e5, latency_s=0.1)])
    assert far == [
        "'a' computes 3e+09 operations a second, 1e+09 before",
        "'b' computes 3e+09 operations a second, 1e+09 before",
        "'a' to 'b': 0.2 MB/s, 1 MB/s before",
        "'a' to 'b': latency 100 ms, 10 ms before",
        "'b' to 'a': 0.2 MB/s, 1 MB/s before",
        "'b' to 'a': latency 100 ms, 10 ms before",
    ]
    shaky = result(links={("a", "b"): LinkEstimate(0.01, 1e6, 0.5)}, nodes={"a": NodeEstimate("", 1, 1.0, spread=0.4)})
    assert [line.split(":")[0] for line in outliers([shaky])] == ["'a'", "'a' to 'b'"]


@given(clusters())
def test_a_cluster_file_is_a_result_too(cluster: Cluster) -> None:
    again = merge_results([ProfileResult.of_cluster(cluster)], cluster.name)
    assert again.nodes == cluster.nodes
    agrees(again, replace(cluster, latency_s=cluster.latency_s + cluster.hop_overhead_s, hop_overhead_s=0), 1e-9, 0)


def test_rates_are_merged_from_those_that_measured_them() -> None:
    def limited(upload: float | None) -> ProfileResult:
        return result(nodes={"a": NodeEstimate("here", 1, 1.0, upload_bytes_per_s=upload)})

    def merged(*uploads: float | None) -> float | None:
        return merge_results([limited(each) for each in uploads], "a").nodes[0].upload_bytes_per_s

    assert merged(None) is merged(inf) is merged(None, inf) is merged(inf, 5e6, inf) is None
    assert merged(None, 5e6, None) == merged(5e6, inf) == merged(7e6, 5e6, 4e6) == 5e6
    assert outliers([limited(5e6), limited(6e6)]) == outliers([limited(None), limited(6e6)]) == []
    assert outliers([limited(inf), limited(6e6)]) == ["'a' sends 6 MB/s at once, whatever its links carry before"]


def test_results_go_to_a_file_and_back(tmp_path: Path) -> None:
    file = tmp_path / "cluster.json"
    assert load_results(file) == []
    shaky = result("9", links={("a", "b"): LinkEstimate(0.1, 2.0, 0.3), ("b", "a"): None}, missing=("c",))
    lines = {"a": NodeEstimate("", 1, 1.0, 0.1, 0.2, 0.0, 5e6, inf), "b": NodeEstimate("", 1, 1.0)}
    shaky = replace(shaky, nodes={name: replace(node, location="here") for name, node in lines.items()})
    several = [*(result(str(when)) for when in range(KEPT)), shaky]
    save_results(file, several)
    assert results_file(file).name == "cluster.profile.json"
    assert load_results(file) == several[1:], "the newest are kept"
    results_file(file).write_text(results_file(file).read_text().replace('"b", "a"', '"b"'))
    with pytest.raises(UserError, match=r"cluster\.profile\.json: surveys\[0\]\.links\[1\]: expected a list of 5"):
        load_results(file)
