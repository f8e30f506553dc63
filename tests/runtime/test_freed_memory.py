"""What steps free stays with the process, in a process started as users start theirs."""
import os
import subprocess
import sys

import pytest

from autoshard.runtime.ranks.freed_memory import keep_freed_memory

THRESHOLDS = {"MALLOC_TRIM_THRESHOLD_": "131072"}
PROGRAM = """
import resource
import torch
import autoshard

model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(6)))
x = torch.randn(1024, 512)
model = autoshard.compile(model, "d=1", (x,), cache=False, time_limit=5)

def step():
    model.zero_grad()
    model(x).sum().backward()

for _ in range(5):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    step()
print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / 10)
"""


def faults(**environment: str) -> float:
    """Pages that the system fills per step, of the 6,000 that its values take."""
    plain = {k: v for k, v in os.environ.items() if "MALLOC" not in k}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env={**plain, **environment}, stdout=subprocess.PIPE, text=True, check=True, timeout=120)
    return float(done.stdout.split()[-1])


@pytest.mark.skipif(not keep_freed_memory({}), reason="another allocator than glibc's")
def test_a_step_asks_the_system_for_no_memory_unless_the_user_wants_it_given_back():
    assert faults() < 300 < 1000 < faults(**THRESHOLDS)


@pytest.mark.parametrize("chosen", [THRESHOLDS, {"LD_PRELOAD": "/usr/lib/libjemalloc.so.2"}, {"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=131072"}])
def test_what_the_user_chose_is_left_alone(chosen):
    assert not keep_freed_memory(chosen)
