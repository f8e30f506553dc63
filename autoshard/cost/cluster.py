"""The machine as the planner sees it: a profile of numbers with sources, never the machine it runs on.

A profile is a TOML file; every number has a source: `{ value = ..., source = "..." }`, or one `source` for all. See docs/add-a-cluster.md.
Units: seconds, bytes, bytes/s, FLOP/s.
"""
from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib import resources
from math import inf, prod
from pathlib import Path
from typing import Any

import torch

from autoshard.base.mesh import Mesh
from autoshard.base.typed_data import Fraction, Positive, Share, as_data, not_a_key, read_as
from autoshard.collectives import KINDS
from autoshard.cost.curve import Curve, Points, problem
from autoshard.cost.variants import pick, split_name, variants_of
from autoshard.errors import ClusterError
from autoshard.rules.family import PRICED, Family

VERSION = 1
OPTIMIZER = "optimizer"


@dataclass(frozen=True)
class HostLink:
    """The way between a device and its host's memory: `latency` s per copy, `bandwidth` bytes/s each way from and to pinned memory."""

    latency: Positive
    bandwidth: Positive


@dataclass(frozen=True)
class OwnHost:
    """What a CPU takes in Python, computing nothing meanwhile; plans do not count it, since it is about the same in all plans of a model.

    view       seconds of a view
    step       seconds of a training step in no op, collective or update: autograd, zero_grad;  parameter  more for each parameter"""

    view: Positive
    step: Positive
    parameter: Positive


@dataclass(frozen=True)
class Device:
    """One device.

    peak              dense FLOP/s by dtype, named as torch writes it ("bfloat16")
    memory_bandwidth  bytes/s;  memory_capacity  bytes;  kernel_overhead  seconds an op costs at least
    efficiency        achievable fraction of peak or bandwidth by op family: every family in `PRICED`, others where they differ from
                      what they are priced as
    bandwidth_efficiency  achievable fraction of the bandwidth, for families that count FLOP: what they reach where memory is the limit
                      (one row times a matrix). Families left out reach the same fraction of both
    multiprocessors   how many tiles of a matrix product it computes at once, see tiles.py; None: shapes play no part
    launch            seconds in which its host issues one op in an eager stream, ahead of the device: simulations then wait for the
                      host where ops are short. None: the host is never waited for, or computes itself
    own_host          what a device that is its own host takes besides ops: simulations of what is executed count it. None: nothing
    measured          seconds over amount, by what they stand in for on the roofline; see `curve_of`
    byte_flop         FLOP that a byte moved counts for on a measured curve over FLOP (`Curve.per_byte`), by the curve's key; left out: none
    fuses             whether the backend these numbers are for runs a chain of pointwise ops as one kernel
    allocator_slack   fraction of live bytes that the allocator takes on top (rounding, holes)
    updates_together  whether the optimizer updates all parameters in one call (foreach), or one by one
    host_link         to the host's memory; None: nothing can be offloaded
    imbalance         work of the busiest rank over that of an even load, where the data decides which rank works (experts)
    """

    name: str
    peak: Mapping[str, Positive] = field(hash=False)
    memory_bandwidth: Positive
    memory_capacity: Positive
    kernel_overhead: Positive
    efficiency: Mapping[str, Share] = field(hash=False)
    measured: Mapping[str, Points] = field(default_factory=dict, hash=False)
    fuses: bool = False
    allocator_slack: Fraction = 0.0
    updates_together: bool = True
    host_link: HostLink | None = None
    bandwidth_efficiency: Mapping[str, Share] = field(default_factory=dict, hash=False)
    multiprocessors: Positive | None = None
    launch: Positive | None = None
    own_host: OwnHost | None = None
    imbalance: Positive = 1.0
    byte_flop: Mapping[str, Positive] = field(default_factory=dict, hash=False)

    @cached_property
    def _curves(self) -> dict[str, Curve]:
        return {name: Curve.through(points, self.byte_flop.get(name, 0.0)) for name, points in self.measured.items()}

    def curve_of(self, op: str, family: str, dtype: torch.dtype) -> Curve | None:
        """The measured curve of an op ("aten::gelu"), else of its family, else of what that is priced as, a dtype's own before the
        common one: keys "aten::gelu/bfloat16", "aten::gelu", "pointwise/bfloat16", "pointwise". None: use the roofline.

        Amounts are FLOP for matmul, attention and conv (see `byte_flop`), bytes read and written for the others."""
        if not self.measured:
            return None
        name = str(dtype).removeprefix("torch.")
        keys = [f"{op}/{name}", op, f"{family}/{name}", family]
        if isinstance(family, Family) and family.priced_as is not family:
            keys += [f"{family.priced_as}/{name}", family.priced_as]
        return next((self._curves[k] for k in keys if k in self._curves), None)

    @cached_property
    def _efficiency(self) -> dict[Family, float]:
        given = self.efficiency
        return {f: given[f] if f in given else given[f.priced_as] for f in Family if f in given or f.priced_as in given}

    def peak_flops(self, dtype: torch.dtype) -> float:
        """FLOP/s for `dtype`; dtypes without a number of their own (integers) run at the float32 rate."""
        return self.peak.get(str(dtype).removeprefix("torch."), self.peak["float32"])

    def efficiency_of(self, family: Family) -> float:
        """Achievable fraction for an op family. Raises ClusterError for a device that was made without it."""
        if family not in self._efficiency:
            raise ClusterError(f"{self.name} has no efficiency for op family {family.priced_as.value!r}; give one for each of {', '.join(PRICED)}")
        return self._efficiency[family]

    def reached_bandwidth(self, family: Family) -> float:
        """Bytes/s that ops of a family move where memory is the limit. Raises ClusterError as `efficiency_of`."""
        given = self.bandwidth_efficiency
        share = given[family] if family in given else given.get(family.priced_as)
        return self.memory_bandwidth * (self.efficiency_of(family) if share is None else share)


