"""The machine as the planner sees it: a profile of numbers with sources, never the machine it runs on.

A profile is a TOML file; every number is written `{ value = ..., source = "..." }`. See docs/add-a-cluster.md.
Units: seconds, bytes, bytes/s, FLOP/s.
"""
from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from importlib import resources
from math import inf, prod
from pathlib import Path
from typing import Any

import torch

from autoshard.base.mesh import Mesh
from autoshard.collectives import KINDS
from autoshard.cost.curve import Curve
from autoshard.cost.reader import Reader
from autoshard.errors import ClusterError
from autoshard.rules.family import PRICED, Family

VERSION = 1
OPTIMIZER = "optimizer"


@dataclass(frozen=True)
class HostLink:
    """The way between a device and its host's memory: `latency` s per copy, `bandwidth` bytes/s each way from and to pinned memory."""

    latency: float
    bandwidth: float


@dataclass(frozen=True)
class Device:
    """One device.

    peak              (dtype name, dense FLOP/s) pairs, dtype names as torch writes them ("bfloat16")
    memory_bandwidth  bytes/s;  memory_capacity  bytes;  kernel_overhead  seconds an op costs at least
    efficiency        (op family, achievable fraction of peak or bandwidth) pairs: every family in `PRICED`, others where they differ from
                      what they are priced as
    measured          (what, seconds over amount) pairs that stand in for the roofline; see `curve_of`
    fuses             whether the backend these numbers are for runs a chain of pointwise ops as one kernel
    allocator_slack   fraction of live bytes that the allocator takes on top (rounding, holes)
    updates_together  whether the optimizer updates all parameters in one call (foreach), or one by one
    host_link         to the host's memory; None: nothing can be offloaded
    """

    name: str
    peak: tuple[tuple[str, float], ...]
    memory_bandwidth: float
    memory_capacity: float
    kernel_overhead: float
    efficiency: tuple[tuple[str, float], ...]
    measured: tuple[tuple[str, Curve], ...] = ()
    fuses: bool = False
    allocator_slack: float = 0.0
    updates_together: bool = True
    host_link: HostLink | None = None

    @cached_property
    def _measured(self) -> dict[str, Curve]:
        return dict(self.measured)

    def curve_of(self, op: str, family: str, dtype: torch.dtype) -> Curve | None:
        """The measured curve of an op ("aten::gelu"), else of its family, else of what that is priced as, a dtype's own before the
        common one: keys "aten::gelu/bfloat16", "aten::gelu", "pointwise/bfloat16", "pointwise". None: use the roofline.

        Amounts are FLOP for matmul, attention and conv, bytes read and written for the others."""
        if not self.measured:
            return None
        name = str(dtype).removeprefix("torch.")
        keys = [f"{op}/{name}", op, f"{family}/{name}", family]
        if isinstance(family, Family) and family.priced_as is not family:
            keys += [f"{family.priced_as}/{name}", family.priced_as]
        return next((self._measured[k] for k in keys if k in self._measured), None)

    @cached_property
    def _peak(self) -> dict[str, float]:
        return dict(self.peak)

    @cached_property
    def _efficiency(self) -> dict[Family, float]:
        given = dict(self.efficiency)
        return {f: given[f] if f in given else given[f.priced_as] for f in Family if f in given or f.priced_as in given}

    def peak_flops(self, dtype: torch.dtype) -> float:
        """FLOP/s for `dtype`; dtypes without a number of their own (integers) run at the float32 rate."""
        return self._peak.get(str(dtype).removeprefix("torch."), self._peak["float32"])

    def efficiency_of(self, family: Family) -> float:
        """Achievable fraction for an op family. Raises ClusterError for a device that was made without it."""
        if family not in self._efficiency:
            raise ClusterError(f"{self.name} has no efficiency for op family {family.priced_as.value!r}; give one for each of {', '.join(PRICED)}")
        return self._efficiency[family]


@dataclass(frozen=True)
class InNetwork:
    """An all_reduce that the switch computes: `overhead` s per call, `bandwidth` bytes/s of the reduced buffer
    (nccl-tests' algorithm bandwidth), whatever the number of ranks."""

    overhead: float
    bandwidth: float


