"""Phases are the formula of a collective, taken apart."""
from dataclasses import replace
from math import inf

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autoshard.base.mesh import Mesh, parse_mesh
from autoshard.collectives import KINDS, seconds, wire_bytes
from autoshard.collectives.phases import _PHASES, alone, phases
from autoshard.cost.cluster import Cluster, OneShot, available, load_cluster
from autoshard.errors import ClusterError


def unlimited(c: Cluster) -> Cluster:
    return replace(c, links=(*c.links[:-1], replace(c.links[-1], devices=inf)))


def three_levels() -> Cluster:
    """Two nodes share a switch, of which there are many."""
    c = unlimited(load_cluster("h100-dgx"))
    leaf, spine = replace(c.links[1], name="leaf", devices=16), replace(c.links[1], name="spine", oversubscription=3.0, overhead=9e-5)
    return replace(c, links=(c.links[0], leaf, spine))


def measured(level: int) -> Cluster:
    c = unlimited(load_cluster("h100-dgx"))
    curve = ((0.0, 1e-4), (1e6, 3e-4), (1e8, 9e-3))
    links = list(c.links)
    links[level] = replace(links[level], measured=dict.fromkeys(KINDS, curve))
    return replace(c, links=tuple(links))


def with_kernels() -> Cluster:
    """Small buffers by kernels of one step."""
    c = unlimited(load_cluster("h100-dgx"))
    return replace(c, links=(replace(c.links[0], one_shot=OneShot(5e-6, 512 << 10)), *c.links[1:]))


CLUSTERS = {name: unlimited(load_cluster(name)) for name in available()} | {
    "kernels": with_kernels(), "three": three_levels(), "inner curve": measured(0), "outer curve": measured(1)}
powers = st.integers(0, 6).map(lambda k: 2**k)


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)  # on a busy machine drawing a number may take a second
@given(st.sampled_from(sorted(CLUSTERS)), st.sampled_from(sorted(KINDS)), st.floats(0, 1e12), powers | st.just(3), powers)
def test_they_add_up_to_the_formula(name, kind, nbytes, n, minor):
    axis = CLUSTERS[name].links_for(Mesh(("a", "b"), (n, minor)))[0]
    assert alone(phases(kind, nbytes, axis)) == pytest.approx(seconds(kind, nbytes, axis), rel=1e-12, abs=0)


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_reduce"])
def test_a_ring_sends_what_rings_send(kind):
    """Large buffers, no switch that reduces: n - 1 parts of n, twice for an all_reduce."""
    c = CLUSTERS["a100-dgx"]
    (group,) = phases(kind, 1e9, c.links_for(parse_mesh("a=8"))[0])
    assert [(p.link, p.wire) for p in group] == [("nvlink", pytest.approx(wire_bytes(kind, 1e9, 8)))]
    across = phases(kind, 1e9, c.links_for(parse_mesh("a=16"))[0])
    assert {p.link for g in across for p in g} == {"nvlink", "infiniband"}


@pytest.mark.parametrize("n", [2, 3, 5, 8, 16])
@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_reduce"])
def test_a_ring_is_its_sends(kind, n):
    """Chunk by chunk: a rank sends on what it got in the step before. Beside the call's overhead no tolerance."""
    link = replace(CLUSTERS["a100-dgx"].links[0], devices=inf, in_network=None, one_shot=None, measured={})
    size, chunk = 1e10, 1e10 / n
    at = [0.0] * n
    for _ in range((n - 1) * (2 if kind == "all_reduce" else 1)):
        sent = [t + link.latency + chunk / link.bus_bandwidth for t in at]
        at = [max(sent[r - 1], sent[r]) for r in range(n)]
    axis = replace(CLUSTERS["a100-dgx"], links=(link,)).links_for(Mesh(("a",), (n,)))[0]
    assert seconds(kind, size, axis) == pytest.approx(link.overhead + max(at), rel=1e-12)


def test_a_slower_link_counts_where_it_is_the_slowest():
    """2 nodes: with half of the NVLink bandwidth a flat ring takes as long, as the cards are slower still; with half of the cards' twice as long."""
    (group,) = phases("all_gather", 4e9, CLUSTERS["l40s-ethernet-100g"].links_for(parse_mesh("a=16"))[0])
    fast = {p.link: p.seconds() for p in group}
    slowest = max(fast, key=fast.get)
    assert max(p.seconds(0.5 if p.link != slowest else 1.0) for p in group) <= 2 * fast[slowest]
    assert max(p.seconds(0.5 if p.link == slowest else 1.0) for p in group) == pytest.approx(2 * fast[slowest], rel=1e-3)


def test_shares_may_be_arrays():
    (group,) = phases("all_gather", 1e9, CLUSTERS["a100-dgx"].links_for(parse_mesh("a=8"))[0])
    assert group[0].seconds(np.array([1.0, 0.5]))[1] > 1.9 * group[0].seconds()


def test_a_kind_that_nobody_took_apart_is_on_the_outermost_link(monkeypatch):
    axis = CLUSTERS["h100-dgx"].links_for(parse_mesh("a=16"))[0]
    monkeypatch.delitem(_PHASES, "broadcast")
    ((phase,),) = phases("broadcast", 1e8, axis)
    assert phase.link == "infiniband" and phase.seconds() == pytest.approx(seconds("broadcast", 1e8, axis), rel=1e-12)


def test_nothing_is_sent_alone_and_unknown_kinds_are_refused():
    axis = CLUSTERS["h100-dgx"].links_for(parse_mesh("a=1"))[0]
    assert phases("all_reduce", 1e6, axis) == () == phases("all_reduce", 0, CLUSTERS["h100-dgx"].links_for(parse_mesh("a=8"))[0])
    with pytest.raises(ClusterError, match="no formula for collective 'gossip'"):
        phases("gossip", 1.0, axis)
