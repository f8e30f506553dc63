"""What an installation has, whether a profile speaks of this machine, and a short test that it computes and is as fast as the profile says."""
from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from math import exp, log
from statistics import median
from typing import Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from autoshard import _torch, api
from autoshard.base import quantities
from autoshard.base.mesh import Mesh
from autoshard.calibrate.cases import Pool, cases, prepare
from autoshard.calibrate.fit import Error, errors
from autoshard.calibrate.measure import Progress, Stopwatch, Work, collective_work, time_rounds
from autoshard.calibrate.run import check_seconds, device_of, launched_mesh, peers
from autoshard.calibrate.sample import Sample
from autoshard.cost.cluster import Cluster, load_cluster
from autoshard.errors import AutoshardError, ClusterError
from autoshard.runtime.carriers.gloo_messages import Members
from autoshard.runtime.ranks.conditions import conditions_of, float32_products, otherwise
from autoshard.runtime.ranks.place import Place, cluster_here, locate
from autoshard.verification.check import verify

PACKAGES = ("autoshard", "torch", "numpy", "ortools", "numba", "transformers")
OPTIONAL = ("transformers",)
NBYTES = (2**14, 2**18, 2**20, 2**23)
"""Buffers of the collectives that are timed."""
OPS = ("aten.mm.default", "aten.add.Tensor", "aten.native_layer_norm.default")
PRODUCT, REPEATS = 1024, 7
"""Width of two float32 matrices, and how often they are multiplied in each of torch's settings."""
CLOSE, FAR = 1.3, 2.0
"""Measured over predicted, or the inverse: up to the first a profile fits; above the second its plans may be wrong ones."""
CALIBRATE = "torchrun --nproc-per-node {} -m autoshard calibrate -o my.toml, then plan with --cluster my.toml"
State = Literal["ok", "note", "warning", "failed"]


@dataclass(frozen=True)
class Finding:
    """One line: what was looked at, what it is, whether that is well, and what to do where it is not."""

    topic: str
    name: str
    value: str
    state: State = "ok"
    advice: str = ""


def doctor(cluster: str | None, *, self_test: bool, seconds: float, timeout: float, progress: Progress) -> tuple[tuple[Finding, ...], bool]:
    """Findings, and whether this rank reports. Every rank of a launcher calls it. `cluster`: the profile; default: that of the device.

    Raises ClusterError for a profile that cannot be read, and for peers that cannot be reached."""
    check_seconds(seconds, timeout)
    cluster = cluster or cluster_here(None)
    profile = load_cluster(cluster)
    mesh = launched_mesh(None)
    with peers(timeout):
        place = locate(mesh)
        found = [*versions(), *devices(place), *links(place), *fits(profile, place)]
        if self_test:
            progress("doctor", "parity")
            found.append(_tested("parity", lambda: parity(cluster, place)))
            found += [*speed(profile, place, seconds, progress), *products(place)]
    return tuple(found), place.is_leader


# --- what is there ---

def versions() -> Iterator[Finding]:
    """Of Python and the packages; a missing one that is not optional is a failure."""
    yield Finding("versions", "python", platform.python_version())
    for name in PACKAGES:
        try:
            yield Finding("versions", name, metadata.version(name))
        except metadata.PackageNotFoundError:
            missing = name not in OPTIONAL
            yield Finding("versions", name, "not installed", "failed" if missing else "note",
                          f"pip install {name}" if missing else "needed for --hf only: pip install 'autoshard[hf]'")


