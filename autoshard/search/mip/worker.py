"""Run as a script by `guarded.py`: solves one mixed-integer program after another, from standard input to standard output.

A process of its own, since a solver can loop in its own presolve without ever looking at its time limit; then it
is killed, and the search goes on without that answer."""
from __future__ import annotations

import datetime
import json
import os
import struct
import sys
import threading
import time
from typing import IO, Any

import numpy as np
from ortools.math_opt import model_pb2
from ortools.math_opt.python import mathopt

SOLVERS = {"milp": mathopt.SolverType.HIGHS, "cp_sat": mathopt.SolverType.CP_SAT}


def write(stream: IO[bytes], header: dict[str, Any], payload: bytes) -> None:
    """One message: lengths, a JSON header, bytes."""
    text = json.dumps(header).encode()
    stream.write(struct.pack("<QQ", len(text), len(payload)) + text)
    stream.write(payload)
    stream.flush()


def read(stream: IO[bytes]) -> tuple[dict[str, Any], bytes]:
    """The next message. Raises EOFError when the other side is gone."""
    text, payload = struct.unpack("<QQ", _exactly(stream, 16))
    return json.loads(_exactly(stream, text)), _exactly(stream, payload)


def _exactly(stream: IO[bytes], count: int) -> bytes:
    found = stream.read(count)
    if len(found) < count:
        raise EOFError("the other side closed its end")
    return found


def answer(request: dict[str, Any], program: bytes) -> tuple[dict[str, Any], bytes]:
    """Solve a serialized ModelProto; values of its first `columns` variables come back."""
    model = mathopt.Model.from_model_proto(model_pb2.ModelProto.FromString(program))
    columns = [model.get_variable(i) for i in range(request["columns"])]
    parameters = mathopt.SolveParameters(time_limit=datetime.timedelta(seconds=request["seconds"]),
                                         random_seed=request["seed"], relative_gap_tolerance=request["gap"], absolute_gap_tolerance=0.0,
                                         node_limit=request["nodes"])
    wanted = mathopt.ModelSolveParameters(variable_values_filter=mathopt.VariableFilter(filtered_items=columns))
    result = mathopt.solve(model, SOLVERS[request["solver"]], params=parameters, model_params=wanted)
    values = np.asarray(result.variable_values(columns) if result.has_primal_feasible_solution() else [], dtype=np.float64)
    limit = result.termination.limit
    return {"reason": result.termination.reason.name, "limit": limit.name if limit else "", "bound": result.termination.objective_bounds.dual_bound,
            "found": result.has_primal_feasible_solution(), "cpu_seconds": time.process_time()}, values.tobytes()


def die_with(parent: int) -> None:
    """A solver that loops never sees that nobody waits for it any more."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def main() -> None:
    threading.Thread(target=die_with, args=(os.getppid(),), daemon=True).start()
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what a solver prints is neither an answer nor for the user
    while True:
        try:
            request, program = read(requests)
        except EOFError:
            return
        write(answers, *answer(request, program))


if __name__ == "__main__":
    main()
