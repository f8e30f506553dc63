"""Redistribution: every pair on 2x4 executed on all ranks at once, and the algebra of the prices."""
from dataclasses import replace
from itertools import combinations, product

import numpy as np
import pytest
import torch

from autoshard import collectives
from autoshard.base.mesh import Mesh, parse_mesh
from autoshard.base.spec import INNER, PMAX, PSUM, REDUCE_OPS, R, divides, is_inner, is_partial, local_shape, shard_offset
from autoshard.cost.cluster import available, load_cluster
from autoshard.cost.compute import op_seconds
from autoshard.cost.redistribute import Redistribution, Step, layout, step_seconds
from autoshard.errors import LoweringError
from autoshard.rules.family import Family

H100 = load_cluster("h100-dgx")
MESH = parse_mesh("2x4")
SHAPE = (8, 16, 24)
STEP = Step("slice", (0,), -1, -1, "", 0, 0, 0.0, ())
REDUCE = {"sum": np.sum, "max": np.max, "min": np.min}


@pytest.mark.parametrize("shape", [(0,), (0, 8), (8, 0, 16), (0, 0)])
def test_tensors_of_size_0(shape):
    """Every placement that divides reaches every other without Partial, in no time."""
    moves = Redistribution(MESH, H100)
    specs = [s for s in all_specs(len(shape), 2) if divides(shape, s, MESH.sizes)]
    whole = [s for s in specs if PSUM not in s]
    assert (moves.table(shape, torch.float32, specs, whole) == 0).all() and len(whole) >= 1
    for a, b in product(specs, whole):
        steps = moves.steps(shape, torch.float32, a, b)
        assert all(s.seconds == s.nbytes == s.rearranged == 0 for s in steps) and (not steps or steps[-1].spec == b)


def all_specs(ndim, axes, partials=(PSUM,)):
    return list(product((R, *partials, *range(ndim)), repeat=axes))


def piece(x, spec, mesh, rank):
    """The shard of x on `rank`; Partial axes hold the whole."""
    at, shape = mesh.coordinates(rank), local_shape(x.shape, spec, mesh.sizes)
    offsets = [shard_offset(d, spec, mesh.sizes, at) for d in range(x.ndim)]
    return x[tuple(slice(o * n, (o + 1) * n) for o, n in zip(offsets, shape, strict=True))]


def group(mesh, rank, axes):
    """Ranks that differ from `rank` on `axes` only, in order of their coordinates there, the earlier axis major."""
    at = mesh.coordinates(rank)
    same = [r for r in range(mesh.size) if all(c == at[i] for i, c in enumerate(mesh.coordinates(r)) if i not in axes)]
    return sorted(same, key=lambda r: [mesh.coordinates(r)[a] for a in axes])


def run(step, shards, mesh):
    """One step on the shards of all ranks."""
    out = []
    for rank in range(mesh.size):
        ranks = group(mesh, rank, step.axes)
        n, me, mine = len(ranks), ranks.index(rank), shards[rank]
        theirs = [shards[r] for r in ranks]
        if step.kind == "slice":
            out.append(np.split(mine, n, step.dst_dim)[me])
        elif step.kind == "all_gather":
            out.append(np.concatenate(theirs, step.src_dim))
        elif step.kind == "all_to_all":
            out.append(np.concatenate([np.split(t, n, step.dst_dim)[me] for t in theirs], step.src_dim))
        else:
            total = REDUCE[step.reduce_op](theirs, axis=0)
            out.append(total if step.kind == "all_reduce" else np.split(total, n, step.dst_dim)[me])
    return out


