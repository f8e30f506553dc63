"""What every command about a model asks for: the model, the mesh, and how to plan it. Declared once, here."""
from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from autoshard.base.mesh import AnyMesh, Mesh, mesh_or_any
from autoshard.cli.common import INTERRUPTED, ClusterOption, MemoryOption
from autoshard.cli.read import parse_count, parse_precision, parse_seeds
from autoshard.cost.optimizers import OPTIMIZERS, optimizer_row, verified
from autoshard.errors import UsageError
from autoshard.experts.capacity import EXPERT_CAPACITY

if TYPE_CHECKING:
    from autoshard.base.plan import Plan
    from autoshard.decide.options import Options
    from autoshard.decide.phase_timer import PhaseTimer
    from autoshard.decide.pipeline_options import Pipeline
    from autoshard.pipeline.microbatches.batch import Batch
    from autoshard.program.calling import Traced
    from autoshard.program.load import ModelSpec
    from autoshard.seeds.from_transformers import HandPlan


def listed(names: Iterable[str]) -> str:
    """Names in a sentence: a, b or c."""
    *most, last = names
    return f"{', '.join(most)} or {last}"


@dataclass(frozen=True, eq=False)
class TracedRequest:
    """A traced model with what was asked about it. `own`: the plans that the model brings along, by name."""

    traced: Traced
    mesh: Mesh
    options: Options
    has_loss: bool
    model: Mapping[str, Any]
    own: Mapping[str, HandPlan] = field(default_factory=dict)


