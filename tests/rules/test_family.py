"""Families: every rule has one, and a family without numbers of its own is priced like another."""
from dataclasses import replace
from importlib import resources

import pytest
import torch

from autoshard.cost import cluster
from autoshard.cost.cluster import available, load_cluster
from autoshard.cost.compute import op_seconds
from autoshard.cost.curve import Curve
from autoshard.rules import registry
from autoshard.rules.family import PRICED, Facts, Family

F32 = torch.float32


@pytest.fixture
def norms_as_pointwise(monkeypatch):
    """As if norms were a new family that no profile has numbers for."""
    monkeypatch.setitem(vars(Family.NORM), "priced_as", Family.POINTWISE)
    monkeypatch.setattr(cluster, "PRICED", tuple(f for f in PRICED if f is not Family.NORM))


def test_every_rule_has_a_family_that_can_be_priced():
    assert {rule.family for rule in registry.table().values()} == set(Family)
    for name in available():
        device = load_cluster(name).device
        assert all((op_seconds(f, 0, 1e9, F32, device) == 0) == f.free for f in Family)


def test_facts_are_those_of_the_table():
    assert [f.value for f in Family if f.heavy] == ["matmul", "attention", "conv"]
    assert Family.GATHER.main and not Family.GATHER.heavy and not Family.RANDOM.repeatable and Family.VIEW.free
    assert Family("norm") is Family.NORM and f"{Family.NORM}" == "norm" and Facts("a").repeatable


def test_a_family_without_numbers_is_priced_like_another(norms_as_pointwise):
    device = load_cluster("h100-dgx").device
    bare = replace(device, efficiency={k: v for k, v in device.efficiency.items() if k != "norm"})
    assert op_seconds(Family.NORM, 0, 1e9, F32, bare) == op_seconds(Family.POINTWISE, 0, 1e9, F32, bare)
    curve = Curve((1.0, 1e9), (1.0, 2.0))
    assert op_seconds(Family.NORM, 0, 1e9, F32, replace(bare, measured={"pointwise": curve.points})) == 2.0
    both = replace(bare, measured={"norm": Curve((1.0, 1e9), (3.0, 4.0)).points, "pointwise": curve.points})
    assert op_seconds(Family.NORM, 0, 1e9, F32, both) == 4.0, "its own curve comes first"


def test_a_profile_may_leave_it_out_or_have_numbers_all_the_same(norms_as_pointwise, tmp_path):
    text = resources.files("autoshard.cost").joinpath("clusters", "h100-dgx.toml").read_text()
    given = next(line for line in text.splitlines() if line.startswith("norm = "))
    for line, as_pointwise in (("", True), ('norm = { value = 0.125, source = "a test" }', False)):
        path = tmp_path / f"mine-{as_pointwise}.toml"
        path.write_text(text.replace(given, line))
        device = load_cluster(path).device
        assert (device.efficiency_of(Family.NORM) == device.efficiency_of(Family.POINTWISE)) == as_pointwise
        assert as_pointwise or device.efficiency_of(Family.NORM) == 0.125
