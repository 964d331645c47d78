"""The stages, one thin file each; a file here with a `STAGE` in it is a stage.

Does: find and import them, in the order of the design. Does not: order them by their needs (the
runner does). A stage's file reads its settings, calls `calibration` or `artifacts`, and writes
files; it imports torch and everything heavy inside functions.
"""

from __future__ import annotations

import importlib
import pkgutil

from pipeline.stage import Stage

ORDER = (
    "fetch",
    "prompts",
    "target",
    "signs",
    "traffic",
    "capture",
    "lm-head",
    "embedding",
    "mtp",
    "draft-vocab",
    "drafter",
    "assemble",
    "validate",
    "publish",
)
"""How stages are listed where their needs leave it open; a new one is added here."""


def registry() -> dict[str, Stage]:
    """All stages by name, in the order of `ORDER`.

    Raises:
        LookupError: a name that is not in `ORDER` or stands twice: a bug.
    """
    found: dict[str, Stage] = {}
    for module in pkgutil.iter_modules(__path__):
        stage = getattr(importlib.import_module(f"{__name__}.{module.name}"), "STAGE", None)
        if stage is None:
            continue
        if stage.name not in ORDER or stage.name in found:
            raise LookupError(f"pipeline/stages/{module.name}.py: {stage.name} is not in ORDER")
        found[stage.name] = stage
    return {name: found[name] for name in ORDER if name in found}