def start(x, spec, mesh, rng):
    """Shards of x under spec: over a Partial axis, random integer parts that add up to x (or whose max is x)."""
    parts = {}
    axes = [i for i, p in enumerate(spec) if is_partial(p)]
    for rank in range(mesh.size):
        key = tuple(mesh.coordinates(rank)[i] for i in axes)
        parts.setdefault(key, None)
    keys = sorted(parts)
    kind = next((p for p in spec if is_partial(p)), PSUM)
    noise = [rng.integers(0, 100, x.shape).astype(x.dtype) for _ in keys[:-1]]
    last = x - sum(noise) if kind == PSUM else x
    values = noise + [last] if kind == PSUM else [x - v for v in noise] + [last]
    by_key = dict(zip(keys, values, strict=True))
    return [piece(by_key[tuple(mesh.coordinates(r)[i] for i in axes)], spec, mesh, r) for r in range(mesh.size)]


def check(shape, mesh, src, dst, partial_free_reference):
    rng = np.random.default_rng(hash((src, dst)) % 2**32)
    x = partial_free_reference
    steps = Redistribution(mesh, H100).steps(shape, torch.float32, src, dst)
    shards, spec = start(x, src, mesh, rng), src
    for step in steps:
        size = {"all_gather": 0, "slice": None}.get(step.kind, -1)
        before = shards[0].nbytes // x.itemsize * 4
        shards, spec = run(step, shards, mesh), step.spec
        assert [s.shape for s in shards] == [local_shape(shape, spec, mesh.sizes)] * mesh.size
        after = shards[0].nbytes // x.itemsize * 4
        assert step.nbytes == (0 if size is None else after if size == 0 else before)
    assert spec == dst
    for rank in range(mesh.size):
        np.testing.assert_array_equal(shards[rank], piece(x, dst, mesh, rank))
    return steps


@pytest.mark.parametrize("kind", [PSUM, PMAX])
def test_every_pair_on_2x4_gives_the_shards_it_should(kind):
    x = np.arange(np.prod(SHAPE), dtype=np.int64).reshape(SHAPE) % 997
    count = 0
    for src in all_specs(3, 2, (kind,)):
        for dst in all_specs(3, 2, ()):
            check(SHAPE, MESH, src, dst, x)
            count += 1
    assert count == 25 * 16


@pytest.mark.parametrize("shape, mesh", [((16, 16), "2x2x2"), ((8, 12), "2x3x2"), ((64,), "2x2x4")])
def test_pairs_on_three_axes_give_the_shards_they_should(shape, mesh):
    mesh, x = parse_mesh(mesh), np.arange(np.prod(shape), dtype=np.int64).reshape(shape)
    for src in all_specs(len(shape), 3):
        for dst in all_specs(len(shape), 3, ()):
            if divides(shape, src, mesh.sizes) and divides(shape, dst, mesh.sizes):
                check(shape, mesh, src, dst, x)


@pytest.mark.parametrize("shape, mesh", [((8, 16), "2x4"), ((24, 24), "2x3x2"), ((16, 16), "2x1x2")])
@pytest.mark.parametrize("kind", [PSUM, PMAX])
def test_every_move_gives_the_shards_it_should_whatever_it_costs(shape, mesh, kind):
    """Cheapest sequences need few of the moves over several axes; here each is run."""
    mesh, x, rng = parse_mesh(mesh), np.arange(np.prod(shape), dtype=np.int64).reshape(shape), np.random.default_rng(0)
    lay, several = layout(len(shape), mesh.sizes, (kind,)), set()
    for move in lay.moves:
        src, dst = lay.states[move.src], lay.states[move.dst]
        if divides(shape, src, mesh.sizes) and divides(shape, dst, mesh.sizes):
            op = next((REDUCE_OPS[p] for p in src if is_partial(p)), "")
            shards = run(replace(STEP, kind=move.kind, axes=move.axes, src_dim=move.src_dim, dst_dim=move.dst_dim, reduce_op=op),
                         start(x, src, mesh, rng), mesh)
            if not any(is_partial(p) for p in dst):
                for rank in range(mesh.size):
                    np.testing.assert_array_equal(shards[rank], piece(x, dst, mesh, rank))
            several |= {(move.kind, move.axes)} if len(move.axes) > 1 else set()
    wide = [a for a, n in enumerate(mesh.sizes) if n > 1]
    assert several == set(product(("all_gather", "all_to_all", "all_reduce", "reduce_scatter"),
                                  [c for k in range(2, 4) for c in combinations(wide, k)]))


