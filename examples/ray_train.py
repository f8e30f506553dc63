"""The trainer of torchtitan_like.py as a job of Ray Train: Ray starts the ranks and their process group, and starts them anew after a failure.

    pip install 'ray[train]'
    python examples/ray_train.py --workers 2 --steps 6 --folder run

A rank that Ray has started calls autoshard as any other: the process group is there, and the mesh is over its ranks. Checkpoints are those of
torch.distributed.checkpoint in `--folder`, which all nodes must see; they load on another number of ranks. `--workers 1:2` lets Ray go on with
one rank where it finds no more. On GPUs add `use_gpu=True` to ScalingConfig.
"""
from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import ray.train
from ray.train.torch import TorchTrainer

EXAMPLES = Path(__file__).resolve().parent


def train(config: dict[str, Any]) -> None:
    """What every rank runs."""
    sys.path.insert(0, config["examples"])
    from torchtitan_like import Config, Trainer

    trainer = Trainer(Config(steps=config["steps"], save_every=config["save_every"], folder=Path(config["folder"])))
    trainer.resume()
    trainer.train()


def workers(text: str) -> int | tuple[int, int]:
    low, _, high = text.partition(":")
    return (int(low), int(high)) if high else int(low)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=workers, default=2, help="ranks, or the least and the most of them: 1:2")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--save-every", type=int, default=4)
    parser.add_argument("--folder", type=Path, default=Path("run"))
    options = parser.parse_args()
    folder = options.folder.resolve()
    config = {"examples": str(EXAMPLES), "steps": options.steps, "save_every": options.save_every, "folder": str(folder)}
    trainer = TorchTrainer(
        train, train_loop_config=config, scaling_config=ray.train.ScalingConfig(num_workers=options.workers),
        run_config=ray.train.RunConfig(storage_path=str(folder / "ray"), failure_config=ray.train.FailureConfig(max_failures=3)))
    trainer.fit()  # raises what a rank raised, after the last failure that is allowed


if __name__ == "__main__":
    main()
