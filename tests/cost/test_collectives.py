"""Properties of the collective formulas over all profiles, and the worked numbers of the docstrings."""
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.cost.cluster import available, load_cluster
from autoshard.cost.collectives import FORMULAS, seconds
from autoshard.errors import ClusterError
from autoshard.mesh import Mesh

CLUSTERS = {name: load_cluster(name) for name in available()}
SIZES = st.floats(min_value=0, max_value=1e12, allow_nan=False)
profiles = st.sampled_from(sorted(CLUSTERS))
kinds = st.sampled_from(sorted(FORMULAS))
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
    ("send_recv", 8, 2.736), ("send_recv", 16, 21.803)])
def test_worked_numbers(kind, ranks, milliseconds):
    assert seconds(kind, 1e9, axis_of("h100-dgx", ranks)) * 1e3 == pytest.approx(milliseconds, abs=5e-4)


def test_small_buffers_take_logarithmic_steps():
    """1 KiB on 8 H100: all_gather 24 + 3 x 1.9 us, all_reduce 24 + 6 x 1.9 us, and hardly more."""
    assert seconds("all_gather", 1024, axis_of("h100-dgx", 8)) == pytest.approx(29.7e-6, rel=1e-3)
    assert seconds("all_reduce", 1024, axis_of("h100-dgx", 8)) == pytest.approx(35.4e-6, rel=1e-3)


@pytest.mark.parametrize("kind, nbytes, milliseconds", [
    ("all_gather", 8 << 20, 7.6), ("reduce_scatter", 4 << 20, 4.6), ("all_reduce", 4 << 20, 4.7), ("all_to_all", 4 << 20, 1.8),
    ("all_gather", 64 << 20, 99), ("reduce_scatter", 32 << 20, 48), ("all_reduce", 32 << 20, 45), ("all_to_all", 32 << 20, 26)])
def test_gloo_is_within_a_factor_of_two_and_a_half_of_measurements(kind, nbytes, milliseconds):
    assert 1 / 2.5 < seconds(kind, nbytes, axis_of("cpu-gloo", 2)) * 1e3 / milliseconds < 2.5
