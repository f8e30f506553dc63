"""Profiles: schema, snapshots, and which links a mesh axis uses."""
import json
import re
import shutil
from dataclasses import replace
from importlib import resources
from pathlib import Path

import pytest
import torch

from autoshard.base.mesh import parse_mesh
from autoshard.cost.cluster import Cluster, available, load_cluster
from autoshard.errors import ClusterError
from autoshard.rules.family import PRICED


def text_of(name):
    return resources.files("autoshard.cost").joinpath("clusters", f"{name}.toml").read_text()


def load_text(tmp_path, text):
    path = tmp_path / "mine.toml"
    path.write_text(text)
    return load_cluster(path)


def test_the_three_profiles_are_there():
    assert {"h100-dgx", "a100-dgx", "cpu-gloo"} <= set(available())


@pytest.mark.parametrize("name", available())
def test_profile_is_sane_and_survives_a_snapshot(name):
    c = load_cluster(name)
    assert c.name == name
    assert dict(c.device.efficiency).keys() == set(PRICED)
    assert c.device.peak_flops(torch.bfloat16) >= c.device.peak_flops(torch.float32) >= c.device.peak_flops(torch.float64)
    assert c.device.peak_flops(torch.int64) == c.device.peak_flops(torch.float32)
    for inner, outer in zip(c.links, c.links[1:], strict=False):
        assert inner.bus_bandwidth > outer.bus_bandwidth and inner.latency <= outer.latency
        assert inner.overhead <= outer.overhead
    optional = sum((l.devices < 1e18) + (l.oversubscription != 1) + 2 * (l.in_network is not None) + len(l.measured)
                   for l in c.links) + len(c.device.measured) + 2 * (c.device.host_link is not None)
    optional += len(c.device.bandwidth_efficiency) + (c.device.multiprocessors is not None) + (c.device.launch is not None)
    assert len(c.sources) == len(c.device.peak) + len(PRICED) + 3 + 4 * len(c.links) + 2 + optional and all(len(s) > 8 for _, s in c.sources)
    snapshot = json.loads(json.dumps(c.snapshot()))
    assert Cluster.from_snapshot(snapshot) == c
    assert Cluster.from_snapshot(snapshot).snapshot() == c.snapshot()


def test_h100_numbers_are_those_of_the_data_sheet():
    c = load_cluster("h100-dgx")
    assert c.device.peak_flops(torch.bfloat16) == 989.4e12
    assert c.device.memory_bandwidth == 3.35e12
    assert [(l.name, l.bandwidth) for l in c.links] == [("nvlink", 450e9), ("infiniband", 50e9)]
    assert c.device.host_link.bandwidth < 63e9, "PCIe 5.0 x16"
    assert load_cluster("cpu-gloo").device.host_link is None


