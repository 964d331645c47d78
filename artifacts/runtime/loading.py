"""Reading a model's tensors so that nothing is left unread or unfilled.

Covers `Taken`, a record over a `TensorSource`: every parameter is asked for by name and shape, a
missing one is an error that names it, and `finish` makes any tensor that nobody took fatal.
Packed or dense is decided matrix by matrix from the tensors that are there, never from the config,
except that the parts of one fused module must agree, on disk and as declared.
Does not cover the modules themselves. Invariant: after `finish`, parameters = tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from artifacts.checkpoint import PACKED_SUFFIXES, TensorSource
from artifacts.errors import TrimtabError
from artifacts.names import fused_groups
from artifacts.packing import PackedMatrix, is_packed, load_matrix, packed_scheme
from artifacts.quant_lookup import quantization_config, scheme_for
from artifacts.runtime.linear import Embedding, Linear


class Taken:
    """A source, the dtype and device to load to, and the names taken so far.

    Args:
        source: the checkpoint.
        what: how errors call it, for example "target".
    """

    def __init__(
        self, source: TensorSource, what: str, *, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        self.source = source
        self.what = what
        self.dtype = dtype
        self.device = device
        self.taken: set[str] = set()

    def has(self, name: str) -> bool:
        return name in self.source

    def tensor(
        self, name: str, shape: Sequence[int], *, dtype: torch.dtype | None = None
    ) -> Tensor:
        """A plain tensor of exactly this shape, cast to `dtype` (by default the compute dtype)."""
        if name not in self.source:
            raise TrimtabError(
                f"{self.what}: parameter {name} is not in the checkpoint",
                hint="compare the index with the original checkpoint's",
            )
        found = self.source.info(name).shape
        if tuple(found) != tuple(shape):
            raise TrimtabError(
                f"{self.what}: {name} is {list(found)} on disk, the config asks for {list(shape)}"
            )
        self.taken.add(name)
        return self.source.get(name).to(device=self.device, dtype=dtype or self.dtype)

    def matrix(self, module: str, n: int, k: int) -> Tensor:
        """The dense [n, k] weight of a module, dequantized if it is packed on disk."""
        self._take(module)
        weight = load_matrix(self.source, module, self.dtype, self.device)
        self._check(module, tuple(weight.shape), n, k)
        return weight

    def linear(self, module: str, n: int, k: int) -> Linear:
        """One matrix as a Linear."""
        return Linear(module, self.matrix(module, n, k))

    def stack(self, parts: Sequence[tuple[str, int]], k: int) -> Linear:
        """Matrices (module, rows) that share their input, stacked along n.

        Raises: TrimtabError naming all parts when the members of a fused module are not stored
        alike, or are declared unlike by the config's targets and ignore list.
        """
        for group in fused_groups(name for name, _ in parts):
            self._check_fused(group)
        weights = [self.matrix(name, n, k) for name, n in parts]
        return Linear(parts[0][0], torch.cat(weights), parts=parts)

    def embedding(self, module: str, v: int, h: int) -> Embedding:
        """A table, kept packed if it is packed on disk."""
        self._take(module)
        table: Tensor | PackedMatrix
        if is_packed(self.source, module):
            table = PackedMatrix.from_source(self.source, module).to(self.device)
        else:
            table = load_matrix(self.source, module, self.dtype, self.device)
        self._check(module, tuple(table.shape), v, h)
        return Embedding(module, table, self.dtype)

    def finish(self, *, only: str = "", ignored: Iterable[str] = ()) -> None:
        """Raises: TrimtabError when a tensor under `only` and outside `ignored` was not taken."""
        left = [
            name
            for name in self.source.names()
            if name not in self.taken
            and name.startswith(only)
            and not any(name.startswith(prefix) for prefix in ignored)
        ]
        if left:
            more = f" and {len(left) - 4} more" if len(left) > 4 else ""
            raise TrimtabError(
                f"{self.what}: the checkpoint holds tensors that nothing reads: "
                f"{', '.join(left[:4])}{more}",
                hint="an unread tensor means that another model is built than was saved",
            )

    def _take(self, module: str) -> None:
        packed = is_packed(self.source, module)
        if packed == (f"{module}.weight" in self.source):
            state = "both packed and plain" if packed else "not in the checkpoint"
            raise TrimtabError(f"{self.what}: parameter {module}.weight is {state}")
        suffixes = PACKED_SUFFIXES if packed else ("weight",)
        self.taken.update(f"{module}.{suffix}" for suffix in suffixes)

    def _check(self, module: str, found: tuple[int, ...], n: int, k: int) -> None:
        if found != (n, k):
            raise TrimtabError(
                f"{self.what}: {module} is {list(found)} on disk, the config asks for {[n, k]}"
            )

    def _check_fused(self, group: Sequence[str]) -> None:
        stored = [
            str(packed_scheme(self.source, m)[0]) if is_packed(self.source, m) else "not quantized"
            for m in group
        ]
        problem = _differ(group, stored)
        where = "on disk"
        if problem is None and quantization_config(self.source.config):
            declared = [scheme_for(self.source.config, m) for m in group]
            problem = _differ(group, [str(s or "ignored") for s in declared])
            where = "in quantization_config"
        if problem:
            raise TrimtabError(
                f"{self.what}: {where}, {problem}",
                hint="quantize all parts with one scheme, or ignore all of them",
            )


def _differ(group: Sequence[str], schemes: Sequence[str]) -> str | None:
    """A line that names the parts and their schemes, or None when all are the same."""
    if len(set(schemes)) == 1:
        return None
    pairs = ", ".join(f"{part}: {scheme}" for part, scheme in zip(group, schemes, strict=True))
    return f"the parts of one fused module differ: {pairs}"
