"""Fitting without a machine: samples made from known numbers must come back as those numbers."""
import re
from dataclasses import replace
from itertools import count
from statistics import median
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from rich.console import Console

from autoshard import collectives
from autoshard.calibrate.cases import Pool, cases, prepare
from autoshard.calibrate.fit import errors, fit, monotone
from autoshard.calibrate.measure import HELD_SIZES, MIN_ROUNDS, SIZES, Rounds, Stopwatch, Work, op_work, time_rounds, trimmed_mean
from autoshard.calibrate.overlap import Timing, fitted
from autoshard.calibrate.page import FOOT, HEIGHT, LEFT, WIDTH, chart, page
from autoshard.calibrate.report import contradictions, label, show, warnings
from autoshard.calibrate.run import Calibration
from autoshard.calibrate.sample import Machine, Sample
from autoshard.calibrate.step import between
from autoshard.calibrate.toml import profile_text
from autoshard.collectives import KINDS
from autoshard.cost.cluster import AxisLink, Overlap, OwnHost, load_cluster
from autoshard.cost.compute import op_seconds
from autoshard.errors import ClusterError, UsageError
from autoshard.rules.family import Family
from autoshard.runtime.ranks.place import locate
from autoshard.simulation.clocked import Moment

TRUTH = load_cluster("cpu-gloo")
MACHINE = Machine("mine", "a made-up core", "gloo", 2, 8e9, ("loopback",), (2,), "2026-01-01")
OVERLAP = Overlap(0.5, 0.4)


def samples(noise=0.0, seed=0):
    """What a machine with the numbers of cpu-gloo would show, with relative noise."""
    rng = np.random.default_rng(seed)

    def noisy(seconds):
        return float(seconds * np.exp(noise * rng.standard_normal()))

    out = [Sample("collective", kind, collectives.wire_bytes(kind, size, 2),
                  noisy(collectives.seconds(kind, size, AxisLink(((TRUTH.links[0], 2),)))), size in HELD_SIZES, ranks=2, nbytes=size)
           for size in (*SIZES, *HELD_SIZES) for kind in KINDS]
    for k, amount in enumerate(np.logspace(3, 9, 19)):
        for key, family in (("aten::add.Tensor", Family.POINTWISE), ("aten::native_layer_norm", Family.NORM)):
            seconds = op_seconds(family, 0, amount, torch.float32, TRUTH.device)
            out.append(Sample("op", key, amount, noisy(seconds), k % 3 == 1, family, "float32", moved=amount))
        seconds = op_seconds(Family.MATMUL, amount, 1, torch.float32, TRUTH.device)
        out.append(Sample("op", "aten::mm", amount, noisy(seconds), k % 3 == 1, Family.MATMUL, "float32", moved=1))
        out.append(Sample("optimizer", "adamw", amount, noisy(1e-5 + amount / 1e10), k % 3 == 1, dtype="float32", moved=amount))
    return out


def held_error(cluster, given, kind):
    return median(abs(e.error) for e in errors(cluster, given) if e.sample.held_out and e.sample.kind == kind)


@pytest.mark.parametrize("noise, collective, op", [(0.0, 0.02, 0.02), (0.1, 0.15, 0.15)])
def test_fit_repeats_sizes_it_never_saw(noise, collective, op):
    given = samples(noise)
    cluster = fit(MACHINE, given, OVERLAP)
    assert held_error(cluster, given, "collective") < collective
    assert held_error(cluster, given, "op") < op and held_error(cluster, given, "optimizer") < op


def test_the_profile_is_a_profile(tmp_path):
    cluster = fit(MACHINE, samples(0.05), OVERLAP)
    path = tmp_path / "mine.toml"
    path.write_text(profile_text(cluster, cluster.description))
    again = load_cluster(path)
    assert again.name == "mine" and again.overlap == OVERLAP
    assert set(again.links[0].measured) == set(KINDS)
    assert all("calibrated 2026-01-01" in source for _, source in again.sources)
    axis, same = (AxisLink(((c.links[0], 2),)) for c in (again, cluster))
    for kind in KINDS:
        assert collectives.seconds(kind, 3e5, axis) == pytest.approx(collectives.seconds(kind, 3e5, same), rel=1e-4)