@dataclass(frozen=True)
class Request:
    """The options as given; nothing is loaded before `load` or `plan`."""

    mesh: Annotated[str | None, typer.Option(
        help="Mesh axes with sizes, major first: dp=2,tp=4; pp=2,dp=4 has two pipeline stages. For `plan` also auto:64, as --devices 64.")] = None
    model: Annotated[str | None, typer.Argument(
        help="name:size from models/ (llama:8b), or package.module:factory; left out with --hf.")] = None
    cluster: ClusterOption = "h100-dgx"
    memory: MemoryOption = None
    batch: Annotated[int | None, typer.Option(help="Global batch size of the example inputs.")] = None
    seq: Annotated[int | None, typer.Option(help="Sequence length of the example inputs.")] = None
    dtype: Annotated[str | None, typer.Option(help="Cast the model: bf16, fp16, fp32 or fp64.")] = None
    optimizer: Annotated[str, typer.Option(
        help=f"{listed(OPTIMIZERS)}: its state and update are priced. verify trains with {listed(verified())}.")] = "adamw"
    precision: Annotated[str | None, typer.Option(
        help="Mixed precision: bf16 (weights and gradients in fp32), or param=bf16,master=fp32,reduce=fp32; each bf16, fp16, fp32 or fp64.")] = None
    hf: Annotated[Path | None, typer.Option(help="A Hugging Face config JSON instead of MODEL (needs autoshard\\[hf]).")] = None
    inputs: Annotated[str, typer.Option(
        help="global (every rank gets the whole batch), or local: inputs come in split along dim 0 over the first mesh axis.")] = "global"
    outputs: Annotated[str, typer.Option(
        help="How outputs reach the user: replicate (whole on every rank), dtensor or local (as the plan splits them), or auto: whole, but what a "
             "model returns beside its loss stays split where it is large. One for all, or one for each with commas: replicate,dtensor.")] = "auto"
    inference: Annotated[bool, typer.Option("--inference", help="Forward pass only.")] = False
    seed: Annotated[list[str] | None, typer.Option(
        help="Fix a sharding: 'GLOB=AXIS,...', per tensor dim an axis, - for whole, ? for open. May be repeated.")] = None
    seeds: Annotated[Path | None, typer.Option(help="YAML file of seeds, GLOB: AXIS,... a line.")] = None
    time_limit: Annotated[float, typer.Option(
        help="Seconds of wall clock for each search (loading, tracing and pricing come before it): then, or on Ctrl-C, the best plan so far is "
             "returned with its gap. In training, where memory may be tight, half of it goes to the search with ample memory and the rest is shared "
             "by up to six searches: a limit too short for one of them shows as a wide gap, or as a budget found too small without proof.")] = 60.0
    search: Annotated[str, typer.Option(
        help="Search backend: auto (picks one), milp, cp_sat, local or brute; or propagate: spread the seeds, search nothing.")] = "auto"
    fallback: Annotated[str, typer.Option(
        help="What to do with submodules that cannot be traced: error, or replicate (run them whole on every rank).")] = "error"
    offload: Annotated[str, typer.Option(
        help="none, or optimizer: its state may lie in the host's memory where that pays (the cluster needs a host_link).")] = "none"
    expert_capacity: Annotated[float, typer.Option(
        help="Of models with experts: rows of tokens that a rank has room for where tokens travel to their experts, over those of an even load; more "
             "is an error.")] = EXPERT_CAPACITY
    pad: Annotated[str, typer.Option(
        help="What is padded where it does not divide over the mesh: weights (vocabulary, hidden features), or all: any dim of a weight, attention "
             "heads and rows of the batch too. A pad is computed, and the search prices it.")] = "weights"
    refine_axes: Annotated[str, typer.Option(
        help="never; the parts of mesh axes that the program may use where a dim divides by a factor of an axis only, as tp=4x2; or auto: parts by "
             "the model's heads. The cheaper of the plans with and without is taken: two or three searches instead of one.")] = "never"
    microbatches: Annotated[str | None, typer.Option(
        help="Parts of the batch, which run one after the other with gradients added up (gradient accumulation, or what fills a pipeline): "
             "a number that divides the batch, or auto. Default: 1; where the mesh is chosen, auto.")] = None
    schedule: Annotated[str, typer.Option(
        help="Schedule of the pipeline stages (mesh axis pp): auto, gpipe, 1f1b, interleaved, zb1p, zb2p, zbv, or a file in torch's CSV "
             "format.")] = "auto"
    devices: Annotated[int | None, typer.Option(
        help="Instead of --mesh, for `plan`: choose the mesh of so many devices, with or without pipeline stages and micro-batches.")] = None
    thorough: Annotated[bool, typer.Option(
        "--thorough", help="Where the mesh is chosen: try meshes of three axes too, and shapes that can gain little, which of more than 8 "
                           "devices are those that bounds leave at most 5 % of a step to gain. Takes several times as long.")] = False
    cut: Annotated[list[str] | None, typer.Option(
        help="Path of a module that begins a pipeline stage: layers.10. Once for every stage but the first. Default: searched.")] = None

    layout: Annotated[str, typer.Option(
        help="Instead of --cut, stages as Megatron-LM writes them: 'Et*2|(t*2|)*3t*2L'.")] = ""

    @property
    def what(self) -> str:
        return self.model or str(self.hf or "")

    @property
    def files(self) -> tuple[str | Path | None, ...]:
        """What may be a file that is read."""
        return self.hf, self.seeds, self.cluster, self.schedule

    @cached_property
    def options(self) -> Options:
        """Raises UsageError."""
        from autoshard.decide.options import Options

        seeds, precision = parse_seeds(self.seed or [], self.seeds), parse_precision(self.precision)
        return Options.of(vars(self), seeds=seeds, precision=precision, memory_budget=self.memory, pipeline=self.pipeline)

    @cached_property
    def wanted(self) -> Mesh | AnyMesh:
        """Raises UsageError."""
        if (self.mesh is None) == (self.devices is None):
            raise UsageError("give a mesh, --mesh dp=2,tp=4" + (", or --devices alone" if self.mesh else ", or --devices 8 to choose one"))
        return AnyMesh(self.devices) if self.devices is not None else mesh_or_any(self.mesh)

    @property
    def is_open(self) -> bool:
        """Whether the mesh, or the number of micro-batches, is to be chosen. Raises UsageError."""
        return isinstance(self.wanted, AnyMesh) or self.pipeline.microbatches == "auto"

    @property
    def has_stages(self) -> bool:
        """Whether the mesh that is given has an axis of pipeline stages. Raises UsageError."""
        return isinstance(self.wanted, Mesh) and self.pipeline.stages(self.wanted) > 1

    @property
    def given_mesh(self) -> Mesh:
        """Raises UsageError where the mesh is to be chosen."""
        if isinstance(self.wanted, AnyMesh):
            raise UsageError(f"{self.wanted}: only `autoshard plan` without --what-if chooses a mesh; give --mesh here, such as the one it chose")
        return self.wanted

    @cached_property
    def pipeline(self) -> Pipeline:
        """Raises UsageError."""
        from autoshard.decide.pipeline_options import Pipeline

        count = self.microbatches or ("auto" if isinstance(self.wanted, AnyMesh) else "1")
        return Pipeline(microbatches=parse_count("--microbatches", count), schedule=self.schedule,
                        cuts=tuple(self.cut) if self.cut else "auto", layout=self.layout)

    def check(self, options: Options | None = None) -> None:
        """What a typo costs should not be a model: mesh, cluster and amounts are read first. Raises AutoshardError."""
        from autoshard.cost.cluster import load_cluster
        from autoshard.planner.open_mesh import check_mesh

        cluster = load_cluster(self.cluster)
        options = options or self.options
        check_mesh(self.wanted, options, cluster)
        options.check_offload(cluster, not self.inference)
        options.check_microbatches(self.wanted, not self.inference)
        if not self.inference:
            optimizer_row(options.optimizer)  # an unknown one, before the work

    def load(self, fake: bool = True) -> ModelSpec:
        """The model with example inputs, on the meta device unless `fake` is False. Raises ModelError, UsageError."""
        from autoshard.program.load import load_model

        spec = load_model(self.model, batch=self.batch, seq=self.seq, dtype=self.dtype, hf=self.hf, fake=fake)
        if self.inference:
            spec = spec.for_inference
            spec.model.eval()
        return spec

    def traced(self, progress: Callable[[str, str], None], clock: PhaseTimer | None = None, **planned: Any) -> TracedRequest:
        """Load and trace the model, for commands that look at more than one plan of it. `clock` times the trace; `planned`: options of a plan
        that come before those given here."""
        options = replace(self.options, **planned)
        progress("load", self.what)
        self.check(options)
        from autoshard.decide.phase_timer import PhaseTimer
        from autoshard.seeds.from_transformers import hand_plan, has_plan

        mesh = self.given_mesh
        spec, batch = self._batch(options)
        with (clock or PhaseTimer(progress))("trace"):
            traced = batch.on(mesh, options.pipeline)
        return TracedRequest(traced, mesh, options, spec.loss_fn is not None, {"reference": spec.reference, **spec.settings},
                             {"its own tp_plan": hand_plan(spec.model, mesh, others_whole=True)} if has_plan(spec.model) else {})

    def batch_of(self, progress: Callable[[str, str], None]) -> tuple[ModelSpec, Batch]:
        """The model with its batch, which is not traced yet."""
        self.check(self.options)
        return self.loaded_batch(progress)

    def loaded_batch(self, progress: Callable[[str, str], None]) -> tuple[ModelSpec, Batch]:
        """The same, of options that are checked."""
        progress("load", self.what)
        return self._batch(self.options)

    def _batch(self, options: Options) -> tuple[ModelSpec, Batch]:
        from autoshard.decide.arguments import check_called
        from autoshard.pipeline.microbatches.batch import Batch

        spec = self.load()
        check_called(spec.model, spec.example_inputs, spec.example_kwargs)
        return spec, Batch(spec.model, tuple(spec.example_inputs), dict(spec.example_kwargs or {}), options.tracing(spec.loss_fn, not self.inference))

    def plan(self, progress: Callable[[str, str], None]) -> Plan:
        """Load the model and search its plan."""
        from autoshard.decide.phase_timer import PhaseTimer
        from autoshard.planner.open_mesh import plan_batch

        spec, batch = self.batch_of(progress)
        return plan_batch(batch, self.wanted, self.options, clock=PhaseTimer(progress), has_loss=spec.loss_fn is not None,
                              model_info={"reference": spec.reference, **spec.settings})