def test_own_profile_by_path(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(text_of("h100-dgx").replace('name = "h100-dgx"', 'name = "mine"'))
    assert load_cluster(path) == replace(load_cluster("h100-dgx"), name="mine")
    assert load_cluster(str(path)).name == "mine"
    bare = shutil.copy(path, tmp_path / "without_suffix")
    assert load_cluster(bare).name == "mine"


def test_unknown_profile_names_the_nearest():
    with pytest.raises(ClusterError, match="did you mean h100-dgx"):
        load_cluster("h100")
    with pytest.raises(ClusterError, match="cannot read cluster profile nothing.toml"):
        load_cluster("nothing.toml")


BROKEN = [
    ("version = 1\n", "version = 2\n", "version is not 1"),
    ("version = 1\n", "", "version is missing"),
    ("{ value = 3.35e12, source = \"NVIDIA H100 data sheet: 3.35 TB/s\" }", "3.35e12", "memory_bandwidth is a bare number"),
    (", source = \"NVIDIA H100 data sheet: 3.35 TB/s\"", "", "device.memory_bandwidth has no source"),
    ("source = \"NVIDIA H100 data sheet: 3.35 TB/s\"", "source = \"  \"", "device.memory_bandwidth has no source"),
    ("value = 3.35e12", "value = -3.35e12", "device.memory_bandwidth is -33500"),
    ("value = 3.35e12", "value = nan", "device.memory_bandwidth is nan"),
    ("value = 3.35e12", "value = inf", "device.memory_bandwidth is inf"),
    ("value = 3.35e12", "value = \"fast\"", "memory_bandwidth is 'fast'; a positive number is needed"),
    ("value = 3.35e12", "value = true", "memory_bandwidth is True"),
    ("value = 0.70", "value = 1.7", "matmul is 1.7; a fraction"),
    ("value = 0.70", "value = 0.0", "matmul is 0.0; a fraction"),
    ("matmul = ", "matmull = ", "matmul is missing"),
    ("eta = ", "etta = ", "eta is missing"),
    ("float32 = ", "float33 = ", "peak.float32 is missing"),
    ("memory_capacity = ", "memory_capasity = ", "memory_capacity is missing"),
    ("[links.in_network]", "[links.in_netwrk]", "did you mean in_network"),
    ("[links.in_network]", "[links.measured]", r"links\[0\].measured.overhead is 9.5e-05; a list is needed"),
    ("value = 275e9", "value = 480e9", "in_network.bandwidth is above the link's bandwidth"),
    ("value = 56.7e9", "value = 0.0", "device.host_link.bandwidth is 0"),
    ("[device.host_link]", "[device.host_lnk]", "device.host_lnk is not a key; did you mean host_link"),
    ("version = 1\n", "version = 1\nextra = true\n", "extra is not a key; remove it"),
    ("[[links]]", "[[link]]", "a list is needed"),
    ("[overlap]", "[overlop]", "overlap is missing"),
    ("value = 8, source", "value = 0, source", "links\\[0\\].devices is 0"),
    ("version = 1", "version = = 1", "not TOML"),
]


@pytest.mark.parametrize("old, new, message", BROKEN, ids=[m for *_, m in BROKEN])
def test_broken_profiles_name_the_number(tmp_path, old, new, message):
    text = text_of("h100-dgx")
    assert old in text, f"the profile no longer holds {old!r}"
    with pytest.raises(ClusterError, match=message):
        load_text(tmp_path, text.replace(old, new))


def test_links_must_be_listed_innermost_first(tmp_path):
    parts = text_of("h100-dgx").split("[[links]]")
    tail, overlap = parts[2].split("[overlap]")
    swapped = parts[0] + "[[links]]" + tail + "[[links]]" + parts[1] + "[overlap]" + overlap
    with pytest.raises(ClusterError, match="innermost first"):
        load_text(tmp_path, swapped)


def test_broken_snapshots_are_refused():
    snapshot = load_cluster("a100-dgx").snapshot()
    for broken in ({}, {**snapshot, "links": []}, {**snapshot, "version": 0}, {**snapshot, "speed": 1},
                   {**snapshot, "device": {**snapshot["device"], "memory_bandwidth": 0}}, {**snapshot, "links": [3]}):
        with pytest.raises(ClusterError):
            Cluster.from_snapshot(broken)


NV, IB = "nvlink", "infiniband"


@pytest.mark.parametrize("mesh, levels", [
    ("8", [[(NV, 8)]]),
    ("1", [[]]),
    ("2x4", [[(NV, 2)], [(NV, 4)]]),
    ("2x8", [[(IB, 2)], [(NV, 8)]]),
    ("8x8", [[(IB, 8)], [(NV, 8)]]),
    ("16", [[(NV, 8), (IB, 2)]]),
    ("4x4", [[(NV, 2), (IB, 2)], [(NV, 4)]]),
    ("2x4x8", [[(IB, 2)], [(IB, 4)], [(NV, 8)]]),
    ("64x1", [[(NV, 8), (IB, 8)], []]),
    ("3x3", [[(IB, 3)], [(IB, 3)]]),  # threes straddle nodes of eight
    ("7", [[(NV, 7)]]),
])
def test_links_of_axes_on_nodes_of_eight(mesh, levels):
    links = load_cluster("h100-dgx").links_for(parse_mesh(mesh))
    assert [[(l.name, n) for l, n in axis.levels] for axis in links] == levels
    assert tuple(axis.size for axis in links) == parse_mesh(mesh).sizes


@pytest.mark.parametrize("mesh, axes, levels", [
    ("8x8", (0, 1), [(NV, 8), (IB, 8)]), ("4x4", (0, 1), [(NV, 8), (IB, 2)]), ("2x2", (0, 1), [(NV, 4)]), ("2x4x8", (0, 1), [(IB, 8)]),
    ("4x2x4", (0, 2), [(NV, 4), (IB, 4)]), ("1x4", (0, 1), [(NV, 4)]), ("2x4", (1,), [(NV, 4)])])
def test_links_of_axes_taken_as_one(mesh, axes, levels):
    axis = load_cluster("h100-dgx").link_of(parse_mesh(mesh), axes)
    assert [(l.name, n) for l, n in axis.levels] == levels


def test_mesh_larger_than_the_cluster_is_refused():
    c = load_cluster("h100-dgx")
    node = replace(c, links=c.links[:1])
    assert node.links_for(parse_mesh("2x4"))[0].size == 2
    with pytest.raises(ClusterError, match="needs 16 devices, cluster h100-dgx has 8"):
        node.links_for(parse_mesh("2x8"))


def test_the_documented_profile_loads(tmp_path):
    page = Path(__file__).parents[2] / "docs" / "add-a-cluster.md"
    c = load_text(tmp_path, page.read_text().split("```toml\n")[1].split("```")[0])
    assert (c.name, c.limit, [link.devices for link in c.links]) == ("mine", 8, [4, 8])


SOURCED = re.compile(r"\{ value = (.*?), source = \".*\" \}")


def test_one_source_at_the_top_is_that_of_every_bare_number(tmp_path):
    bare = SOURCED.sub(r"\1", text_of("h100-dgx"))
    with pytest.raises(ClusterError, match="is a bare number.*one source"):
        load_text(tmp_path, bare)
    c = load_text(tmp_path, 'source = "measured today"\n' + bare)
    assert c == load_cluster("h100-dgx") and {s for _, s in c.sources} == {"measured today"} and len(c.sources) == len(load_cluster("h100-dgx").sources)
    own = bare.replace("memory_bandwidth = 3.35e12", 'memory_bandwidth = { value = 3.35e12, source = "its data sheet" }')
    assert dict(load_text(tmp_path, 'source = "measured today"\n' + own).sources)["device.memory_bandwidth"] == "its data sheet"
    for empty in ('""', "3"):
        with pytest.raises(ClusterError, match="is a bare number"):
            load_text(tmp_path, f"source = {empty}\n{bare}")


@pytest.mark.parametrize("where, points, message", [
    ("device", {"matmul": [[1, 2]]}, "measured.*matmul.*: a list of at least two"),
    ("device", {"matmul": [[1, 2], [1, 3]]}, "amounts must not be negative and must increase"),
    ("device", {"matmul": [[1, 2], [2, 1]]}, "seconds must be positive and must not fall"),
    ("device", {"matmul": [[1, 2], [2]]}, r"measured.matmul\[1\] is \[2\]; a list of 2 is needed"),
    ("device", {"matmul": 3.0}, "measured.matmul is 3.0; a list is needed"),
    ("device", {"matmul": [[1, 2], [3, float("nan")]]}, r"measured.matmul\[1\]\[1\] is nan; a finite number is needed"),
    ("device", {"matmul": [[1, "2"], [2, 3]]}, r"measured.matmul\[0\]\[1\] is '2'; a finite number is needed"),
    ("device", {"matmull": [[1, 2], [2, 3]]}, "has a curve for 'matmull'; name an op"),
    ("link", {"all_gathr": [[1, 2], [2, 3]]}, r"links\[0\].measured.all_gathr is not a key; did you mean all_gather\?"),
])
def test_measured_curves_are_checked(where, points, message):
    data = load_cluster("h100-dgx").snapshot()
    (data["device"] if where == "device" else data["links"][0])["measured"] = points
    with pytest.raises(ClusterError, match=message):
        Cluster.from_snapshot(data)