def test_what_python_takes_is_what_was_measured(tmp_path):
    steps = [Sample("step", "step", n, 1e-3 + n * 4e-5, False, dtype="float32") for n in (6.0, 24.0)]
    given = [*samples(), Sample("view", "aten::view", 1.0, 2e-6, False, dtype="float32"), *steps]
    cluster = fit(MACHINE, given, OVERLAP)
    assert cluster.device.own_host == OwnHost(2e-6, pytest.approx(1e-3), pytest.approx(4e-5))
    assert [e.error for e in errors(cluster, given)[-3:]] == pytest.approx([0.0] * 3)
    (tmp_path / "mine.toml").write_text(profile_text(cluster, cluster.description))
    assert load_cluster(tmp_path / "mine.toml").device.own_host == OwnHost(2e-6, pytest.approx(1e-3), pytest.approx(4e-5))
    assert fit(MACHINE, samples(), OVERLAP).device.own_host is None
    assert fit(MACHINE, [*given[:-1], replace(steps[1], seconds=1e-4)], OVERLAP).device.own_host.parameter > 0, "noise"


def test_two_group_sizes_give_the_latency():
    """Of 2 and 4 ranks the small gathers differ by two steps."""
    link = TRUTH.links[0]
    small = [Sample("collective", "all_gather", 512.0 * (n - 1) / n, link.overhead + (n - 1) * link.latency, False, ranks=n, nbytes=512.0)
             for n in (2, 4)]
    large = [replace(s, amount=1e7, seconds=s.seconds + 0.02) for s in small]
    ops = [s for s in samples() if s.kind == "op"]
    assert fit(replace(MACHINE, ranks=4), [*small, *large, *ops], OVERLAP).links[0].latency == pytest.approx(link.latency)


def test_bytes_of_convolutions_count_as_many_flop_as_they_take(tmp_path):
    """Seconds of a device that takes as long for a byte as for 40 FLOP; over FLOP alone the deep small images would be three times as dear as others."""
    def convolved(flop, moved, held=False):
        return Sample("op", "aten::convolution", flop, (flop + 40 * moved) / 1e11, held, Family.CONV, "float32", moved=moved)

    shapes = [(1e6, 4e4), (4e7, 8e5), (4e7, 2.5e6), (8e7, 7e5), (3e8, 9.6e6), (5e8, 3.2e6), (2e9, 7e6)]
    given = [s for s in samples() if s.family is not Family.CONV] + [convolved(*shape) for shape in shapes]
    cluster = fit(MACHINE, given, OVERLAP)
    assert cluster.device.byte_flop == {"aten::convolution/float32": 40.0, "conv/float32": 40.0}
    held = convolved(3e7, 2e6, True)
    assert errors(cluster, [held])[0].error == pytest.approx(0.0, abs=0.02)
    plain = replace(cluster, device=replace(cluster.device, byte_flop={}))
    assert errors(plain, [held])[0].error < -0.2
    (tmp_path / "mine.toml").write_text(profile_text(cluster, "made up"))
    assert load_cluster(tmp_path / "mine.toml").device.byte_flop == cluster.device.byte_flop
    (tmp_path / "mine.toml").write_text(profile_text(replace(cluster, device=replace(cluster.device, byte_flop={"aten::nothing": 1.0})), "made up"))
    with pytest.raises(ClusterError, match="device.byte_flop.aten::nothing"):
        load_cluster(tmp_path / "mine.toml")


def test_one_process_has_no_links_to_measure():
    given = [s for s in samples() if s.kind != "collective"]
    cluster = fit(replace(MACHINE, ranks=1, links=("loopback",)), given, Overlap(0.0, 1.0))
    assert cluster.links[0] == replace(TRUTH.links[0], name="loopback-not-measured")
    assert held_error(cluster, given, "op") < 0.02


def test_monotone_is_the_isotonic_regression_of_the_logs():
    curve = monotone([(1, 2.0), (2, 1.0), (4, 8.0)])
    assert curve.amounts == (1, 2, 4) and curve.seconds == pytest.approx((2**0.5, 2**0.5, 8))
    assert monotone([(1, 1.0), (2, 4.0), (3, 2.0)]).seconds == pytest.approx((1, 8**0.5)), "a flat end would go on for ever"
    assert monotone([(5, 3.0)])(1e9) == pytest.approx(3.0)
    rng = np.random.default_rng(1)
    for _ in range(20):
        noisy = monotone([(a, float(np.exp(rng.standard_normal()))) for a in range(1, 9)])
        assert all(b >= a for a, b in zip(noisy.seconds, noisy.seconds[1:], strict=False))


