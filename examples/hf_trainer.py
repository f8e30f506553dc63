"""transformers' Trainer around a sharded model: a subclass of 60 lines, and the script of any user of Trainer.

    pip install -e '.[hf]'
    python -m torch.distributed.run --standalone --nproc-per-node 2 examples/hf_trainer.py --steps 6 --folder out
    python -m torch.distributed.run --standalone --nproc-per-node 2 examples/hf_trainer.py --steps 12 --folder out --resume

Trainer's loop, arguments, callbacks, schedules, clipping, logs and evaluation losses are its own. The subclass takes over three things: the model
is sharded by autoshard instead of being wrapped, every process brings its own batches (`inputs="local"`, split over all axes of the mesh), and
checkpoints are those of torch.distributed.checkpoint beside a folder that `from_pretrained` reads. Resume on as many processes as are there.
"""
from __future__ import annotations

import argparse
import inspect
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import autoshard

WEIGHTS = "sharded"
"""Folder of a checkpoint with weights and optimizer state, cut as the ranks hold them."""


class ShardedTrainer(transformers.Trainer):
    """Trainer whose model is sharded over `mesh`; `options` are those of autoshard.compile. `model` is the original, on every process alike."""

    def __init__(self, model: transformers.PreTrainedModel, mesh: DeviceMesh, *, options: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if kwargs["args"].label_smoothing_factor:
            raise ValueError("label_smoothing_factor: Trainer would compute that loss outside of the model, from the logits of the batch of all "
                             "processes and the labels of its own; let the model compute it, in its forward")
        self.original = model
        compiled = autoshard.compile(model, mesh, inputs="local", batch_axes=mesh.mesh_dim_names, **(options or {}))
        compiled.hf_device_map = {}  # for Accelerate: the model places its own parameters
        compiled.accepts_loss_kwargs = False  # the loss is the mean over the tokens of all ranks already
        super().__init__(model=compiled, **kwargs)
        self.is_distributed_loading_by_transformers = True  # Trainer's word for: neither wrap the model nor reduce its gradients
        self.label_names = kwargs["args"].label_names or transformers.utils.find_labels(type(model))

    def _set_signature_columns_if_needed(self) -> None:
        """The columns of a data set that the original takes; others are dropped, as Trainer does."""
        self._signature_columns = [*inspect.signature(self.original.forward).parameters, "label", "label_ids", *self.label_names]

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Every rank calls it: the weights as the ranks hold them, and whole in a folder for `from_pretrained`."""
        folder = Path(output_dir or self.args.output_dir)
        whole = get_model_state_dict(self.model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if self.args.should_save:
            self.original.save_pretrained(folder, state_dict=whole)
            torch.save(self.args, folder / "training_args.bin")
        if dist.is_initialized():
            dist.barrier()

    def _state(self) -> dict[str, Any]:
        weights, state = get_state_dict(self.model, self.optimizer.optimizer)  # Accelerate holds the optimizer in a wrapper
        return {"model": weights, "optimizer": state, "schedule": self.lr_scheduler.state_dict()}

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        dcp.save(self._state(), checkpoint_id=Path(output_dir) / WEIGHTS)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Weights and optimizer state are read together, when there is an optimizer."""

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        saved = self._state()
        dcp.load(saved, checkpoint_id=Path(checkpoint) / WEIGHTS)
        set_state_dict(self.model, self.optimizer.optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"])
        self.lr_scheduler.load_state_dict(saved["schedule"])


class Sentences(torch.utils.data.Dataset):
    """Sequences that count in steps of their own; stands for tokenized text."""

    def __init__(self, number: int, length: int = 16) -> None:
        self.number, self.length = number, length

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, n: int) -> dict[str, torch.Tensor]:
        ids = (torch.arange(self.length) * (n % 5 + 1) + n) % 125 + 3
        return {"input_ids": ids, "labels": ids}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--folder", default="trainer-output")
    parser.add_argument("--tp", type=int, default=1, help="processes along a second axis of the mesh; default: one axis over all")
    parser.add_argument("--cluster", default="cpu-gloo")
    parser.add_argument("--time-limit", type=float, default=60, help="seconds that the search for a plan may take")
    parser.add_argument("--save-steps", type=int, default=6)
    parser.add_argument("--plain", action="store_true", help="Trainer itself, on one process: the losses that a sharded run must have")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint of the folder")
    options = parser.parse_args()
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    transformers.set_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=64, bos_token_id=1, eos_token_id=2, pad_token_id=0))
    arguments = transformers.TrainingArguments(
        output_dir=options.folder, per_device_train_batch_size=8 // ranks, max_steps=options.steps,
        learning_rate=1e-3,
        lr_scheduler_type="constant_with_warmup", warmup_steps=2, max_grad_norm=1.0, save_steps=options.save_steps, logging_steps=1,
        eval_strategy="no", report_to=[], disable_tqdm=True, use_cpu=True, prediction_loss_only=True)
    data = {"args": arguments, "train_dataset": Sentences(96), "eval_dataset": Sentences(16)}
    if options.plain:
        trainer = transformers.Trainer(model, **data)
    else:
        device = arguments.device.type  # reading it starts the process group
        mesh = init_device_mesh(device, (ranks // options.tp, options.tp), mesh_dim_names=("dp", "tp"))
        trainer = ShardedTrainer(model, mesh, options={"cluster": options.cluster, "time_limit": options.time_limit}, **data)
    trainer.train(resume_from_checkpoint=options.resume)
    loss = trainer.evaluate()["eval_loss"]
    if trainer.is_world_process_zero():
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        print("losses " + " ".join(f"{x:.6f}" for x in losses) + f"  evaluation {loss:.6f}", flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
