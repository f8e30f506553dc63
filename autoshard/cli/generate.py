"""`autoshard generate`."""
from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autoshard.cli.common import JsonOption
from autoshard.cli.read import parse_seeds
from autoshard.errors import UsageError

if TYPE_CHECKING:
    from autoshard.serve.write import Written

EXAMPLES = """
[bold]Examples[/bold]

  autoshard generate FOLDER --prompt "Once upon a time"                                         one process

  torchrun --nproc-per-node 2 -m autoshard generate FOLDER --prompt "Once upon a time"          weights and caches on two

  torchrun --nproc-per-node 4 -m autoshard generate FOLDER --mesh dp=2,tp=2 --prompt One --prompt "Two words" --new 64

  autoshard generate FOLDER --prompt Once --temperature 0.8 --top-k 50                          sample

  autoshard generate FOLDER --random --tokens 5,17,4 --json                                     a folder with a config.json alone
"""

FolderArgument = Annotated[Path, typer.Argument(metavar="FOLDER", help="A decoder of transformers and its tokenizer, as save_pretrained() writes "
                                                                       "them. Nothing is downloaded.")]
ClusterOption = Annotated[str | None, typer.Option(help="Cluster profile to plan with: a name of `autoshard clusters` or a .toml file. Default: "
                                                        "cpu-gloo on CPUs, cpu-gloo:shared for processes on one machine.")]
TemperatureOption = Annotated[float | None, typer.Option(help="Sample, at this temperature. Without this, --top-k and --top-p the likeliest token is "
                                                              "taken.")]
MeshOption = Annotated[str | None, typer.Option(help="Mesh axes with sizes, major first: dp=2,tp=2. Default: one axis tp over all processes.")]
PromptOption = Annotated[list[str] | None, typer.Option(help="Text to continue; several make a batch.")]
TokensOption = Annotated[list[str] | None, typer.Option(help="Tokens to continue, 5,17,4, for a folder without a tokenizer; several make a batch.")]
ContextOption = Annotated[int | None, typer.Option(help="Tokens that the caches hold. Default: as many as are needed.")]
SeedOption = Annotated[list[str] | None, typer.Option(help="Fix a sharding, as in `autoshard plan`; caches too: 'keys_*=-,tp,-,-'.")]


def generate(
    folder: FolderArgument, prompt: PromptOption = None, tokens: TokensOption = None,
    new: Annotated[int, typer.Option(help="Most tokens to generate.")] = 32,
    mesh: MeshOption = None, context: ContextOption = None,
    cluster: ClusterOption = None,
    dtype: Annotated[str | None, typer.Option(help="Cast the model: bf16, fp16, fp32 or fp64.")] = None,
    random: Annotated[bool, typer.Option("--random", help="Random weights, equal on every rank, in place of the folder's.")] = False,
    temperature: TemperatureOption = None,
    top_k: Annotated[int | None, typer.Option(help="Sample among so many tokens.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Sample among the likeliest tokens of this share.")] = None,
    random_seed: Annotated[int, typer.Option(help="Of sampled tokens.")] = 0,
    seed: SeedOption = None, as_json: JsonOption = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="The text alone, without seconds and bytes.")] = False,
) -> None:
    """Text of a decoder whose weights and caches are split over the processes that torchrun starts. Prompt and token are planned together first. The
    loop is transformers' own. The text goes to standard output; seconds, measured and predicted, and bytes of the caches go to standard error."""
    import torch

    from autoshard.serve.write import write

    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    sampling = {name: value for name, value in (("temperature", temperature), ("top_k", top_k), ("top_p", top_p)) if value is not None}
    torch.manual_seed(random_seed)
    found = write(folder, mesh or f"tp={ranks}", prompts=prompt or (), tokens=[_ids(text) for text in tokens or ()], new=new, context=context,
                  random=random, dtype=dtype, sampling=sampling, cluster=cluster, seeds=parse_seeds(seed or []))
    if int(os.environ.get("RANK", "0")) == 0:
        _print(found, as_json, quiet)


def _ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"cannot read the tokens {text!r}; write numbers with commas: 5,17,4") from None


def _print(found: Written, as_json: bool, quiet: bool) -> None:
    from autoshard.base import quantities

    if as_json:
        said: dict[str, Any] = asdict(found)
        sys.stdout.write(json.dumps(said, indent=1, sort_keys=True) + "\n")
        return
    for line in found.texts if found.texts is not None else (",".join(map(str, row)) for row in found.tokens):
        typer.echo(line)
    if quiet:
        return
    typer.echo(f"first token after {quantities.seconds(found.first_s)} (predicted {quantities.seconds(found.predicted_first_s)}), then "
               f"{quantities.seconds(found.token_s)} a token (predicted {quantities.seconds(found.predicted_token_s)}); caches: "
               f"{quantities.size(found.cache_bytes)} a rank, {quantities.size(found.whole_cache_bytes)} in all", err=True)
