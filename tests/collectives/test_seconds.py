"""Properties of the collective formulas over all profiles, and the worked numbers of the docstrings."""
from dataclasses import replace
from math import inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.base.mesh import Mesh, parse_mesh
from autoshard.calibrate.fit import bounded
from autoshard.collectives import KINDS, ring_steps, seconds, wire_bytes
from autoshard.cost.cluster import AxisLink, OneShot, available, load_cluster
from autoshard.cost.curve import Curve
from autoshard.errors import ClusterError


def unlimited(c):
    """The cluster with as many nodes (or cards on its last link) as a test likes."""
    return replace(c, links=(*c.links[:-1], replace(c.links[-1], devices=inf)))


def with_kernels(c):
    """Small buffers inside a node by kernels that reach into peers' memory."""
    return replace(c, links=(replace(c.links[0], one_shot=OneShot(5e-6, 512 << 10)), *c.links[1:]))


CLUSTERS = {name: unlimited(load_cluster(name)) for name in available()}
CLUSTERS["kernels"] = with_kernels(CLUSTERS["h100-dgx"])
SIZES = st.floats(min_value=0, max_value=1e12, allow_nan=False)
profiles = st.sampled_from(sorted(CLUSTERS))
kinds = st.sampled_from(sorted(KINDS))
powers = st.integers(0, 9).map(lambda k: 2**k)


def axis_of(name, n, minor=1):
    """The link of an axis of n ranks that has `minor` ranks per step."""
    return CLUSTERS[name].links_for(Mesh(("a", "b"), (n, minor)))[0]


@given(profiles, kinds, SIZES, powers)
def test_one_rank_is_free(name, kind, nbytes, minor):
    assert seconds(kind, nbytes, axis_of(name, 1, minor)) == 0


@given(profiles, kinds, SIZES, SIZES, st.integers(2, 64), powers)
def test_monotone_in_bytes(name, kind, a, b, n, minor):
    axis = axis_of(name, n, minor)
    assert seconds(kind, min(a, b), axis) <= seconds(kind, max(a, b), axis)


@given(profiles, kinds, SIZES, powers, powers)
def test_monotone_in_aligned_ranks(name, kind, nbytes, n, minor):
    assert seconds(kind, nbytes, axis_of(name, n, minor)) <= seconds(kind, nbytes, axis_of(name, 2 * n, minor)) * (1 + 1e-12)


@given(profiles, kinds, SIZES, st.integers(1, 7))
def test_monotone_in_ranks_inside_a_node(name, kind, nbytes, n):
    assert seconds(kind, nbytes, axis_of(name, n)) <= seconds(kind, nbytes, axis_of(name, n + 1)) * (1 + 1e-12)


@given(profiles, SIZES, st.integers(2, 64), powers)
def test_all_to_all_is_at_most_the_all_gather_of_the_same_local_tensor(name, local, n, minor):
    axis = axis_of(name, n, minor)
    assert seconds("all_to_all", local, axis) <= seconds("all_gather", local * n, axis) * (1 + 1e-12)


@given(profiles, SIZES, st.integers(2, 64), powers)
def test_all_reduce_lies_between_its_halves_and_their_sum(name, nbytes, n, minor):
    axis = axis_of(name, n, minor)
    rs, ag, ar = (seconds(k, nbytes, axis) for k in ("reduce_scatter", "all_gather", "all_reduce"))
    assert max(rs, ag) <= ar * (1 + 1e-12) and ar <= (rs + ag) * (1 + 1e-12)


@given(profiles, kinds, SIZES, powers, st.sampled_from((2, 4, 8)))
def test_an_axis_over_two_levels_costs_at_least_its_inner_part(name, kind, nbytes, outer, inner):
    """...and, for the gathers and reductions, at least the traffic it must send through each card."""
    whole = axis_of(name, outer * inner)
    assert seconds(kind, nbytes, whole) >= seconds(kind, nbytes, axis_of(name, inner)) * (1 - 1e-12)
    fastest = max(link.bus_bandwidth for link in CLUSTERS[name].links)
    assert seconds(kind, nbytes, whole) >= (inner - 1) / inner * nbytes / fastest