@dataclass(frozen=True)
class Link:
    """One level of the physical hierarchy.

    devices     devices one domain of this link joins (8 in a node); inf for no limit
    latency     seconds per step of an algorithm;  overhead  seconds per collective call
    bandwidth   bytes/s one device can send while it receives as much, as the data sheet says
    efficiency  fraction of it that collectives reach (bus bandwidth / bandwidth)
    oversubscription  bandwidth of all devices below a switch / bandwidth out of it, when all send at once
    in_network  what an all_reduce in the switch reaches (NVLS, SHARP); None: the switch cannot reduce
    measured    (collective, seconds over bytes on the wire) pairs: overhead and transfer without the steps'
                latency, instead of overhead + bytes / bus bandwidth
    """

    name: str
    devices: float
    latency: float
    overhead: float
    bandwidth: float
    efficiency: float
    oversubscription: float = 1.0
    in_network: InNetwork | None = None
    measured: tuple[tuple[str, Curve], ...] = ()

    @cached_property
    def bus_bandwidth(self) -> float:
        return self.bandwidth * self.efficiency / self.oversubscription

    def curve_of(self, kind: str) -> Curve | None:
        return next((curve for name, curve in self.measured if name == kind), None)


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

    eta: float
    interference: float


@dataclass(frozen=True)
class Cluster:
    """A profile: the device, its links innermost first, and how well communication overlaps compute."""

    name: str
    device: Device
    links: tuple[Link, ...]
    overlap: Overlap
    description: str = field(default="", compare=False)
    sources: tuple[tuple[str, str], ...] = field(default=(), compare=False)

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
        return {"version": VERSION, "name": self.name, "description": self.description,
                "device": _plain(self.device, "peak", "efficiency", "measured"),
                "links": [_plain(link, "measured") for link in self.links], "overlap": _plain(self.overlap)}

    @staticmethod
    def from_snapshot(data: Mapping[str, Any]) -> "Cluster":
        """Inverse of `snapshot`. Raises ClusterError, naming the key, for anything that is not physical."""
        return _build(data, f"cluster {data.get('name', '?')}" if isinstance(data, Mapping) else "cluster", ())


def _plain(item: Any, *pairs: str) -> dict[str, Any]:
    """Fields of a dataclass as JSON has them: fields named in `pairs` become tables, what is at its default is left out."""
    out = {f.name: getattr(item, f.name) for f in fields(item) if getattr(item, f.name) != f.default}
    out |= {k: {name: v.points if isinstance(v, Curve) else v for name, v in out[k]} for k in pairs if k in out}
    return {k: _plain(v) if isinstance(v, (InNetwork, HostLink)) else v for k, v in out.items() if v != inf}


def available() -> tuple[str, ...]:
    """Names of the built-in profiles."""
    files = resources.files("autoshard.cost").joinpath("clusters").iterdir()
    return tuple(sorted(f.name.removesuffix(".toml") for f in files if f.name.endswith(".toml")))


def load_cluster(name_or_path: str | Path) -> Cluster:
    """A built-in profile by name, or a user's own TOML file by path.

    Raises ClusterError: unknown name (with the nearest ones), unreadable file, missing or non-physical number."""
    text = str(name_or_path)
    if text in available():
        return _parse(resources.files("autoshard.cost").joinpath("clusters", f"{text}.toml").read_text(), text)
    if not text.endswith(".toml") and not Path(text).is_file():
        near = difflib.get_close_matches(text, available(), n=3, cutoff=0.3) or available()
        raise ClusterError(f"no cluster profile {text!r}; did you mean {' or '.join(near)}? "
                           "(a path to a .toml file also works)")
    try:
        return _parse(Path(text).read_text(), text)
    except (OSError, UnicodeDecodeError) as e:
        raise ClusterError(f"cannot read cluster profile {text}: {e}") from None


def _parse(text: str, origin: str) -> Cluster:
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as e:
        raise ClusterError(f"cluster profile {origin} is not TOML: {e}") from None
    sources: list[tuple[str, str]] = []
    return _build(_strip_sources(raw, "", sources, origin), f"cluster profile {origin}", sources)