def takes_request(command: Callable[..., None], **defaults: Any) -> Callable[..., None]:
    """Replace the parameter `request` of a command by the options of `Request`, each under its own name, but for those that the command has
    itself. `defaults` are other defaults than those of `Request`."""
    own = {n: p for n, p in inspect.signature(command).parameters.items() if n != "request"}
    shared = {n: p.replace(default=defaults.get(n, p.default)) for n, p in inspect.signature(Request).parameters.items() if n not in own}

    def run(**given: Any) -> None:
        try:
            command(request=Request(**{name: given.pop(name) for name in shared}), **given)
        except KeyboardInterrupt as stopped:  # also `Interrupted`, which says more
            typer.echo(f"{stopped}" or "interrupted; there is no result yet", err=True)
            raise typer.Exit(INTERRUPTED) from None

    hints = {**get_type_hints(Request, include_extras=True), **get_type_hints(command, include_extras=True)}
    both = [p.replace(kind=p.KEYWORD_ONLY, annotation=hints[p.name]) for p in (*shared.values(), *own.values())]
    run.__name__, run.__doc__, run.__annotations__ = command.__name__, command.__doc__, {p.name: p.annotation for p in both}
    run.__signature__ = inspect.Signature(sorted(both, key=lambda p: p.default is not p.empty))
    return run