small_powers = st.integers(0, 4).map(lambda k: 2**k)


@given(profiles, kinds, SIZES, SIZES, small_powers, small_powers, small_powers, st.sampled_from(((0, 1), (1, 2), (0, 2), (0, 1, 2))))
def test_axes_taken_as_one_keep_the_properties(name, kind, a, b, x, y, z, axes):
    """Monotone in bytes and ranks, exchange at most gather, an all-reduce between its halves and their sum, and never
    cheaper than the part on the innermost link alone."""
    def joined(*sizes):
        return CLUSTERS[name].link_of(Mesh(("a", "b", "c"), sizes), axes)

    one, grown = joined(x, y, z), joined(*(2 * n if i == axes[0] else n for i, n in enumerate((x, y, z))))
    assert one.size == int(np.prod([(x, y, z)[i] for i in axes]))
    assert seconds(kind, min(a, b), one) <= seconds(kind, max(a, b), one)
    assert seconds(kind, a, one) <= seconds(kind, a, grown) * (1 + 1e-12)
    assert seconds(kind, a, AxisLink(one.levels[:1])) <= seconds(kind, a, one) * (1 + 1e-12)
    assert seconds("all_to_all", a, one) <= seconds("all_gather", a * one.size, one) * (1 + 1e-12)
    rs, ag, ar = (seconds(k, a, one) for k in ("reduce_scatter", "all_gather", "all_reduce"))
    assert max(rs, ag) <= ar * (1 + 1e-12) and ar <= (rs + ag) * (1 + 1e-12)


@given(profiles, kinds, st.lists(SIZES, min_size=1, max_size=5), st.integers(1, 64), powers)
def test_arrays_give_the_bits_of_scalars(name, kind, sizes, n, minor):
    axis = axis_of(name, n, minor)
    many = seconds(kind, np.array(sizes), axis)
    assert many.shape == (len(sizes),)
    assert [seconds(kind, s, axis) for s in sizes] == many.tolist()


def test_unknown_collective():
    with pytest.raises(ClusterError, match="no formula for collective 'permute'"):
        seconds("permute", 1.0, axis_of("h100-dgx", 8))


@pytest.mark.parametrize("kind, ranks, milliseconds", [
    ("all_gather", 8, 2.409), ("all_gather", 16, 2.638), ("reduce_scatter", 8, 2.409), ("all_reduce", 8, 3.731),
    ("all_reduce", 16, 3.811), ("all_to_all", 8, 2.409), ("all_to_all", 16, 13.318), ("broadcast", 8, 2.740),
    ("send_recv", 8, 2.736), ("send_recv", 16, 21.803), ("mirror", 8, 2.736), ("mirror", 16, 21.803)])
def test_worked_numbers(kind, ranks, milliseconds):
    assert seconds(kind, 1e9, axis_of("h100-dgx", ranks)) * 1e3 == pytest.approx(milliseconds, abs=5e-4)


@pytest.mark.parametrize(("nbytes", "nccl", "kernels"), [(4096, 35e-6, 5.1e-6), (512 << 10, 38e-6, 12.5e-6)])
def test_kernels_of_one_step_take_small_buffers(nbytes, nccl, kernels):
    """Published on 8 H100: 5.7 to 9.3 us at 4 KiB (sglang pull 2904), 11 us at 512 KiB with multimem (vLLM pull 42324). In one step each rank
    reads seven buffers, 512 KiB are cheaper in two: 2 x 5 + 2 x 7/8 x 512 KiB / 369 GB/s."""
    before, after = (seconds("all_reduce", nbytes, CLUSTERS[name].links_for(parse_mesh("a=8"))[0]) for name in ("h100-dgx", "kernels"))
    assert before == pytest.approx(nccl, rel=0.1) and after == pytest.approx(kernels, rel=0.02)
    assert seconds("all_reduce", 1 << 20, axis_of("kernels", 8)) == seconds("all_reduce", 1 << 20, axis_of("h100-dgx", 8)), "above what they are for"