@pytest.mark.parametrize("shape, mesh", [((8, 16), "2x4"), ((16, 12), "2x1x2"), ((64,), "2x2x4")])
def test_pairs_with_other_nestings_give_the_shards_they_should(shape, mesh):
    """Both ends may be nested out of mesh order; and each move between such layouts is run, whatever it costs."""
    mesh, x, rng = parse_mesh(mesh), np.arange(np.prod(shape), dtype=np.int64).reshape(shape), np.random.default_rng(0)
    lay = layout(len(shape), mesh.sizes, (PSUM,), True)
    for src, dst in product(lay.states, lay.states):
        if any(map(is_inner, (*src, *dst))) and PSUM not in dst and divides(shape, src, mesh.sizes) and divides(shape, dst, mesh.sizes):
            check(shape, mesh, src, dst, x)
    for move in lay.moves:
        src, dst = lay.states[move.src], lay.states[move.dst]
        if divides(shape, src, mesh.sizes) and divides(shape, dst, mesh.sizes) and PSUM not in dst:
            op = next((REDUCE_OPS[p] for p in src if is_partial(p)), "")
            shards = run(replace(STEP, kind=move.kind, axes=move.axes, src_dim=move.src_dim, dst_dim=move.dst_dim, reduce_op=op),
                         start(x, src, mesh, rng), mesh)
            for rank in range(mesh.size):
                np.testing.assert_array_equal(shards[rank], piece(x, dst, mesh, rank))


def test_gathering_the_inner_axis_leaves_the_outer_ones_pieces():
    """One all-gather over dp, nothing rearranged, and one reduce-scatter back; in mesh order the same takes tp along. Prices of layouts in mesh
    order do not change where others are asked for beside them."""
    moves, inner = Redistribution(MESH, H100), (INNER, 0)
    assert [(s.kind, s.axes, s.rearranged) for s in moves.steps((16, 24), torch.float32, inner, (R, 0))] == [("all_gather", (0,), 0)]
    assert [(s.kind, s.axes, s.rearranged) for s in moves.steps((16, 24), torch.float32, (PSUM, 0), inner)] == [("reduce_scatter", (0,), 0)]
    assert all(s.axes != (0,) for s in moves.steps((16, 24), torch.float32, (0, 0), (R, 0))[:1])
    plain = all_specs(2, 2, ())
    beside = moves.table((16, 24), torch.float32, (*plain, inner), (*plain, inner))
    np.testing.assert_array_equal(beside[:-1, :-1], Redistribution(MESH, H100).table((16, 24), torch.float32, plain, plain))
    assert beside[-1, -1] == 0 and np.isfinite(beside).all() and (beside[-1, :-1] > 0).any()
    assert beside[-1, plain.index((R, 0))] == moves.seconds((16, 24), torch.float32, inner, (R, 0))


def test_no_step_touches_a_dim_that_a_later_axis_splits():
    """(S0,S0) -> (R,S0) must first free the minor axis: no single gather on axis 0 is legal."""
    steps = Redistribution(MESH, H100).steps(SHAPE, torch.float32, (0, 0), (R, 0))
    assert 1 in steps[0].axes
    spec = (0, 0)
    for step in steps:
        minor = [d for a, d in enumerate(spec) if a > step.axes[0] and a not in step.axes]
        assert not {step.src_dim, step.dst_dim} & {d for d in minor if d >= 0}
        spec = step.spec


def table_of(mesh, cluster, shape, dtype=torch.bfloat16, partials=(PSUM,)):
    sources = all_specs(len(shape), mesh.ndim, partials)
    targets = all_specs(len(shape), mesh.ndim, ())
    return Redistribution(mesh, cluster).table(shape, dtype, sources, targets), sources, targets