@dataclass(frozen=True)
class InNetwork:
    """An all_reduce that the switch computes: `overhead` s per call, `bandwidth` bytes/s of the reduced buffer
    (nccl-tests' algorithm bandwidth), whatever the number of ranks."""

    overhead: Positive
    bandwidth: Positive


@dataclass(frozen=True)
class OneShot:
    """Kernels that read and write peers' memory, without steps: `overhead` s per call, for buffers of at most `up_to` bytes."""

    overhead: Positive
    up_to: Positive


@dataclass(frozen=True)
class Link:
    """One level of the physical hierarchy.

    devices     devices one domain of this link joins (8 in a node); inf for no limit
    latency     seconds per step of an algorithm;  overhead  seconds per collective call
    bandwidth   bytes/s one device can send while it receives as much, as the data sheet says
    efficiency  fraction of it that collectives reach (bus bandwidth / bandwidth)
    oversubscription  bandwidth of all devices below a switch / bandwidth out of it, when all send at once
    in_network  what an all_reduce in the switch reaches (NVLS, SHARP); None: the switch cannot reduce
    one_shot    all_reduce, all_gather and reduce_scatter of small buffers by kernels of one step, where the library that runs the plan
                has them; None: it has not
    measured    seconds over bytes on the wire by collective: overhead and transfer without the steps'
                latency, instead of overhead + bytes / bus bandwidth
    """

    name: str
    latency: Positive
    overhead: Positive
    bandwidth: Positive
    efficiency: Share
    devices: Positive = inf
    oversubscription: Positive = 1.0
    in_network: InNetwork | None = None
    measured: Mapping[str, Points] = field(default_factory=dict, hash=False)
    one_shot: OneShot | None = None

    @cached_property
    def bus_bandwidth(self) -> float:
        return self.bandwidth * self.efficiency / self.oversubscription

    def curve_of(self, kind: str) -> Curve | None:
        return self._curves.get(kind)

    @cached_property
    def _curves(self) -> dict[str, Curve]:
        return {name: Curve.through(points) for name, points in self.measured.items()}


@dataclass(frozen=True)
class AxisLink:
    """The links one mesh axis uses: (link, ranks along it) pairs, innermost first, sizes above 1 only.

    Two pairs make the axis hierarchical: groups of `levels[0][1]` ranks inside a node, `levels[1][1]` nodes."""

    levels: tuple[tuple[Link, int], ...]

    @property
    def size(self) -> int:
        out = 1
        for _, n in self.levels:
            out *= n
        return out


@dataclass(frozen=True)
class Overlap:
    """eta: fraction of matmul-like compute behind which collectives can hide (0: no overlap).
    interference: fraction of a hidden collective's time that is paid all the same, because it takes
    compute units and memory bandwidth from the compute it hides behind."""

    eta: Fraction
    interference: Fraction


