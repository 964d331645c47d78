"""What a stage is and what it is handed: the contract between the runner and `pipeline/stages/`.

Does: declare `Stage` (the protocol), `BaseStage` (its defaults), `StageContext` and `Environment`.
Does not: run, store or log anything (see `runner`, `store`, `events`).

Invariant: a stage sees nothing that is not in its key: its `config`, the parts of other stages'
outputs it names, the files it names, the seed and the environment. Hence it gets no recipe in `run`
and must not read clocks, environment variables or unnamed files into its outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

    from pipeline.problems import Problems
    from pipeline.recipe import Recipe


@dataclass(frozen=True, kw_only=True)
class Environment:
    """Where the computation runs; part of the key of every stage that computes.

    Attributes:
        device: "cpu" or "cuda".
        dtype: "float32" or "bfloat16", the dtype of the computation.
        threads: CPU threads.
        seed: the recipe's seed.
    """

    device: str
    dtype: str
    threads: int
    seed: int


class Task(Protocol):
    """One progress bar. Calling it with (done, total) sets it, `advance` moves it."""

    def __enter__(self) -> Task: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...
    def __call__(self, done: int, total: int | None = None) -> None: ...
    def advance(self, count: int = 1) -> None: ...


class Progress(Protocol):
    """What a stage tells the user while it works."""

    def task(self, label: str, total: int | None = None, unit: str = "") -> Task: ...
    def say(self, text: str) -> None: ...


@dataclass(frozen=True, kw_only=True)
class StageContext:
    """What a stage's `run` gets.

    Attributes:
        name: of the stage.
        config: what the stage's own `config` returned.
        inputs: for each need "STAGE" the folder of that stage's outputs, for "STAGE/PART" the path
            PART in it (a folder, or a name without suffix; see `pipeline.keys.part_of`).
        files: for each name that `files` returned, its path.
        file_hashes: sha256 of each of `files`, as they stand in the key.
        out: an empty folder; everything left in it is the stage's output.
        scratch: a folder that is not output; kept between attempts if the stage is resumable,
            else empty at the start.
        environment: device, dtype, threads, seed.
        work: the work folder, for effects outside the store (publishing); never read from it.
        progress: bars and lines.
        hash_file: sha256 of a file, remembered so that the record need not read it again.
        on_checkpoint: called with a name at moments where being killed must do no harm.
    """

    name: str
    config: dict[str, Any]
    inputs: Mapping[str, Path]
    files: Mapping[str, Path]
    file_hashes: Mapping[str, str]
    out: Path
    scratch: Path
    environment: Environment
    work: Path
    progress: Progress
    hash_file: Callable[[Path], str]
    on_checkpoint: Callable[[str], None]

    @property
    def seed(self) -> int:
        """The recipe's seed."""
        return self.environment.seed

    @property
    def device(self) -> str:
        """ "cpu" or "cuda"."""
        return self.environment.device

    @property
    def threads(self) -> int:
        """CPU threads; torch is already set to them in a stage that computes."""
        return self.environment.threads

    @property
    def dtype(self) -> torch.dtype:
        """The torch dtype of the computation; imports torch."""
        import torch

        return {"float32": torch.float32, "bfloat16": torch.bfloat16}[self.environment.dtype]

    def checkpoint(self, name: str) -> None:
        """Mark a moment between two pieces of work; tests kill the process here."""
        self.on_checkpoint(name)


class Stage(Protocol):
    """One step of the pipeline. Each file in `pipeline/stages/` holds one as `STAGE`."""

    name: str
    """With dashes, as on the command line."""
    resumable: bool
    """Whether `scratch` is kept for the next attempt with the same key."""
    computes: bool
    """Whether the result may depend on libraries, device, dtype, threads and seed."""
    is_build: bool
    """Whether its outputs are the BUILD: after the run they stand in WORK/dist too."""

    def wanted(self, recipe: Recipe) -> str:
        """ "" if the recipe asks for this stage, else the reason why not."""

    def needs(self, recipe: Recipe) -> tuple[str, ...]:
        """What it reads: "STAGE", or "STAGE/PART" to depend on a part of its outputs only."""

    def files(self, recipe: Recipe) -> dict[str, Path]:
        """Files outside the store that it reads, by a name that stands in the key."""

    def config(self, recipe: Recipe) -> dict[str, Any]:
        """Its part of the resolved recipe, plain JSON values without paths."""

    def check(self, recipe: Recipe, problems: Problems) -> None:
        """Report what would make it fail: seconds, no torch, no weights."""

    def run(self, ctx: StageContext) -> dict[str, Any]:
        """Fill `ctx.out`; return a summary of deterministic JSON values for the record.

        A summary with a non-empty list under "failed_gates" ends the run after this stage.
        """


class BaseStage:
    """Defaults for a stage: wanted, no needs, no files, computes, starts over, is no build."""

    name = ""
    resumable = False
    computes = True
    is_build = False

    def wanted(self, recipe: Recipe) -> str:
        """Always."""
        return ""

    def needs(self, recipe: Recipe) -> tuple[str, ...]:
        """Nothing."""
        return ()

    def files(self, recipe: Recipe) -> dict[str, Path]:
        """None."""
        return {}

    def config(self, recipe: Recipe) -> dict[str, Any]:
        """Empty."""
        return {}

    def check(self, recipe: Recipe, problems: Problems) -> None:
        """Nothing to report."""

    def run(self, ctx: StageContext) -> dict[str, Any]:
        """To be written by each stage."""
        raise NotImplementedError(self.name)
