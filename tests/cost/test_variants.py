"""Variants of a cluster profile: the machine under other software."""
from dataclasses import replace
from importlib import resources

import pytest

from autoshard.base.mesh import parse_mesh
from autoshard.collectives import RUN, seconds
from autoshard.cost.cluster import Cluster, available, load_cluster
from autoshard.errors import ClusterError

H100 = resources.files("autoshard.cost").joinpath("clusters", "h100-dgx.toml").read_text()


@pytest.mark.parametrize("name", [name for name in available() if "captured" in load_cluster(name).variants])
def test_captured_kernels_are_cheaper_and_all_else_is_equal(name):
    plain, captured = load_cluster(name), load_cluster(f"{name}:captured")
    assert captured.name == f"{name}:captured" and captured.description != plain.description
    assert captured.device.fuses and captured.device.kernel_overhead < plain.device.kernel_overhead
    assert plain.links[0].one_shot is None and captured.links[0].one_shot.overhead < plain.links[0].overhead
    back = replace(captured.device, fuses=False, kernel_overhead=plain.device.kernel_overhead)
    assert back == plain.device and replace(captured.links[0], one_shot=None) == plain.links[0] and captured.links[1:] == plain.links[1:]


def test_every_number_of_a_variant_has_its_source_and_a_plan_can_keep_it():
    captured = load_cluster("h100-dgx:captured")
    sources = dict(captured.sources)
    assert "hazyresearch" in sources["device.kernel_overhead"] and "sglang" in sources["links[0].one_shot.overhead"]
    assert Cluster.from_snapshot(captured.snapshot()) == captured


def test_collectives_through_shared_memory_are_cheaper_and_all_else_is_equal():
    plain, shared = load_cluster("cpu-gloo"), load_cluster("cpu-gloo:shared")
    assert shared.device == plain.device and shared.overlap == plain.overlap
    times = [[seconds(kind, nbytes, c.links_for(parse_mesh("tp=2"))[0]) for kind in RUN for nbytes in (16, 2**14, 2**24)] for c in (shared, plain)]
    assert all(a < b / 3 for a, b in zip(*times, strict=True))


def written(tmp_path, old, new):
    assert old in H100
    path = tmp_path / "mine.toml"
    path.write_text(H100.replace(old, new))
    return str(path)


def test_a_variant_of_a_file(tmp_path):
    path = written(tmp_path, "[variants.captured.device]\n", "[variants.captured.device]\nname = \"mine\"\n")
    assert load_cluster(f"{path}:captured").device.name == "mine" and load_cluster(path).device.name != "mine"


@pytest.mark.parametrize(("old", "new", "words"), [
    ("variants.captured.links.nvlink", "variants.captured.links.nvlnk", "variants.captured.links changes 'nvlnk', and the profile has nvlink, infiniband"),
    ("[variants.captured.device]\n", "[variants.captured.device]\nfuse = true\n", "h100-dgx.toml:captured|fuse"),
    ("[variants.captured.device]\n", "[variants.captured.device]\nlaunch = 1e-6\n", "device.launch is a bare number"),
    ("[variants.captured]\n", "[variants]\nx = 3\n[variants.captured]\n", "not a table of tables"),
])
def test_what_is_wrong_in_a_variant_is_named_even_where_another_is_asked_for(tmp_path, old, new, words):
    with pytest.raises(ClusterError, match=words):
        load_cluster(written(tmp_path, old, new))


@pytest.mark.parametrize(("name", "words"), [("h100-dgx:captred", "did you mean captured"), ("v100-dgx2:captured", "it has none"),
                                             ("h100-dx:captured", "did you mean h100-dgx")])
def test_a_variant_that_is_not_there(name, words):
    with pytest.raises(ClusterError, match=words):
        load_cluster(name)
