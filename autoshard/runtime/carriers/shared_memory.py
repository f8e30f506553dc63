"""Memory that the ranks of a process group on one machine share: the others read in place what one rank posts.

A message through the loopback is copied into the kernel and out of it, by a thread that first has to wake up: 2 MB take
a millisecond, and 4 bytes on average half of one while both cores compute. Here they are written once, and a rank that waits looks
at a counter.

Every rank has one segment: two counters, then a ring of posts. All ranks issue the same collectives in the same order, and
land them in the same order; so the counters "posted" and "landed", and the place of every post in its ring, need no messages.
"""
from __future__ import annotations

import ctypes
import logging
import mmap
import os
import platform
import secrets
import select
import time
import weakref
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from autoshard.errors import AutoshardError, CollectiveError
from autoshard.runtime.carriers.gloo_messages import Members, failed

SWITCH = "AUTOSHARD_SHARED_MEMORY"
"""An environment variable: 0 keeps ranks of one machine to messages, as between machines."""

log = logging.getLogger("autoshard")
RING = 64 << 20
"""Bytes of posts in a segment: gradients on their way at once are at most this many (plan.IN_FLIGHT), others wait one by one.
Pages that were never written take no memory."""
LAP = 16 << 20
"""Bytes of the ring behind which a post starts again at 0 if no other is under way: a long run writes no more pages than a step needs."""
HEADER, LINE = 4096, 64
"""Bytes before the ring; counters lie a cache line apart."""
POSTED, LANDED, TOKEN, SIZES = 0, 8, 16, 64
"""What is where in the header, in words of 8 bytes. Of the latest posts the sizes stand there, to notice ranks that run
different programs."""
KEPT, BITS = 256, 27
"""Posts whose size is kept, as number << BITS | bytes."""
SPIN, DOZE = 50e-6, 2e-3
"""Seconds a rank that waits looks at the counter all the time, and then in turns with whoever else wants the core; afterwards it
sleeps in between."""
NAP, LOOK = 50e-6, 0.5
"""Seconds of a sleep, and between looks at whether the others still live."""


@dataclass(frozen=True)
class Post:
    """The `number`-th post of every rank: `nbytes` at `start` of each ring."""

    number: int
    start: int
    nbytes: int


class Segment:
    """One rank's memory, its own or another's, as this process sees it."""

    def __init__(self, fd: int) -> None:
        self.memory = mmap.mmap(fd, HEADER + RING)
        self.counters = memoryview(self.memory)[:HEADER].cast("q")
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory)) + HEADER