def test_small_buffers_take_logarithmic_steps():
    """1 KiB on 8 H100: all_gather 24 + 3 x 1.9 us, all_reduce 24 + 6 x 1.9 us, and hardly more."""
    assert seconds("all_gather", 1024, axis_of("h100-dgx", 8)) == pytest.approx(29.7e-6, rel=1e-3)
    assert seconds("all_reduce", 1024, axis_of("h100-dgx", 8)) == pytest.approx(35.4e-6, rel=1e-3)


@pytest.mark.parametrize("kind, nbytes, milliseconds", [
    ("all_gather", 8 << 20, 7.6), ("reduce_scatter", 4 << 20, 4.6), ("all_reduce", 4 << 20, 4.7), ("all_to_all", 4 << 20, 1.8),
    ("all_gather", 64 << 20, 99), ("reduce_scatter", 32 << 20, 48), ("all_reduce", 32 << 20, 45), ("all_to_all", 32 << 20, 26)])
def test_gloo_is_within_a_factor_of_two_and_a_half_of_measurements(kind, nbytes, milliseconds):
    assert 1 / 2.5 < seconds(kind, nbytes, axis_of("cpu-gloo", 2)) * 1e3 / milliseconds < 2.5


MIB = 2**20
# (collective, ranks, {MiB: microseconds}), where from. 8 ranks are one node, H100 and H200 have the same NVLink and switches.
PUBLISHED = {
    "8 x H100, github.com/drmysore/nebius-h100-8gpu-benchmark": ("all_reduce", 8, {1: 44, 10: 90, 100: 474, 1024: 4150}),
    "8 x H200, github.com/stas00/ml-engineering, network/README.md, GB/s of the buffer": ("all_reduce", 8, {
        m: m * MIB / (rate * 1e3) for m, rate in {
            1: 22.82, 2: 36.87, 4: 61.23, 8: 88.87, 16: 125.65, 32: 157.62, 64: 198.01, 128: 229.67, 256: 249.23, 512: 257.31,
            1024: 264.90, 2048: 268.10, 4096: 270.34, 8192: 272.83, 16384: 275.58}.items()}),
    "2 x 8 H100, github.com/drmysore/nebius-h100-16gpu-benchmark": ("all_reduce", 16, {1: 88, 10: 157, 100: 647, 1024: 4520}),
    "4 x 8 H200, 364.87 GB/s bus bandwidth, github.com/stas00/ml-engineering, network/README.md": (
        "all_reduce", 32, {4096: 2 * 31 / 32 * 4096 * MIB / 364.87e3}),
    "4 x 8 H100, peak 330.93 GB/s, git.onestrm.cn/aigatech/vpbenchmarking": (
        "all_reduce", 32, {8192: 2 * 31 / 32 * 8192 * MIB / 330.93e3}),
    "4 x 8 H100, peak 323.53 GB/s, git.onestrm.cn/aigatech/vpbenchmarking": (
        "all_gather", 32, {8192: 31 / 32 * 8192 * MIB / 323.53e3}),
    "8 x H200, 361.4 GB/s, github.com/stas00/ml-engineering, network/README.md": ("all_gather", 8, {16384: 7 / 8 * 16384 * MIB / 361.4e3}),
    "8 x H200, 362.9 GB/s, github.com/stas00/ml-engineering, network/README.md": (
        "reduce_scatter", 8, {16384: 7 / 8 * 16384 * MIB / 362.9e3}),
}