def devices(place: Place) -> Iterator[Finding]:
    """The device of a rank, and what else wants it."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", str(place.mesh.size)))
    name, memory = device_of(place.device, local)
    yield Finding("devices", "device", f"{name}, {quantities.size(memory)} a rank")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    yield Finding("devices", "cores", f"{cores} for {local} rank(s) of this machine",
                  *(("note", "ranks share cores; their compute will not add up") if local > cores else ()))
    if hasattr(os, "getloadavg") and (load := os.getloadavg()[0]) > cores + local:
        yield Finding("devices", "load", f"{load:.1f} on {cores} cores", "note", "the machine is busy; measured speeds will be too low")


def links(place: Place) -> Iterator[Finding]:
    """How ranks reach each other."""
    if place.device_mesh is None:
        yield Finding("links", "ranks", "1, nobody to talk to", "note",
                      "start it with torchrun --nproc-per-node 2 -m autoshard doctor to look at links")
        return
    yield Finding("links", "ranks", f"{place.mesh.size} as {place.mesh}")
    carriers = place.carriers()
    for axis, group in place.groups.items():
        transport = _torch.transport(_torch.process_group(group), place.device.type)
        carrier = carriers.get(group)
        by = "" if carrier is None else ", carried by messages" if isinstance(carrier, Members) else ", carried by shared memory"
        yield Finding("links", axis, transport + by, *(("note", "ranks on one machine exchange faster through shared memory (x86 Linux)")
                                                      if isinstance(carrier, Members) and len(place.mesh.names) == 1 else ()))


def fits(profile: Cluster, place: Place) -> Iterator[Finding]:
    """Whether the profile can speak of these ranks and this device."""
    try:
        profile.links_for(place.mesh)
        yield Finding("profile", profile.name, profile.description or profile.device.name)
    except ClusterError as e:
        yield Finding("profile", profile.name, profile.device.name, "failed", str(e))
        return
    for what, advice in otherwise(profile.conditions, conditions_of(place)):
        yield Finding("profile", "conditions", what, "warning", advice)
    name, memory = device_of(place.device, int(os.environ.get("LOCAL_WORLD_SIZE", str(place.mesh.size))))
    capacity = profile.device.memory_capacity
    yield Finding("profile", "memory", f"{quantities.size(capacity)} in the profile, {quantities.size(memory)} here", *(
        ("warning", f"plans may not fit: pass memory_budget={quantities.size(memory)!r}, or calibrate") if capacity > 1.05 * memory else ()))
    other = ("CPU" in profile.device.name) != (place.device.type == "cpu")
    if other:
        yield Finding("profile", "device", f"{profile.device.name} in the profile, {name} here", "warning",
                      f"plans are for another kind of device: {CALIBRATE.format(place.mesh.size)}")


# --- the test ---

def parity(cluster: str, place: Place) -> Finding:
    """One step of a small model as planned here against the model itself: on these ranks, or where there is one, two in this process."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(251, 24), nn.Linear(24, 36), nn.GELU(), nn.LayerNorm(36), nn.Linear(36, 10)).double()
    ids, target = torch.randint(251, (12,)), torch.randint(10, (12,))
    if place.device_mesh is None:
        report = verify(model, "d=2", (ids, target), loss_fn=F.cross_entropy, plans=("searched", "split"), cluster=cluster)
        return Finding("self-test", "parity", f"2 ranks in one process: {'as one device' if report.ok else 'other numbers than one device'}",
                       *(() if report.ok else ("failed", "please report it, with the output of autoshard doctor --json")))
    compiled = api.compile(model, place.device_mesh, loss_fn=F.cross_entropy, cluster=cluster, cache=False)
    loss = compiled(ids.to(place.device), target.to(place.device))
    loss.backward()
    expected = F.cross_entropy(model(ids), target)
    expected.backward()
    wrong = max((p.grad.full_tensor().cpu() - q.grad).norm().item() / max(q.grad.norm().item(), 1e-12)
                for p, q in zip(compiled.parameters(), model.parameters(), strict=True))
    wrong = max(wrong, abs(loss.item() - expected.item()) / expected.item())
    return Finding("self-test", "parity", f"{place.mesh.size} ranks, loss and gradients within {wrong:.1g} of one device",
                   *(() if wrong < 1e-9 else ("failed", "please report it, with the output of autoshard doctor --json")))