@pytest.mark.parametrize("both", [0.0, 0.001, 0.015, 0.029, 0.036, 0.045, 0.060, 1.0])
def test_no_share_is_above_all_or_below_nothing(both):
    """Times are measured one after the other, on a machine that may be busy: they need not fit together."""
    found = Timing(0.030, 0.015, both)
    assert 0.0 <= found.hidden <= 1.0 and (found.possible == (0.028 < both < 0.049))
    assert len(contradictions((found, found))) == 2 * (not found.possible) and contradictions(None) == []
    assert 0.0 <= fitted(found, found).eta <= 1.0 and 0.0 <= fitted(found, found).interference <= 1.0


def test_overlap_from_two_timings():
    found = fitted(Timing(0.030, 0.015, 0.036), Timing(0.030, 0.060, 0.075))
    assert (found.interference, found.eta) == pytest.approx((0.4, 15 / 18))
    assert fitted(Timing(0.030, 0.015, 0.045), Timing(0.030, 0.060, 0.090)) == Overlap(0.0, 1.0)
    assert Timing(0.030, 0.015, 0.036).hidden == pytest.approx(0.6)


def test_cases_count_what_the_cost_model_counts():
    device = torch.device("cpu")
    pool = Pool(torch.float32, device)
    for case in cases(device):
        p = prepare(case, case.sizes[0], pool, False)
        p.run()
        assert p.amount > 0 and p.moved > 0 and p.dtype == "float32"
    mm = next(c for c in cases(device) if str(c.target) == "aten.mm.default")
    assert prepare(mm, (64, 32, 16), pool, False).amount == 2 * 64 * 32 * 16


def test_rounds_come_from_the_clock():
    """Time comes from the clock, repeats from the first run, and noise from the rounds."""
    place = locate("one=1")
    work = [w for w in op_work(place, (torch.float32,)) if w.sample.key == "aten::add.Tensor"][:2]
    seen = []
    out = time_rounds(work, Stopwatch(place), 0.0, lambda phase, detail: seen.append(detail))
    assert len(seen) == MIN_ROUNDS and [s.key for s in out] == ["aten::add.Tensor"] * 2
    assert all(1e-7 < s.seconds < 1.0 and s.spread >= 0 for s in out)


def test_seconds_are_a_mean_without_the_extreme_rounds():
    table = np.array([[1.0] * 10 + [2.0, 100.0], [3.0] * 12]).T
    assert trimmed_mean(table) == pytest.approx([1.1, 3.0])


def test_rounds_may_be_taken_between_other_things():
    """Samples are of all rounds so far, whenever they were taken."""
    ticks = iter(x for i in range(100) for x in (float(i), i + 1e-3 * (i + 1)))
    work = [Work(Sample("optimizer", "adamw", 1.0, 0.0, False), lambda: None, False)]
    rounds = Rounds(work, Stopwatch(locate("one=1"), lambda: next(ticks)))
    rounds.go()
    first = rounds.samples()[0].seconds
    rounds.run(0.0, lambda *a: None)
    assert first == pytest.approx(2e-3), "the first look warms up"
    assert len(rounds.table) == 1 + MIN_ROUNDS and rounds.samples()[0].seconds == pytest.approx(1e-3 * (2 + 3 + 4 + 5) / 4)


def test_what_is_left_of_a_step_are_the_gaps_between_its_calls():
    moments = [Moment("a", 1.0, 3.0), Moment("b", 3.5, 4.0), Moment("c", 4.0, 9.0)]
    assert between(moments, 0.25, 10.0) == [0.75, 0.5, 0.0, 1.0]
    assert between([], 1.0, 3.0) == [2.0]


def test_a_pause_in_one_gap_of_one_step_is_left_out():
    """20 steps of three gaps; each of three steps was held up once, for much longer than a step takes."""
    table = np.tile([1.0, 2.0, 3.0], (20, 1))
    table[4, 0] = table[9, 1] = table[13, 2] = 1000.0
    assert trimmed_mean(table).sum() == pytest.approx(6.0)


def test_parts_share_the_time():
    """A clock that ticks a millisecond per look."""
    ticks = count(step=1e-3)
    slow = Work(Sample("optimizer", "adamw", 1.0, 0.0, False), lambda: None, False)
    whole, part = time_rounds([slow, replace(slow, parts=4)], Stopwatch(locate("one=1"), lambda: next(ticks)), 0.0, lambda *a: None)
    assert (whole.seconds, part.seconds) == pytest.approx((1e-3, 2.5e-4)) and whole.spread == pytest.approx(0, abs=1e-6)


