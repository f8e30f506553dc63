"""From a started process to a profile: join the peers, measure, fit."""
from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date, timedelta

import torch
import torch.distributed as dist

from autoshard import _torch
from autoshard.base.mesh import Mesh, parse_mesh
from autoshard.calibrate.fit import Error, errors, fit
from autoshard.calibrate.measure import Progress, Rounds, Stopwatch, all_work
from autoshard.calibrate.overlap import Timing, fitted, measure_overlap
from autoshard.calibrate.sample import Machine, Sample
from autoshard.calibrate.step import STEPS, Steps, steps_of
from autoshard.cost.cluster import Cluster, Overlap
from autoshard.errors import ClusterError, MeshError, UsageError
from autoshard.runtime.ranks.conditions import conditions_of
from autoshard.runtime.ranks.place import Place, locate

PEER_WORDS = ("gloo", "nccl", "connection", "peer", "timed out", "timeout")
"""What the text of a plain RuntimeError has in it when a collective failed; gloo has no error type of its own."""
DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class Calibration:
    """`timings` of the overlap measurement are None on one rank."""

    cluster: Cluster
    samples: tuple[Sample, ...]
    errors: tuple[Error, ...]
    timings: tuple[Timing, Timing] | None

    @property
    def source(self) -> str:
        """Where every number of the profile is from: "calibrated 2026-01-31"."""
        return self.cluster.description.rpartition("; ")[2]


def check_seconds(seconds: float, timeout: float) -> None:
    """Raises UsageError for what is no time to measure or to wait."""
    for option, given in (("seconds", seconds), ("timeout", timeout)):
        if not 0 < given <= 1e9:
            raise UsageError(f"--{option} {given:g}: give a positive number of seconds")


def calibrate(name: str, mesh: str | None, *, seconds: float, timeout: float, progress: Progress) -> tuple[Calibration, bool]:
    """Measure this machine. Every rank calls it; (result, whether this is the rank that reports).

    mesh     axes to measure; default: one axis inside nodes and one across them, as the launcher says
    seconds  about how long to measure;  timeout  how long to wait for a peer

    Raises ClusterError when peers cannot be reached or one goes away, MeshError for a mesh that does not fit."""
    check_seconds(seconds, timeout)
    wanted = launched_mesh(mesh)
    with peers(timeout):
        place = locate(wanted)
        taken = Measuring(name, place, progress)
        taken.rounds.run(seconds, progress)
        taken.some_steps(STEPS)
        return taken.found(), place.is_leader


class Measuring:
    """What a profile is made of, measured in pieces that may be taken between other things; all ranks do the same. `rounds` of collectives, ops and
    updates, `steps` on a CPU, and how much overlaps, which is measured at once."""

    def __init__(self, name: str, place: Place, progress: Progress) -> None:
        self.machine, link_of = _machine(name, place)
        progress("calibrate", "preparing")
        self.rounds = Rounds(all_work(place, link_of, DTYPES), Stopwatch(place))
        self.steps: Steps | None = steps_of(place, progress)
        self.timings: tuple[Timing, Timing] | None = None
        if place.mesh.size > 1:
            progress("calibrate", "overlap")
            self.timings = measure_overlap(place)

    def some_steps(self, steps: int) -> None:
        """So many more steps of the two stacks, where their time counts."""
        if self.steps is not None:
            self.steps.go(steps)

    def found(self) -> Calibration:
        """By all that was measured so far."""
        samples = [*self.rounds.samples(), *(self.steps.samples() if self.steps is not None else ())]
        cluster = fit(self.machine, samples, fitted(*self.timings) if self.timings else Overlap(0.0, 1.0))
        return Calibration(cluster, tuple(samples), tuple(errors(cluster, samples)), self.timings)


def launched_mesh(text: str | None) -> Mesh:
    """The mesh asked for, or ranks by node."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if text is not None:
        mesh = parse_mesh(text)
        if mesh.size != world:
            raise MeshError(f"mesh {mesh} has {mesh.size} ranks, but {world} processes run; start as many with "
                            f"torchrun --nproc-per-node {mesh.size}, or change --mesh")
        return mesh
    local = int(os.environ.get("LOCAL_WORLD_SIZE", str(world)))
    if world > local and world % local == 0:
        return Mesh(("node", "local"), (world // local, local))
    return Mesh(("local",), (world,))


@contextmanager
def peers(timeout: float) -> Iterator[None]:
    """The process group of the launcher, for the time of the block; what goes wrong with peers is a ClusterError."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        os.environ.pop("RANK", None)  # a launcher with one process: nobody to talk to
        yield
        return
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    where = f"{os.environ.get('MASTER_ADDR', '?')}:{os.environ.get('MASTER_PORT', '?')}"
    try:
        dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(seconds=timeout))
    except (dist.DistError, RuntimeError, ValueError) as e:
        raise ClusterError(f"could not reach all {os.environ['WORLD_SIZE']} processes at {where} within {timeout:g} s: "
                           f"{_first_line(e)}; check that every process was started and the address is reachable, or "
                           "raise --timeout") from None
    try:
        yield
    except (dist.DistError, RuntimeError) as e:
        if not isinstance(e, dist.DistError) and not any(word in str(e).lower() for word in PEER_WORDS):
            raise
        raise ClusterError(f"lost a peer while measuring (limit {timeout:g} s): {_first_line(e)}; see the other processes' "
                           "output") from e
    dist.barrier()
    dist.destroy_process_group()


def _first_line(e: BaseException) -> str:
    return (str(e).splitlines() or [type(e).__name__])[0].rstrip(".")


def _machine(name: str, place: Place) -> tuple[Machine, tuple[int, ...]]:
    """What is known without measuring, and per mesh axis the link it uses: a node's own, or the network between nodes."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", str(place.mesh.size)))
    cuda = place.device.type == "cuda"
    nodes = place.mesh.size > local
    links = (("nvlink" if cuda else "loopback"), "network") if nodes else (("nvlink" if cuda else "loopback"),)
    inner, link_of = 1, []
    for n in reversed(place.mesh.sizes):
        inner *= n
        link_of.append(1 if nodes and n > 1 and inner > local else 0)
    used = tuple(sorted(set(link_of)))
    link_of = [used.index(i) for i in reversed(link_of)]
    device, memory = device_of(place.device, local)
    backend = _torch.transport(dist.group.WORLD, place.device.type) if dist.is_initialized() else "one process"
    return Machine(name, device, backend, place.mesh.size, memory, tuple(links[i] for i in used),
                   tuple((local, place.mesh.size)[i] for i in used), date.today().isoformat(), conditions_of(place)), tuple(link_of)


def device_of(device: torch.device, local: int) -> tuple[str, float]:
    """(what it is, bytes of memory it has)."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return properties.name, float(properties.total_memory)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / local
    return f"{platform.machine()} CPU, {torch.get_num_threads()} thread(s), torch {torch.__version__}", float(memory)
