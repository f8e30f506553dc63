"""Do ranks that must pass the same numbers pass the same numbers? Under `inputs="global"` all of them; of local inputs and DTensors
those that hold the same piece.

A rank that passes a batch of its own where all should pass one would train on a mixture, without any error. So ranks compare digests
through the store: at the calls 1, 2, 3, 5, 9, 17, ... of every variant, which costs milliseconds in all, or at every call.
"""
from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch.distributed.tensor import DTensor

from autoshard.base.spec import Spec
from autoshard.errors import UsageError
from autoshard.runtime.ranks.agree import gathered
from autoshard.runtime.ranks.place import Place


def is_due(calls: int, check: str) -> bool:
    """Whether ranks compare before the call that comes after so many `calls` of a variant."""
    return check == "always" or check == "first" and not calls & (calls - 1)


def compare_inputs(place: Place, tensors: Sequence[torch.Tensor], given: Sequence[Spec | None], names: Sequence[str],
                   inputs: str, timeout: float) -> None:
    """Raises UsageError on every rank where some differ, naming them and the input. `names` of the tensors; `given`: how each
    comes in (None: whole); `inputs`: "global" or "local"."""
    mine = json.dumps([digest(t) for t in tensors])

    def judge(found: Iterator[tuple[int, str]]) -> str:
        said = {rank: json.loads(text) for rank, text in found}
        for i, (name, t, spec) in enumerate(zip(names, tensors, given, strict=True)):
            odd = _odd({rank: digests[i] for rank, digests in said.items()}, place, spec)
            if odd:
                raise UsageError(_message(odd, f"{name} {tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}",
                                          "dtensor" if isinstance(t, DTensor) else inputs, place, spec))
        return ""

    gathered(place, mine, judge, timeout, about="numbers of inputs")


def digest(t: torch.Tensor) -> str:
    """Of a tensor's numbers, of a DTensor's piece here. Equal for equal bytes in logical order."""
    t = (t._local_tensor if isinstance(t, DTensor) else t).detach()
    if t.is_meta or t.layout is not torch.strided:  # the trace says what it thinks of these
        return str(t.layout)
    flat = t.cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return hashlib.blake2b(flat.view(torch.uint8).numpy(), digest_size=8).hexdigest() if flat.numel() else ""


def _odd(digests: Mapping[int, str], place: Place, spec: Spec | None) -> dict[int, int]:
    """Ranks that have other numbers than most of those that hold the same piece -> one of those."""
    pieces: dict[tuple[int, ...], list[int]] = {}
    for at, rank in enumerate(place.ranks):
        where = place.mesh.coordinates(at)
        pieces.setdefault(tuple(c for c, p in zip(where, spec or (), strict=False) if p >= 0), []).append(rank)
    odd: dict[int, int] = {}
    for ranks in pieces.values():
        usual = Counter(digests[r] for r in ranks).most_common(1)[0][0]  # of equally many the first rank's
        like = next(r for r in ranks if digests[r] == usual)
        odd |= {r: like for r in ranks if digests[r] != usual}
    return dict(sorted(odd.items()))


def _message(odd: Mapping[int, int], what: str, inputs: str, place: Place, spec: Spec | None) -> str:
    like = next(iter(odd.values()))
    said = (f"rank{'s' * (len(odd) > 1)} {', '.join(map(str, odd))} pass{'es' * (len(odd) == 1)} other numbers than rank {like} for the input {what}")
    if inputs == "global":
        return (f'{said}, and with inputs="global" every rank passes the same whole batch. Where every rank has a batch of its own (a DataLoader '
                'with DistributedSampler), compile with inputs="local"; else make the batches equal: seed the shuffling on every rank alike')
    split = [name for name, p in zip(place.mesh.names, spec or (), strict=False) if p >= 0]
    whole = [name for name in place.mesh.names if name not in split]
    same = f"ranks that differ in {', '.join(whole)} only hold the same piece (it is split over {', '.join(split) or 'no axis'})"
    if inputs == "dtensor":
        return f"{said}, a DTensor, and {same}; make the DTensor with torch.distributed.tensor.distribute_tensor"
    return (f"{said}, and {same}. Give the DistributedSampler num_replicas and rank of the axes that split the batch, or name all of them: "
            "batch_axes=(...) in compile")