def test_an_op_finds_what_was_written_last_in_the_caches_and_runs_once_in_a_round():
    """Back to back it would find all it reads; the clock of a GPU needs many kernels in a row. Its code is there, by its twin, unless it is long."""
    seen = []
    fresh, stopwatch = torch.ones(4), Stopwatch(locate("one=1"))
    op = Work(Sample("op", "aten::neg", 1.0, 0.0, False), lambda: seen.append(fresh._version), False, fresh=(fresh,), twin=lambda: seen.append("twin"))
    stopwatch.after(op, 50)
    stopwatch.after(op, 1)
    assert seen == ["twin", 1, 2] and torch.equal(fresh, torch.ones(4))
    stopwatch.cuda, stopwatch._finish = True, lambda: None
    stopwatch.after(op, 50)
    assert len(seen) == 53


def test_the_time_of_a_collective_is_a_median_over_runs_and_rounds_after_one_that_aligns_ranks():
    """A pause of the machine in one run of a round, and rounds whose runs all were slow but fewer than half of them, are not the collective's."""
    now, runs = [0.0], []

    def run() -> None:
        runs.append(len(runs))
        now[0] += 5.0 if len(runs) % 7 == 0 or 100 < len(runs) < 160 else 1e-3

    rounds = Rounds([Work(Sample("collective", "all_reduce", 1.0, 0.0, False), run, True)], Stopwatch(locate("one=1"), lambda: now[0]))
    rounds.repeats = [20]
    warm_up = len(runs)
    for _ in range(11):
        rounds.go()
    assert len(runs) - warm_up == 11 * 21, "the one that aligns is not timed"
    assert rounds.samples()[0].seconds == pytest.approx(1e-3)


def test_tensors_of_a_case_do_not_overlap():
    pool = Pool(torch.float32, torch.device("cpu"), most=1000)
    first, second, third = pool.new(10, 10), pool.new(700), pool.new(300)
    places = [(x.storage_offset(), x.storage_offset() + x.numel()) for x in (first, second, third)]
    assert places == [(0, 100), (128, 828), (0, 300)], "from the start again where the rest is too short"


def test_report_warns_of_a_poor_fit_and_writes_the_page(tmp_path):
    given = samples(0.6)
    cluster = fit(MACHINE, given, OVERLAP)
    found = Calibration(cluster, tuple(given), tuple(errors(cluster, given)), None)
    console = Console(record=True, width=120, file=open("/dev/null", "w"))
    show(found, console)
    text = console.export_text()
    assert "all_gather over 2" in text and "aten::mm float32" in text and "held-out" in text
    assert any(w.startswith("collective: the median error") for w in warnings(found.errors))
    assert warnings(errors(fit(MACHINE, samples(), OVERLAP), samples())) == []
    page(found, tmp_path / "plot.html")
    html = (tmp_path / "plot.html").read_text()
    assert "aten::mm float32" in html and len(html) < 1e6
    assert not re.search(r"<script|src=|href=|@import|url\(", html), "one file, which loads nothing"
    with pytest.raises(UsageError, match="cannot write"):
        page(found, tmp_path / "nowhere" / "plot.html")
    assert label(given[0]) == "all_gather over 2"




def test_a_chart_shows_every_sample_where_its_numbers_say():
    given = [s for s in samples(0.6) if label(s) == "all_gather over 2"]
    cluster = fit(MACHINE, samples(0.6), OVERLAP)
    found = errors(cluster, given)
    drawn = ElementTree.fromstring(chart(found))
    points = sorted((float(c.get("cx")), float(c.get("cy")), c.get("fill") == "none") for c in drawn.iter("circle"))
    ordered = sorted((s.amount, -s.seconds, s.held_out) for s in given)
    assert len(points) == len(given) > 4 and [held for *_, held in points] == [held for *_, held in ordered]
    assert all(LEFT <= x <= WIDTH and 0 <= y <= HEIGHT - FOOT for x, y, _ in points)
    (x0, y0, _), (x1, y1, _) = points[0], points[-1]
    (a0, t0, _), (a1, t1, _) = ordered[0], ordered[-1]
    labels = [t.text for t in drawn.iter("text")]
    assert (x1 > x0) == (a1 > a0) and (y1 < y0) == (-t1 > -t0) and len(labels) >= 4
    assert len(drawn.find("polyline").get("points").split()) == len(given)
