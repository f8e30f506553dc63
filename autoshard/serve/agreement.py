"""Ranks that generate together: equal settings before, equal random numbers, equal tokens after."""
from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from autoshard.errors import UsageError
from autoshard.runtime.ranks.agree import gathered
from autoshard.runtime.ranks.place import Place


def begin_together(place: Place, config: Any, facts: Mapping[str, Any], timeout: float) -> None:
    """Every rank continues with the random numbers of the first one. Raises UsageError on all ranks where a setting of `generate`, or one of
    the `facts` about its arguments, differs: ranks would choose other tokens, or end at another one."""
    if place.mesh.size == 1:
        return
    settings = {name: repr(value) for name, value in sorted({**vars(config), **facts}.items()) if not name.startswith("_")}

    def judge(found: Iterator[tuple[int, str]]) -> str:
        for rank, text in found:
            theirs = json.loads(text)
            odd = [name for name in sorted({*settings, *theirs}) if settings.get(name) != theirs.get(name)]
            if odd:
                raise UsageError(f"rank {rank} generates with {odd[0]}={theirs.get(odd[0])} and rank {place.ranks[0]} with {settings.get(odd[0])}; "
                                 "every rank must call generate() with the same arguments")
        return base64.b64encode(torch.get_rng_state().numpy().tobytes()).decode()

    state = gathered(place, json.dumps(settings), judge, timeout)
    torch.set_rng_state(torch.frombuffer(bytearray(base64.b64decode(state)), dtype=torch.uint8))
    if place.device.type == "cuda":
        torch.cuda.manual_seed(int(torch.randint(2**62, ())))


def check_tokens(place: Place, tokens: torch.Tensor, timeout: float) -> None:
    """Raises UsageError on all ranks where one has chosen other tokens, as a logits processor of its own makes it."""
    if place.mesh.size == 1:
        return
    mine = f"{tuple(tokens.shape)} {hashlib.blake2b(tokens.cpu().contiguous().numpy().tobytes(), digest_size=8).hexdigest()}"

    def judge(found: Iterator[tuple[int, str]]) -> str:
        odd = [rank for rank, text in found if text != mine]
        if odd:
            raise UsageError(f"rank{'s' * (len(odd) > 1)} {', '.join(map(str, odd))} chose other tokens than rank {place.ranks[0]}, so the "
                             "caches hold a mixture; logits processors and stopping criteria must do the same on every rank")
        return ""

    gathered(place, mine, judge, timeout)