@pytest.mark.parametrize("name", available())
@pytest.mark.parametrize("mesh, shape", [("2x4", (8, 256, 512)), ("2x8", (16, 1024, 64)), ("2x2x2", (32, 32))])
def test_table_is_the_sum_of_its_steps_and_obeys_the_triangle(name, mesh, shape):
    mesh, cluster = parse_mesh(mesh), load_cluster(name)
    if mesh.size > cluster.limit:
        pytest.skip(f"{name} has {cluster.limit:.0f} devices")
    table, sources, targets = table_of(mesh, cluster, shape)
    moves = Redistribution(mesh, cluster)
    for i, src in enumerate(sources):
        for j, dst in enumerate(targets):
            steps = moves.steps(shape, torch.bfloat16, src, dst)
            assert sum(s.seconds for s in steps) == pytest.approx(table[i, j], rel=1e-12, abs=1e-18)
            assert (src == dst) == (not steps)
    among = table[[sources.index(t) for t in targets]]
    through = np.min(table[:, :, None] + among[None], axis=1)
    assert np.all(table <= through * (1 + 1e-12))


def full_replication(moves, shape, src, dst, cluster, links):
    """Minor axis first, everything to Replicate, then slice: the price of the naive way."""
    total, spec = 0.0, list(src)
    for axis in reversed(range(len(src))):
        if spec[axis] == R:
            continue
        kind = "all_reduce" if is_partial(spec[axis]) else "all_gather"
        dim, spec[axis] = spec[axis], R
        local = local_shape(shape, tuple(spec), moves.mesh.sizes)
        nbytes = int(np.prod(local)) * 2
        copied = nbytes if kind == "all_gather" and np.prod(local[:dim]) > 1 else 0
        total += step_seconds(kind, nbytes, copied, links[axis], cluster)
    return total


@pytest.mark.parametrize("name", available())
def test_no_pair_costs_more_than_full_replication(name):
    cluster, shape = load_cluster(name), (16, 64, 32)
    table, sources, targets = table_of(MESH, cluster, shape)
    moves, links = Redistribution(MESH, cluster), cluster.links_for(MESH)
    for i, src in enumerate(sources):
        limit = full_replication(moves, shape, src, None, cluster, links)
        for j, dst in enumerate(targets):
            assert table[i, j] <= limit * (1 + 1e-12)


@pytest.mark.parametrize("name", available())
def test_a_step_costs_its_collective_and_its_copy(name):
    cluster = load_cluster(name)
    moves = Redistribution(MESH, cluster)
    for src in all_specs(3, 2):
        for dst in all_specs(3, 2, ()):
            for s in moves.steps((8, 64, 512), torch.float32, src, dst):
                assert s.seconds == step_seconds(s.kind, s.nbytes, s.rearranged, cluster.link_of(MESH, s.axes), cluster)


def test_worked_step_with_a_copy():
    """Gathering [64, 4096] bf16 along dim 1 over 4 of 8 H100 puts 512 KiB together out of order: the
    collective of 512 KiB plus a copy that reads and writes it (here no longer than a kernel takes to start)."""
    moves = Redistribution(MESH, H100)
    (step,) = moves.steps((64, 4096), torch.bfloat16, (R, 1), (R, R))
    assert (step.kind, step.nbytes, step.rearranged) == ("all_gather", 512 << 10, 512 << 10)
    assert step.seconds == pytest.approx(collectives.seconds("all_gather", 512 << 10, moves.links[1,]) + 4.0e-6, rel=1e-12)
    (large,) = moves.steps((8192, 8192), torch.bfloat16, (R, 1), (R, R))
    copy = op_seconds(Family.COPY, 0, 2 * (128 << 20), torch.uint8, H100.device)
    assert copy == pytest.approx(2 * 134217728 / (3.35e12 * 0.85))
    assert large.seconds == collectives.seconds("all_gather", 128 << 20, moves.links[1,]) + copy