@dataclass(frozen=True)
class Cluster:
    """A profile: the device, its links innermost first, and how well communication overlaps compute. `variants`: names of what its file has
    beside it, see variants.py. `conditions`: what else held when it was measured ("collectives": "shared memory"), see runtime/ranks."""

    name: str
    device: Device
    links: tuple[Link, ...]
    overlap: Overlap
    description: str = field(default="", compare=False)
    sources: tuple[tuple[str, str], ...] = field(default=(), compare=False)
    variants: tuple[str, ...] = field(default=(), compare=False)
    conditions: Mapping[str, str] = field(default_factory=dict, compare=False)

    @property
    def limit(self) -> float:
        """Devices in the whole cluster; inf when the profile does not limit it."""
        return self.links[-1].devices

    def links_for(self, mesh: Mesh) -> tuple[AxisLink, ...]:
        """Per mesh axis the links it uses, when ranks fill nodes in order (minor axes inside the node first).

        A group that would straddle node borders unevenly is priced as if all of it crossed them.
        Raises ClusterError for a mesh larger than the cluster."""
        if mesh.size > self.limit:
            raise ClusterError(f"mesh {mesh} needs {mesh.size} devices, cluster {self.name} has {int(self.limit)}; "
                               "use a smaller mesh or another profile")
        out, stride = [], 1
        for n in reversed(mesh.sizes):
            out.append(self._axis_link(n, stride, mesh.size))
            stride *= n
        return tuple(reversed(out))

    def link_of(self, mesh: Mesh, axes: Sequence[int]) -> AxisLink:
        """The links of several mesh axes taken as one, whose ranks multiply on every level: (2, 8) on nodes of 8 is one axis of 8
        inside a node and 2 nodes. Raises ClusterError for a mesh larger than the cluster."""
        parts = [level for i in axes for level in self.links_for(mesh)[i].levels]
        levels = ((link, prod(n for own, n in parts if own is link)) for link in self.links)
        return AxisLink(tuple((link, n) for link, n in levels if n > 1))

    def _axis_link(self, n: int, stride: int, total: int) -> AxisLink:
        levels = []
        for link in self.links:
            inner = n if total <= link.devices else max(
                k for k in range(1, n + 1) if n % k == 0 and (k == 1 or link.devices % (stride * k) == 0))
            if inner > 1:
                levels.append((link, inner))
            n, stride = n // inner, stride * inner
        return AxisLink(tuple(levels))

    def snapshot(self) -> dict[str, Any]:
        """Plain JSON-able numbers, enough to price with: what a plan keeps of its cluster."""
        data = as_data(replace(self, sources=(), variants=()), Cluster, sparse=True)
        return {"version": VERSION, "description": self.description, **data}

    @staticmethod
    def from_snapshot(data: Mapping[str, Any]) -> "Cluster":
        """Inverse of `snapshot`. Raises ClusterError, naming the key, for anything that is not physical."""
        return _read(data, f"cluster {data.get('name', '?')}" if isinstance(data, Mapping) else "cluster")


def available() -> tuple[str, ...]:
    """Names of the built-in profiles."""
    files = (f.name for f in resources.files("autoshard.cost").joinpath("clusters").iterdir())
    return tuple(sorted(name.removesuffix(".toml") for name in files if name.endswith(".toml")))


def load_cluster(name_or_path: str | Path | Cluster) -> Cluster:
    """A built-in profile by name, or a user's own TOML file by path; with `:variant` behind it, that variant of it. One that is loaded is itself.

    Raises ClusterError: unknown name (with the nearest ones), unreadable file, missing or non-physical number, no such variant."""
    if isinstance(name_or_path, Cluster):
        return name_or_path
    text, variant = split_name(str(name_or_path))
    if text in available():
        return _parse(resources.files("autoshard.cost").joinpath("clusters", f"{text}.toml").read_text(), text, variant)
    if not text.endswith(".toml") and not os.path.isfile(text):  # False also for what no path can be
        near = difflib.get_close_matches(text, available(), n=3, cutoff=0.3) or available()
        raise ClusterError(f"no cluster profile {text!r}; did you mean {' or '.join(near)}? (a path to a .toml file also works)")
    try:
        return _parse(Path(text).read_text(), text, variant)
    except (OSError, UnicodeDecodeError) as e:
        raise ClusterError(f"cannot read cluster profile {text}: {e}") from None


def _parse(text: str, name: str, variant: str) -> Cluster:
    """Every variant is read, so that what is wrong in one is found."""
    origin = f"cluster profile {name}"
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as e:
        raise ClusterError(f"{origin} is not TOML: {e}") from None
    changed = variants_of(raw, origin)
    plain = replace(_read_sourced(raw, origin), variants=tuple(changed))
    read = {key: _read_sourced(whole, f"{origin}:{key}") for key, whole in changed.items()}
    return pick(read, variant, origin) if variant else plain


def _read_sourced(raw: dict[str, Any], origin: str) -> Cluster:
    sources: list[tuple[str, str]] = []
    common = raw.get("source", "")
    data = _strip_sources({k: v for k, v in raw.items() if k != "source"}, "", sources, origin, common if isinstance(common, str) else "")
    return replace(_read(data, origin), sources=tuple(sources))


