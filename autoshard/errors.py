"""The exception tree. Every error a user can cause derives from `AutoshardError`.

A message says what went wrong, where (module path and the user's file:line) and what to do next;
the command line prints it without a traceback and exits with 2.
"""


class AutoshardError(Exception):
    """Base of everything autoshard raises on purpose."""


class UsageError(AutoshardError):
    """An argument, option or file the user gave is not usable."""


class NotCarriedOver(UsageError, AttributeError):
    """An attribute of the original model that its compiled form does not have; `hasattr` is False for it."""


class MeshError(UsageError):
    """A mesh that is malformed or does not match the world."""


class ModelError(UsageError):
    """A model that cannot be found or built."""


class TraceError(AutoshardError):
    """The model cannot be captured as one graph (data-dependent control flow, unsupported construct)."""


class SeedError(UsageError):
    """A seed that matches nothing, is malformed or conflicts with another."""


class ClusterError(UsageError):
    """A cluster profile that is unknown or not physical."""


class ProblemError(UsageError):
    """A search problem file or object that is malformed."""


class SearchSizeError(UsageError):
    """A search that needs more memory than this machine has free."""


class InfeasibleError(AutoshardError):
    """No plan fits the memory limit or satisfies all seeds. `proven`: there is none; else none was found."""

    def __init__(self, message: str = "", proven: bool = False) -> None:
        super().__init__(message)
        self.proven = proven


class Interrupted(AutoshardError, KeyboardInterrupt):
    """Ctrl-C before there was a plan. A KeyboardInterrupt too: where nobody catches it, a script ends as it does otherwise."""


class PlanError(UsageError):
    """A plan that is malformed or was made for another model, mesh or version."""


class CheckError(AutoshardError):
    """A check of data that the model itself makes does not hold for the values of this call."""


class CapacityError(AutoshardError):
    """More rows of tokens go to the experts of a rank than it has room for."""


class CollectiveError(AutoshardError):
    """A collective that does not end: a rank has ended, is stopped, or cannot be reached."""


class ScheduleError(UsageError):
    """A pipeline schedule that is malformed, never ends, or cannot be made for these numbers of ranks and micro-batches."""


class LoweringError(AutoshardError):
    """The plan cannot be turned into a local graph; always a bug or an unsupported op, never silent."""