def test_gathering_behind_dims_of_one_needs_no_copy():
    (step,) = Redistribution(MESH, H100).steps((1, 4096, 64), torch.bfloat16, (R, 1), (R, R))
    assert step.rearranged == 0
    (step,) = Redistribution(MESH, H100).steps((2, 4096, 64), torch.bfloat16, (R, 1), (R, R))
    assert step.rearranged == step.nbytes


def test_impossible_pairs():
    moves = Redistribution(MESH, H100)
    table = moves.table((8, 16), torch.float32, [(R, R), (PSUM, R), (PSUM, PMAX)], [(PSUM, R), (PMAX, R), (R, R), (PSUM, PMAX)])
    inf = np.inf
    assert np.isinf(table).tolist() == [[True, True, False, True], [False, True, False, True], [True, True, True, False]]
    assert table[1, 0] == 0 and table[2, 3] == 0 and table[0, 2] == 0 and 0 < table[1, 2] < inf
    with pytest.raises(LoweringError, match="no way to redistribute .* from R,R to P,R on mesh d0=2,d1=4"):
        moves.steps((8, 16), torch.float32, (R, R), (PSUM, R))


def test_partial_integers_are_impossible():
    moves = Redistribution(MESH, H100)
    for dtype in (torch.int64, torch.bool):
        assert moves.seconds((8, 16), dtype, (PSUM, R), (R, R)) == np.inf
        assert moves.seconds((8, 16), dtype, (0, R), (R, R)) > 0


def test_states_that_do_not_divide_are_never_used():
    """[6, 8] on 2x4: dim 0 divides by 2 only."""
    moves = Redistribution(MESH, H100)
    assert moves.seconds((6, 8), torch.float32, (R, R), (R, 0)) == np.inf
    assert moves.seconds((6, 8), torch.float32, (0, R), (0, 0)) == np.inf
    for src in all_specs(2, 2):
        for dst in all_specs(2, 2, ()):
            if divides((6, 8), src, MESH.sizes) and divides((6, 8), dst, MESH.sizes):
                assert all(divides((6, 8), s.spec, MESH.sizes) for s in moves.steps((6, 8), torch.float32, src, dst))


def test_equal_prices_prefer_fewer_steps():
    """On an axis of one rank everything is free: one step is taken all the same, never two."""
    moves = Redistribution(parse_mesh("1x4"), H100)
    assert [(s.kind, s.seconds) for s in moves.steps((8, 8), torch.float32, (0, R), (1, R))] == [("all_to_all", 0.0)]
    assert [(s.kind, s.axes) for s in moves.steps((8, 8), torch.float32, (R, R), (1, 1))] == [("slice", (0,)), ("slice", (1,))]


def test_partial_goes_straight_to_shard():
    (step,) = Redistribution(MESH, H100).steps((4096, 4096), torch.bfloat16, (1, PSUM), (1, 0))
    assert (step.kind, step.reduce_op, step.nbytes, step.rearranged) == ("reduce_scatter", "sum", 4096 * 2048 * 2, 0)


