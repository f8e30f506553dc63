"""The key of a cached plan changes with everything a plan depends on, and with nothing else."""
from __future__ import annotations

import logging
import shutil
from dataclasses import replace

import pytest
import torch
from torch import nn

import autoshard
from autoshard.base.precision import Precision
from autoshard.cost import cluster as clusters
from autoshard.cost.cluster import Cluster, load_cluster
from autoshard.decide.options import Options, Passing, Running
from autoshard.decide.pipeline_options import Pipeline
from autoshard.runtime.cache import planner_key, source_digest

OTHER = {"optimizer": "sgd", "precision": Precision("bf16"), "seeds": {"0.weight": "dp,-"}, "passing": Passing("local"),
         "memory_budget": 1e9, "time_limit": 5.0, "search": "milp", "fallback": "replicate", "offload": "optimizer", "pipeline": Pipeline(2),
         "expert_capacity": 1.5, "pad": "all", "thorough": True, "refine_axes": "auto"}
PASSING = {"inputs": "local", "outputs": "dtensor", "batch_axes": ("dp",)}


def leaves(data, path=()):
    """(path, number) of every number of a snapshot."""
    if isinstance(data, dict):
        items = data.items()
    elif isinstance(data, (list, tuple)):
        items = enumerate(data)
    else:
        return [(path, data)] if isinstance(data, (int, float)) and not isinstance(data, bool) else []
    return [leaf for key, value in items for leaf in leaves(value, (*path, key))]


def changed(data, path):
    if not path:
        return data * 0.999
    items = dict(data) if isinstance(data, dict) else list(data)
    items[path[0]] = changed(items[path[0]], path[1:])
    return items


class Numbers:
    """As much of a profile as the key reads."""

    name = "x"

    def __init__(self, data):
        self.data = data

    def snapshot(self):
        return self.data


@pytest.mark.parametrize("name", clusters.available())
def test_every_number_of_a_profile_counts(name):
    data = load_cluster(name).snapshot()
    paths = [path for path, value in leaves(data) if value]
    keys = {planner_key(Options(), Numbers(changed(data, path))) for path in paths}
    assert len(paths) > 10 and len(keys) == len(paths) and planner_key(Options(), Numbers(data)) not in keys
    assert planner_key(Options(), Cluster.from_snapshot(data)) == planner_key(Options(), load_cluster(name))


def test_every_option_counts_but_the_path_of_the_profile():
    assert set(OTHER) | {"cluster", "running"} == set(Options.__dataclass_fields__), "a new option needs a line above"
    profile = load_cluster("cpu-gloo")
    keys = {planner_key(replace(Options(), **{name: value}), profile) for name, value in OTHER.items()}
    keys |= {planner_key(Options(passing=Passing(**{name: value})), profile) for name, value in PASSING.items()}
    assert len(keys | {planner_key(Options(), profile)}) == len(OTHER) + len(PASSING)  # Passing("local") is in both
    assert set(PASSING) == set(Passing.__dataclass_fields__), "a new option needs a line above"
    running = Running(backend="inductor", check_inputs="never", checkpoint="a", timeout=1.0)
    assert planner_key(Options(running=running), profile) == planner_key(Options(), profile), "how a plan is run does not change it"
    assert planner_key(Options(cluster="a.toml"), profile) == planner_key(Options(cluster="/b.toml"), profile)
    same = (Options(seeds={"a": ("dp", None), "b": "-"}), Options(seeds={"b": "-", "a": "dp, -"}))
    assert planner_key(same[0], profile) == planner_key(same[1], profile)


def test_the_code_counts(tmp_path):
    package = tmp_path / "a"
    (package / "rules").mkdir(parents=True)
    (package / "rules" / "view.py").write_text("x = 1\n")
    first = source_digest(package)
    shutil.copytree(package, tmp_path / "b")
    assert source_digest(tmp_path / "b") == first, "where the package lies does not matter"
    (tmp_path / "b" / "rules" / "view.py").write_text("x = 2\n")
    shutil.copytree(tmp_path / "b", tmp_path / "c")
    (tmp_path / "c" / "rules" / "view.py").rename(tmp_path / "c" / "rules" / "pad.py")
    assert len({first, source_digest(tmp_path / "c")}) == 2
    source_digest.cache_clear()
    assert source_digest(tmp_path / "b") not in (first, source_digest(tmp_path / "c"))


def test_a_recalibrated_profile_takes_effect(tmp_path, caplog):
    source = next(f for f in (clusters.resources.files("autoshard.cost") / "clusters").iterdir() if f.name == "cpu-gloo.toml")
    profile = tmp_path / "my.toml"
    text = source.read_text()
    line = next(x for x in text.splitlines() if x.startswith("kernel_overhead"))
    slow = line.replace(line.split("value = ")[1].split(",")[0], "0.5")

    def objective():
        caplog.clear()
        model = autoshard.compile(nn.Linear(4, 4), "one=1", (torch.ones(2, 4),), loss_fn=None, cluster=str(profile), cache=tmp_path / "plans")
        return model.plan.objective_s, model.plan.cluster["device"]["kernel_overhead"], "from the cache" in caplog.text

    with caplog.at_level(logging.INFO, "autoshard"):
        profile.write_text(text)
        first = objective()
        assert not first[2] and objective() == (*first[:2], True)
        profile.write_text(text.replace(line, slow))
        assert objective()[1:] == (0.5, False) and objective()[0] > 1000 * first[0]


def test_a_profile_that_changes_before_the_first_call_is_not_mixed_up(tmp_path):
    source = (clusters.resources.files("autoshard.cost") / "clusters" / "cpu-gloo.toml").read_text()
    profile, line = tmp_path / "my.toml", next(x for x in source.splitlines() if x.startswith("kernel_overhead"))
    profile.write_text(source)
    model = autoshard.compile(nn.Linear(4, 4), "one=1", cluster=str(profile), cache=tmp_path / "plans")
    profile.write_text(source.replace(line, line.replace(line.split("value = ")[1].split(",")[0], "0.5")))
    model(torch.ones(2, 4))
    assert model.plan.cluster["device"]["kernel_overhead"] != 0.5