class Shared:
    """The segments of a group's ranks. `pids`: their processes."""

    def __init__(self, group: Members, segments: list[Segment], pids: list[int], timeout: float) -> None:
        self.group, self.segments, self.timeout = group, segments, timeout
        self.me, self.n = group.me, group.n
        self.mine = segments[self.me]
        self.others = [k % self.n for k in range(self.me + 1, self.me + self.n)]
        self._alive = {rank: os.pidfd_open(pids[rank]) for rank in self.others}
        weakref.finalize(self, _close, tuple(self._alive.values()))
        self._posted = self._landed = self._next = 0
        self._clear = RING  # from `_next` to here lies no post
        self._flying: dict[int, Post] = {}
        self._old: list[tuple[Post, int]] = []  # landed, with how many had landed then

    def post(self, x: torch.Tensor) -> Post | None:
        """Let the others read contiguous `x`. None, on all ranks, where the ring has no room."""
        start = self._next if self._next + x.nbytes <= (RING if self._flying else LAP) else 0
        post = Post(self._posted, start, x.nbytes)
        if not 0 < x.nbytes <= RING or len(self._flying) >= KEPT // 2:
            return None
        if (start < self._next or start + x.nbytes > self._clear or len(self._old) > KEPT) and not self._reclaim(post):
            return None
        ctypes.memmove(self.mine.address + start, x.data_ptr(), x.nbytes)
        self._flying[post.number] = post
        self._posted += 1
        self._next = start + -(-x.nbytes // LINE) * LINE
        self.mine.counters[SIZES + post.number % KEPT] = post.number << BITS | post.nbytes
        self.mine.counters[POSTED] = self._posted
        return post

    def wait(self, post: Post) -> None:
        """Until everybody has posted it."""
        for rank in self.others:
            self._until(rank, POSTED, post.number + 1)
            number, nbytes = divmod(self.segments[rank].counters[SIZES + post.number % KEPT], 1 << BITS)
            if number == post.number and nbytes != post.nbytes:
                raise AutoshardError(f"{self._name(rank)} exchanges {nbytes} bytes where this rank exchanges {post.nbytes}; the ranks "
                                     "must run the same program: the same model in the same mode with inputs of the same shapes")

    def read(self, post: Post, rank: int, dtype: torch.dtype, first: int, count: int) -> torch.Tensor:
        """`count` elements from the `first` on of what `rank` posted, where they lie."""
        return torch.frombuffer(self.segments[rank].memory, dtype=dtype, count=count, offset=HEADER + post.start + first * dtype.itemsize)

    def copy(self, post: Post, rank: int, first: int, to: torch.Tensor) -> None:
        """Bytes of a post, from the `first` on, into a contiguous tensor."""
        ctypes.memmove(to.data_ptr(), self.segments[rank].address + post.start + first, to.nbytes)

    def land(self, post: Post) -> None:
        """This rank has read what it wants."""
        self._landed += 1
        self._old.append((self._flying.pop(post.number), self._landed))
        self.mine.counters[LANDED] = self._landed

    def _reclaim(self, post: Post) -> bool:
        """Wait until nobody reads what lay where `post` will lie. False: a post that is still under way lies there. This looks at all posts that are
        remembered, so it is for a post that comes near one, and for a ring of many."""
        if any(_overlap(post, p) for p in self._flying.values()):
            return False
        done = min(self.segments[rank].counters[LANDED] for rank in self.others)
        self._old = [(old, landed) for old, landed in self._old if landed > done]
        over = [landed for old, landed in self._old if _overlap(post, old)]
        if over:
            for rank in self.others:
                self._until(rank, LANDED, max(over))
            self._old = [(old, landed) for old, landed in self._old if not _overlap(post, old)]
        there = (*self._flying.values(), *(old for old, _ in self._old))
        self._clear = min((p.start for p in there if p.start > post.start), default=RING)
        return True

    def _until(self, rank: int, counter: int, wanted: int) -> None:
        counters = self.segments[rank].counters
        if counters[counter] >= wanted:
            return
        start = looked = time.monotonic()
        while counters[counter] < wanted:
            now = time.monotonic()
            if now - start > DOZE:
                time.sleep(NAP)
            elif now - start > SPIN:
                os.sched_yield()
            if now - looked > LOOK:
                looked, gone = now, self._gone(rank)
                if gone and counters[counter] < wanted:  # not one that came and then ended
                    raise AutoshardError(f"{self._name(rank)} ended while this rank waited for it in a collective; its own output says why")
                if now - start > self.timeout:
                    raise CollectiveError(f"{self._name(rank)} did not come to a collective for {now - start:.0f} s; the ranks must run the "
                                          "same program")

    def _name(self, rank: int) -> str:
        return f"rank {self.group.world[rank]}"

    def _gone(self, rank: int) -> bool:
        ended = select.poll()
        ended.register(self._alive[rank], select.POLLIN)
        return bool(ended.poll(0))


def _overlap(a: Post, b: Post) -> bool:
    return a.start < b.start + max(b.nbytes, 1) and b.start < a.start + max(a.nbytes, 1)


def on_one_machine() -> bool:
    """Whether all processes that the launcher started (torchrun) can share memory; what it says in the environment is equal on all of them."""
    here = os.environ.get("LOCAL_WORLD_SIZE")
    return here is not None and here == os.environ.get("WORLD_SIZE") and _can_share()


def share_memory(group: ProcessGroup, timeout: float) -> Shared | None:
    """Segments for a group whose ranks all run on one machine; None where they do not. All ranks of the group call this.
    Counters need stores to be seen in order, as x86 does."""
    token, fd, own = secrets.token_bytes(16), *_make()
    if own is not None:
        own.memory[8 * TOKEN:8 * TOKEN + 16] = token
    known = _told((os.getpid(), fd, token), group)
    segments = [own if rank == group.rank() else _open(*known[rank]) for rank in range(group.size())] if own is not None else [None]
    agreed = _told(all(segments), group)  # after this nobody needs the file any more
    if fd is not None:
        os.close(fd)
    return Shared(Members(group), segments, [pid for pid, _, _ in known], timeout) if all(agreed) else None


def _told(mine: Any, group: ProcessGroup) -> list[Any]:
    """What every rank has, in the order of ranks."""
    all_of_them: list[Any] = [None] * group.size()
    try:
        dist.all_gather_object(all_of_them, mine, group=group)
    except RuntimeError as e:
        raise failed(e) from e
    return all_of_them


def _close(fds: tuple[int, ...]) -> None:
    for fd in fds:
        os.close(fd)


def _can_share() -> bool:
    return os.environ.get(SWITCH) != "0" and platform.machine() in ("x86_64", "AMD64") and hasattr(os, "memfd_create") and hasattr(os, "pidfd_open")


def _make() -> tuple[int | None, Segment | None]:
    """A file and its memory. The others must hear of it where this rank gets none: they wait for its answer."""
    if not _can_share():
        return None, None
    fd = None
    try:
        fd = os.memfd_create("autoshard")  # gone with the last process that maps it
        os.ftruncate(fd, HEADER + RING)
        return fd, Segment(fd)
    except OSError as e:
        log.warning("no memory to share with the other ranks (%s): collectives travel as gloo's messages, which takes longer", e)
        _close(() if fd is None else (fd,))
        return None, None


def _open(pid: int, fd: int | None, token: bytes) -> Segment | None:
    """Another rank's segment, if that process is of this machine and lets us."""
    if fd is None:
        return None
    try:
        here = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR)
    except OSError:
        return None
    try:
        if os.fstat(here).st_size != HEADER + RING:
            return None
        found = Segment(here)
    finally:
        os.close(here)
    return found if found.memory[8 * TOKEN:8 * TOKEN + 16] == token else None
