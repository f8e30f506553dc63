"""Profiles with other numbers: what is changed, what changes with it, and what is refused."""
from __future__ import annotations

from dataclasses import replace

import pytest

from autoshard.base.mesh import parse_mesh
from autoshard.collectives import seconds
from autoshard.cost.change import changeable, changed
from autoshard.cost.cluster import available, load_cluster
from autoshard.errors import ClusterError, UsageError

H100 = load_cluster("h100-dgx")
SECONDS = ((1e3, 1e-4), (1e6, 1.1e-3), (2e6, 2.1e-3))


@pytest.mark.parametrize("name", available())
def test_a_change_to_the_same_number_changes_nothing(name):
    cluster = load_cluster(name)
    for path in changeable(cluster):
        assert replace(changed(cluster, path, lambda number: number), name=name) == cluster, path


@pytest.mark.parametrize("path, read", [
    ("device.memory_bandwidth", lambda c: c.device.memory_bandwidth), ("device.peak.bfloat16", lambda c: c.device.peak["bfloat16"]),
    ("device.host_link.bandwidth", lambda c: c.device.host_link.bandwidth), ("links.infiniband.latency", lambda c: c.links[1].latency),
    ("links.nvlink.bandwidth", lambda c: c.links[0].in_network.bandwidth)])
def test_the_number_at_the_path_is_the_one_that_changes(path, read):
    assert read(changed(H100, path, lambda number: 1.5 * number)) == 1.5 * read(H100)
    others = {"device.memory_capacity", "device.efficiency", "device.host_link.latency", "links.infiniband.bandwidth", "overlap.eta"}
    assert all(read(changed(H100, other, lambda number: 0.9 * number)) == read(H100) for other in others)


def test_a_table_changes_as_one():
    twice = changed(H100, "device.peak", lambda number: 2 * number).device.peak
    assert twice == {dtype: 2 * peak for dtype, peak in H100.device.peak.items()}


def test_a_measured_curve_follows_the_bandwidth_it_stands_for():
    link = replace(H100.links[0], in_network=None, measured={"all_gather": SECONDS})
    slow = replace(H100, links=(link, H100.links[1]))
    fast = changed(slow, "links.nvlink.bandwidth", lambda number: 2 * number)
    before, axis = (c.links_for(parse_mesh("tp=8"))[0] for c in (slow, fast))
    fixed = seconds("all_gather", 8, before)
    for nbytes in (1e5, 1e6, 1e8):
        assert seconds("all_gather", nbytes, axis) - fixed == pytest.approx((seconds("all_gather", nbytes, before) - fixed) / 2)
    with pytest.raises(ClusterError, match=r"links.nvlink.efficiency plays no part"):
        changed(slow, "links.nvlink.efficiency", lambda number: 0.5 * number)


def test_curves_of_ops_follow_the_peak_or_the_memory():
    device = replace(H100.device, measured={"matmul/bfloat16": SECONDS, "matmul/float32": SECONDS, "pointwise": SECONDS})
    measured = replace(H100, device=device)
    half = tuple((amount, 1e-4 + (s - 1e-4) / 2) for amount, s in SECONDS)  # the very sum that is computed
    compute = changed(measured, "device.peak.bfloat16", lambda number: 2 * number).device.measured
    assert compute["matmul/bfloat16"] == half and compute["matmul/float32"] == compute["pointwise"] == SECONDS
    memory = changed(measured, "device.memory_bandwidth", lambda number: 2 * number).device.measured
    assert memory["pointwise"] == half and memory["matmul/float32"] == SECONDS
    with pytest.raises(ClusterError, match="device.kernel_overhead plays no part where ops are measured"):
        changed(measured, "device.kernel_overhead", lambda number: 2 * number)


@pytest.mark.parametrize("path, meant", [("links.infinband.bandwith", "links.infiniband.bandwidth"), ("device.flops", "device.peak"),
                                         ("links.ethernet.latency", "links.nvlink.latency"), ("device.peak.int4", "device.peak")])
def test_an_unknown_path_is_answered_with_those_there_are(path, meant):
    with pytest.raises(UsageError, match="no number of cluster h100-dgx") as error:
        changed(H100, path, lambda number: number)
    assert meant in str(error.value).partition("There are")[0] and "overlap.eta" in str(error.value)


def test_numbers_stay_physical():
    with pytest.raises(ClusterError, match=r"links\[0\].efficiency is 1.64"):
        changed(H100, "links.nvlink.efficiency", lambda number: 2 * number)
    with pytest.raises(ClusterError, match="device.memory_bandwidth would be -1"):
        changed(H100, "device.memory_bandwidth", lambda number: -1.0)
    assert changed(H100, "overlap.eta", lambda number: 0.0).overlap.eta == 0.0