@pytest.mark.parametrize("source", PUBLISHED)
def test_h100_within_20_percent_of_published_measurements(source):
    kind, n, published = PUBLISHED[source]
    for mib, microseconds in published.items():
        assert seconds(kind, mib * MIB, axis_of("h100-dgx", n)) * 1e6 == pytest.approx(microseconds, rel=0.2), f"{mib} MiB"


@given(profiles, SIZES, powers)
def test_a_switch_that_reduces_never_makes_an_all_reduce_dearer(name, nbytes, n):
    without = replace(CLUSTERS[name], links=tuple(replace(link, in_network=None) for link in CLUSTERS[name].links))
    slow = without.links_for(Mesh(("a",), (n,)))[0]
    assert seconds("all_reduce", nbytes, axis_of(name, n)) <= seconds("all_reduce", nbytes, slow)


@given(profiles, kinds, SIZES, powers, st.floats(min_value=1, max_value=16))
def test_oversubscription_slows_what_crosses_it_and_nothing_else(name, kind, nbytes, n, factor):
    c = CLUSTERS[name]
    thin = replace(c, links=(*c.links[:-1], replace(c.links[-1], oversubscription=factor)))
    mesh = Mesh(("a",), (n,))
    slow, fast = (seconds(kind, nbytes, x.links_for(mesh)[0]) for x in (thin, c))
    crosses = c.links_for(mesh)[0].levels[-1:] and c.links_for(mesh)[0].levels[-1][0] == c.links[-1]
    assert slow >= fast if crosses else slow == fast


points = st.lists(st.tuples(st.floats(1, 1e4), st.floats(0, 1)), min_size=2, max_size=6)


@given(st.lists(points, min_size=len(KINDS), max_size=len(KINDS)), SIZES, SIZES, st.integers(1, 63), st.data())
def test_measured_links_keep_the_properties(curves, a, b, n, data):
    """Whatever was measured: free on one rank, monotone in bytes and ranks, exchange at most gather."""
    link = replace(CLUSTERS["cpu-gloo"].links[0], measured=bounded(dict(zip(tuple(KINDS), map(curve_through, curves), strict=True))))
    few, more = AxisLink(((link, n),)) if n > 1 else AxisLink(()), AxisLink(((link, n + 1),))
    kind = data.draw(kinds)
    assert seconds(kind, a, few) <= seconds(kind, a, more) * (1 + 1e-9)
    assert seconds(kind, min(a, b), more) <= seconds(kind, max(a, b), more) * (1 + 1e-9)
    assert seconds("all_to_all", a, more) <= seconds("all_gather", a * (n + 1), more) * (1 + 1e-9)


def curve_through(pairs):
    """A curve from steps in amount and seconds."""
    amounts, times = np.cumsum([p[0] for p in pairs]), np.cumsum([p[1] for p in pairs]) + 1e-6
    return Curve(tuple(amounts.tolist()), tuple(times.tolist()))


def test_a_measured_link_repeats_its_measurements():
    """2 ranks, curve through 1 MB in 3 ms on the wire: an all_gather of 2 MB takes that and one step of latency."""
    link = replace(CLUSTERS["cpu-gloo"].links[0], measured={"all_gather": ((0.0, 1e-3), (1e6, 3e-3))})
    axis = AxisLink(((link, 2),))
    assert seconds("all_gather", 2e6, axis) == pytest.approx(3e-3 + 1e-4)
    assert seconds("all_gather", 4e6, axis) == pytest.approx(5e-3 + 1e-4)
    assert seconds("reduce_scatter", 2e6, axis) == seconds("reduce_scatter", 2e6, axis_of("cpu-gloo", 2))
    assert [wire_bytes(k, 8.0, 4) for k in tuple(KINDS)] == [6, 6, 12, 6, 8, 8, 8, 6]
    assert [ring_steps(k, 4) for k in tuple(KINDS)] == [3, 3, 6, 3, 1, 2, 1, 3]