def speed(profile: Cluster, place: Place, seconds: float, progress: Progress) -> list[Finding]:
    """Ops and collectives against the profile."""
    work = [*some_ops(place), *some_collectives(profile, place)]
    samples = time_rounds(work, Stopwatch(place), seconds, progress)
    found = errors(profile, samples)
    groups = {"ops": [e for e in found if e.sample.kind == "op"], "collectives": [e for e in found if e.sample.kind == "collective"]}
    return [_compared(name, mine, place.mesh) for name, mine in groups.items() if mine]


def some_collectives(profile: Cluster, place: Place) -> list[Work]:
    """Four sizes of each collective over each axis, as lowered programs call them."""
    if place.mesh.size == 1 or place.mesh.size > profile.limit:
        return []
    levels = [axis.levels for axis in profile.links_for(place.mesh)]
    link_of = [profile.links.index(pairs[-1][0]) if pairs else 0 for pairs in levels]
    return [w for w in collective_work(place, link_of) if w.sample.nbytes in NBYTES]


def some_ops(place: Place) -> Iterator[Work]:
    """A product, a sum of two tensors, a norm."""
    pool = Pool(torch.float32, place.device)
    for case in cases(place.device):
        for size in case.sizes[1:3] if str(case.target) in OPS else ():
            p = prepare(case, size, pool, False)
            yield Work(Sample("op", p.key, p.amount, 0.0, False, p.family, p.dtype, moved=p.moved), p.run, False)


def products(place: Place) -> Iterator[Finding]:
    """On a CPU: whether float32 products could be faster by a setting of torch, which is the user's to make."""
    if place.device.type != "cpu" or float32_products(place.device) != "ieee":
        return
    a, b = torch.randn(PRODUCT, PRODUCT), torch.randn(PRODUCT, PRODUCT).t()
    matmul, exact, watch = torch.backends.mkldnn.matmul, a.double() @ b.double(), Stopwatch(place)
    seconds, off, before = {}, {}, matmul.fp32_precision
    try:
        for name in ("ieee", "bf16"):  # what set_float32_matmul_precision sets for "highest" and "medium"
            matmul.fp32_precision = name
            off[name] = ((a @ b - exact).norm() / exact.norm()).item()
            seconds[name] = median(watch.once(lambda: a @ b, 1) for _ in range(REPEATS))
    finally:
        matmul.fp32_precision = before
    ordinary, other = (2e-9 * PRODUCT**3 / seconds[name] for name in ("ieee", "bf16"))
    value = (f"{ordinary:.0f} GFLOP/s, off by {off['ieee']:.0e}; {other:.0f}, off by {off['bf16']:.0e}, "
             "with torch.set_float32_matmul_precision('medium')")
    advice = "if that is exact enough, set it before compiling, and calibrate with --float32-matmul medium"
    yield Finding("self-test", "float32 products", value, *(("note", advice) if other > CLOSE * ordinary else ()))


def _compared(name: str, found: Sequence[Error], mesh: Mesh) -> Finding:
    """How many times as long as predicted things took, in the middle, and the worst."""
    ratio = exp(median(log(e.sample.seconds / e.predicted) for e in found))
    worst = max(found, key=lambda e: abs(log(e.sample.seconds / e.predicted)))
    value = (f"{ratio:.2f} times the predicted time in the middle of {len(found)}, {worst.sample.seconds / worst.predicted:.2f} at worst "
             f"({worst.sample.key}, {quantities.size(worst.sample.nbytes or worst.sample.moved)})")
    off = max(ratio, 1 / ratio)
    advice = f"calibrate: {CALIBRATE.format(max(mesh.size, 2))}"
    return Finding("self-test", name, value, *(() if off <= CLOSE else ("note", advice) if off <= FAR else
                                               ("warning", f"plans may be wrong ones; {advice}")))


def _tested(name: str, test: Callable[[], Finding]) -> Finding:
    """A test that ends with one of our errors has failed."""
    try:
        return test()
    except (AutoshardError, dist.DistError) as e:
        return Finding("self-test", name, f"{type(e).__name__}: {e}", "failed", "please report it, with the output of autoshard doctor --json")