def _strip_sources(value: Any, path: str, sources: list[tuple[str, str]], origin: str, common: str) -> Any:
    """Replace every `{value, source}` by its value and note the source; a bare number is from the `common` one, and refused without it."""
    if isinstance(value, dict) and "value" in value:
        if not isinstance(value.get("source"), str) or not value["source"].strip():
            raise ClusterError(f"{origin}: {path} has no source; write source = \"where the number is from\"")
        sources.append((path, value["source"]))
        return value["value"]
    if isinstance(value, dict):
        return {k: _strip_sources(v, f"{path}.{k}".lstrip("."), sources, origin, common) for k, v in value.items()}
    if isinstance(value, list):
        return [_strip_sources(v, f"{path}[{i}]", sources, origin, common) for i, v in enumerate(value)]
    if isinstance(value, (int, float)) and not isinstance(value, bool) and path != "version":
        if not common.strip():
            raise ClusterError(f"{origin}: {path} is a bare number; write {path.rpartition('.')[2]} = {{ value = {value}, source = \"...\" }}, "
                               "or one source = \"...\" for all numbers at the top")
        sources.append((path, common))
    return value


def _read(data: Any, origin: str) -> Cluster:
    version = (data := dict(data)).pop("version", "missing")
    try:
        if version != VERSION or type(version) is not int:
            raise ValueError(f"version is {version if version == 'missing' else f'not {VERSION}, the format this autoshard reads'}")
        if "sources" in data:
            raise ValueError(not_a_key("sources", ()))
        cluster = read_as(Cluster, data)
        _check_device(cluster.device)
        _check_links(cluster.links)
    except ValueError as e:
        raise ClusterError(f"{origin}: {e}") from None
    return cluster


def _check_device(device: Device) -> None:
    """Raises ValueError for what the types of the fields do not say."""
    missing = ["device.peak.float32"] * ("float32" not in device.peak) + [f"device.efficiency.{f}" for f in PRICED if f not in device.efficiency]
    if missing:
        raise ValueError(f"{missing[0]} is missing")
    if device.imbalance < 1:
        raise ValueError(f"device.imbalance is {device.imbalance:g}; it is 1 (even loads) or more")
    families = [f.value for f in Family if not f.free]
    for key in sorted(device.efficiency.keys() - families):
        raise ValueError(not_a_key(f"device.efficiency.{key}", families))
    heavy = [f.value for f in Family if f.heavy]
    for key in sorted(device.bandwidth_efficiency.keys() - heavy):
        raise ValueError(not_a_key(f"device.bandwidth_efficiency.{key}", heavy))
    if (device.multiprocessors or 1) % 1:
        raise ValueError(f"device.multiprocessors is {device.multiprocessors:g}; a whole number is needed")
    for key, points in device.measured.items():
        if "::" not in key and key.partition("/")[0] not in (*Family, OPTIMIZER):
            raise ValueError(f"device.measured has a curve for {key!r}; name an op (aten::gelu) or a family "
                             f"({', '.join(families)}, {OPTIMIZER}), with a dtype or without (matmul/float32)")
        _check_curve(f"device.measured[{key!r}]", points)
    for key in sorted(device.byte_flop.keys() - device.measured.keys()):
        raise ValueError(not_a_key(f"device.byte_flop.{key}", tuple(device.measured)))


def _check_links(links: Sequence[Link]) -> None:
    """Raises ValueError for what the types of the fields do not say."""
    if not links:
        raise ValueError("links is empty; give at least one [[links]]")
    for i, link in enumerate(links):
        for key, points in link.measured.items():
            if key not in KINDS:
                raise ValueError(not_a_key(f"links[{i}].measured.{key}", tuple(KINDS)))
            _check_curve(f"links[{i}].measured.{key}", points)
        if link.oversubscription < 1:
            raise ValueError(f"links[{i}].oversubscription is {link.oversubscription:g}; it is 1 (none) or more")
        if link.in_network is not None and link.in_network.bandwidth > link.bandwidth:
            raise ValueError(f"links[{i}].in_network.bandwidth is above the link's bandwidth; give the bytes/s of the reduced buffer (algorithm "
                             "bandwidth of nccl-tests), not the bus bandwidth")
    for inner, outer in zip(links, links[1:], strict=False):
        if outer.devices <= inner.devices:
            raise ValueError(f"link {outer.name} joins {outer.devices:g} devices, not more than the {inner.devices:g} of {inner.name}; "
                             "list links innermost first")


def _check_curve(where: str, points: Points) -> None:
    if what := problem(points):
        raise ValueError(f"{where}: {what}")
