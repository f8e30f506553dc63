"""Programs of two ranks (and of one) that train a little and end in every order, on a machine that is busy: run by test_endings.py.

    python endings.py FOLDER

Prints as JSON, per program, what each rank ended with: its status, gloo's worker threads that were left just before the interpreter
shut down, and the end of what it said. Ranks are forks of this process, which has imported everything, and end as scripts do; the programs
of one way run at the same time.
"""
from __future__ import annotations

import atexit
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import autoshard
from tests.dist.ports import free_ports

WAYS = ("text", "gloo", "one rank")
ORDERS = ("destroy", "del, destroy", "destroy, del", "nothing", "raise", "exit 3")
WORKER = "pt_gloo_runloop"


def workers() -> list[int]:
    return [int(t.name) for t in Path("/proc/self/task").iterdir() if (t / "comm").read_text().startswith(WORKER)]


def subject() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8)), torch.randn(16, 32), torch.randint(8, (16,))


def program(way: str, order: str, rank: int, folder: Path, plan: autoshard.Plan) -> None:
    global model, optimizer, loss  # as in a script: gone when the interpreter clears its modules
    atexit.register(lambda: Path(folder, f"left{rank}").write_text(str(len(workers()))))  # registered first, called last
    if way == "gloo":
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    else:
        os.environ.update(RANK=str(rank), WORLD_SIZE="1" if way == "one rank" else "2", MASTER_ADDR="localhost", MASTER_PORT=folder.name.split("-")[0])
    model, x, y = subject()
    model = autoshard.compile(model, "d=1" if way == "one rank" else "d=2", loss_fn=F.cross_entropy, cluster="cpu-gloo", cache=False,
                              plan=None if way == "one rank" else plan)
    optimizer = torch.optim.SGD(model.parameters())
    for thread in workers():
        os.setpriority(os.PRIO_PROCESS, thread, 19)  # late, as on a busy machine
    for _ in range(2):
        loss = model(x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.broadcast(torch.zeros(1), 0)
    end(order)


def end(order: str) -> None:
    global model, optimizer
    if order == "raise":
        raise ValueError("mine")
    if order == "exit 3":
        sys.exit(3)
    for word in order.split(", "):
        if word == "del":
            del model, optimizer
        elif word == "destroy":
            dist.destroy_process_group()


def ranks(way: str, order: str, folder: Path, plan: autoshard.Plan) -> list[int]:
    """Process ids. In a rank it does not return."""
    out = []
    for rank in range(1 if way == "one rank" else 2):
        pid = os.fork()
        if not pid:
            os.dup2(os.open(folder / f"said{rank}", os.O_WRONLY | os.O_CREAT), 2)
            program(way, order, rank, folder, plan)
            sys.exit()
        out.append(pid)
    return out


def burn(parent: int) -> int:
    """The process id of a fork that computes as long as `parent` lives."""
    pid = os.fork()
    while not pid and os.getppid() == parent:
        pass
    return pid or os._exit(0)


def folders_for(count: int, within: Path) -> list[Path]:
    """New folders, each named by a free port of its own."""
    folders = [within / f"{port}-{i}" for i, port in enumerate(free_ports(count))]
    for folder in folders:
        folder.mkdir(parents=True)
    return folders


def main() -> None:
    torch.set_num_threads(1)
    model, x, y = subject()
    plan = autoshard.plan(model, "d=2", (x, y), loss_fn=F.cross_entropy, cluster="cpu-gloo")
    found, parent = {}, os.getpid()
    busy = [burn(parent) for _ in range(2)]
    for way in WAYS:
        orders = ORDERS if way != "one rank" else ORDERS[::3]
        folders = folders_for(len(orders), Path(sys.argv[1], way.replace(" ", "-")))
        started = [ranks(way, order, folder, plan) for order, folder in zip(orders, folders, strict=True)]
        for order, folder, pids in zip(orders, folders, started, strict=True):
            ended = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
            found[f"{way}: {order}"] = [
                (status, int(Path(folder, f"left{r}").read_text()) if Path(folder, f"left{r}").exists() else -1, Path(folder, f"said{r}").read_text()[-2000:])
                for r, status in enumerate(ended)]
    for pid in busy:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