def test_partial_over_two_axes_is_one_all_reduce():
    """2 x 2 ranks: 3/2 of the buffer on the wire and one start, where two calls in turn send twice its size."""
    mesh = parse_mesh("dp=2,tp=2")
    for name, nbytes in (("cpu-gloo", 4 << 20), ("h100-dgx", 4 << 20), ("cpu-gloo", 4096)):
        cluster, links = load_cluster(name), load_cluster(name).links_for(mesh)
        (step,) = Redistribution(mesh, cluster).steps((nbytes // 4,), torch.float32, (PSUM, PSUM), (R, R))
        assert (step.kind, mesh.label(step.axes), step.nbytes, step.reduce_op) == ("all_reduce", "dp+tp", nbytes, "sum")
        assert step.seconds == collectives.seconds("all_reduce", nbytes, cluster.link_of(mesh, (0, 1)))
        assert step.seconds < sum(collectives.seconds("all_reduce", nbytes, link) for link in links)
    sent = [collectives.wire_bytes("all_reduce", 1.0, n) for n in (4, 2, 2)]
    assert sent == [1.5, 1.0, 1.0]


def test_worked_number_of_two_axes_on_two_levels():
    """256 MiB reduced over 8 x 8 H100: the switches of all nodes at once, 1.554 ms. Axis by axis
    (reduce-scatter inside nodes, all-reduce of an eighth across them, all-gather inside) 2.740 ms."""
    moves = Redistribution(parse_mesh("8x8"), H100)
    (step,) = moves.steps((8192, 8192), torch.float32, (PSUM, PSUM), (R, R))
    assert (step.kind, step.axes) == ("all_reduce", (0, 1)) and step.seconds * 1e3 == pytest.approx(1.554, abs=5e-4)
    part, size = 8192 * 8192 * 4 // 8, 8192 * 8192 * 4
    by_axis = (collectives.seconds("reduce_scatter", size, moves.links[1,]) + collectives.seconds("all_reduce", part, moves.links[0,])
               + collectives.seconds("all_gather", size, moves.links[1,]))
    assert by_axis * 1e3 == pytest.approx(2.740, abs=5e-4)


def test_axes_apart_meet_in_one_call_unless_the_axis_between_splits_the_dim():
    mesh = parse_mesh("2x2x2")
    moves = Redistribution(mesh, H100)
    assert [(s.kind, s.axes) for s in moves.steps((64, 64), torch.float32, (PSUM, R, PSUM), (R, R, R))] == [("all_reduce", (0, 2))]
    assert [(s.kind, s.axes) for s in moves.steps((64, 64), torch.float32, (0, 1, 0), (R, 1, R))] == [("all_gather", (0, 2))]
    assert (0, 2) not in [s.axes for s in moves.steps((64, 64), torch.float32, (0, 0, 0), (R, 0, R))]
    assert [s.axes for s in moves.steps((64, 64), torch.float32, (0, 0, 0), (0, R, R))] == [(1, 2)]


def test_ranks_that_would_do_the_same_share_a_large_reduction():
    """(R, P) -> (R, R): both rows of the mesh hold the same parts, so each reduces half and they swap halves."""
    moves = Redistribution(MESH, H100)
    large = moves.steps((8192, 8192), torch.float32, (R, PSUM), (R, R))
    assert [(s.kind, s.axes) for s in large] == [("slice", (0,)), ("all_reduce", (1,)), ("all_gather", (0,))]
    alone = collectives.seconds("all_reduce", 8192 * 8192 * 4, moves.links[1,])
    assert sum(s.seconds for s in large) < alone
    small = moves.steps((8, 8), torch.float32, (R, PSUM), (R, R))
    assert [(s.kind, s.axes) for s in small] == [("all_reduce", (1,))]


def test_two_meshes_and_clusters_in_one_process_do_not_mix():
    def both(order):
        made = {k: Redistribution(parse_mesh(k[0]), load_cluster(k[1])) for k in order}
        return {k: made[k].table((16, 64), torch.float32, all_specs(2, 2), all_specs(2, 2, ())) for k in order}

    keys = [("2x4", "h100-dgx"), ("4x2", "h100-dgx"), ("2x4", "a100-dgx"), ("2x4", "cpu-gloo")]
    together, reverse = both(keys), both(keys[::-1])
    for k in keys:
        np.testing.assert_array_equal(together[k], reverse[k])
        np.testing.assert_array_equal(together[k], both([k])[k])
    assert not np.array_equal(together[keys[0]], together[keys[1]])
    assert not np.array_equal(together[keys[0]], together[keys[2]])


def test_same_steps_every_time():
    pairs = list(product(all_specs(2, 3), all_specs(2, 3, ())))
    mesh = Mesh(("a", "b", "c"), (2, 2, 2))
    one, two = Redistribution(mesh, H100), Redistribution(mesh, H100)
    for src, dst in reversed(pairs):
        two.steps((16, 16), torch.float32, src, dst)
    assert all(one.steps((16, 16), torch.float32, *p) == two.steps((16, 16), torch.float32, *p) for p in pairs)