def _strip_sources(value: Any, path: str, sources: list[tuple[str, str]], origin: str) -> Any:
    """Replace every `{value, source}` by its value and note the source; a bare number has none and is refused."""
    if isinstance(value, dict) and "value" in value:
        if not isinstance(value.get("source"), str) or not value["source"].strip():
            raise ClusterError(f"cluster profile {origin}: {path} has no source; write source = \"where the number is from\"")
        sources.append((path, value["source"]))
        return value["value"]
    if isinstance(value, dict):
        return {k: _strip_sources(v, f"{path}.{k}".lstrip("."), sources, origin) for k, v in value.items()}
    if isinstance(value, list):
        return [_strip_sources(v, f"{path}[{i}]", sources, origin) for i, v in enumerate(value)]
    if isinstance(value, (int, float)) and not isinstance(value, bool) and path != "version":
        raise ClusterError(f"cluster profile {origin}: {path} is a bare number; "
                           f"write {path.rpartition('.')[2]} = {{ value = {value}, source = \"...\" }}")
    return value


def _build(data: Any, origin: str, sources: Any) -> Cluster:
    top = Reader(data, origin, "")
    if top.take("version", object) != VERSION:
        raise ClusterError(f"{origin}: version is not {VERSION}, the format this autoshard reads")
    links = top.take("links", list)
    if not links:
        raise ClusterError(f"{origin}: links is empty; give at least one [[links]]")
    cluster = Cluster(
        name=top.take("name", str), device=_device(top.table("device")),
        links=tuple(_link(Reader(link, origin, f"links[{i}]")) for i, link in enumerate(links)),
        overlap=_overlap(top.table("overlap")), description=top.take("description", str, ""), sources=tuple(sources))
    top.finish()
    for inner, outer in zip(cluster.links, cluster.links[1:], strict=False):
        if outer.devices <= inner.devices:
            raise ClusterError(f"{origin}: link {outer.name} joins {outer.devices:g} devices, not more than the "
                               f"{inner.devices:g} of {inner.name}; list links innermost first")
    return cluster


def _device(r: Reader) -> Device:
    peak, efficiency = r.table("peak"), r.table("efficiency")
    rates = tuple((k, peak.number(k)) for k in sorted(peak.keys() | {"float32"}))
    wanted = (*PRICED, *(f for f in Family if f not in PRICED and not f.free and f in efficiency.keys()))
    fractions = tuple((f.value, efficiency.fraction(f.value, above_zero=True)) for f in wanted)
    efficiency.finish()
    out = Device(r.take("name", str), rates, r.number("memory_bandwidth"), r.number("memory_capacity"),
                 r.number("kernel_overhead"), fractions, r.curves("measured"), r.take("fuses", bool, False),
                 r.fraction("allocator_slack") if "allocator_slack" in r.keys() else 0.0, r.take("updates_together", bool, True),
                 r.numbers("host_link", HostLink))
    r.finish()
    for key, _ in out.measured:
        if "::" not in key and key.partition("/")[0] not in (*Family, OPTIMIZER):
            raise ClusterError(f"{r.where('measured')} has a curve for {key!r}; name an op (aten::gelu) or a family "
                               f"({', '.join(f for f in Family if not f.free)}, {OPTIMIZER}), with a dtype or without (matmul/float32)")
    return out


def _link(r: Reader) -> Link:
    out = Link(r.take("name", str), r.number("devices", inf), r.number("latency"), r.number("overhead"),
               r.number("bandwidth"), r.fraction("efficiency", above_zero=True), r.number("oversubscription", 1.0),
               r.numbers("in_network", InNetwork), r.curves("measured", tuple(KINDS)))
    r.finish()
    if out.oversubscription < 1:
        raise ClusterError(f"{r.where('oversubscription')} is {out.oversubscription:g}; it is 1 (none) or more")
    if out.in_network is not None and out.in_network.bandwidth > out.bandwidth:
        raise ClusterError(f"{r.where('in_network.bandwidth')} is above the link's bandwidth; give the bytes/s of the "
                           "reduced buffer (algorithm bandwidth of nccl-tests), not the bus bandwidth")
    return out


def _overlap(r: Reader) -> Overlap:
    out = Overlap(r.fraction("eta"), r.fraction("interference"))
    r.finish()
    return out
