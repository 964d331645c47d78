"""Hessians: sums of x x^T over the inputs that a matrix really reads.

Axes: t rows (token positions), k inputs of the matrix.
Covers summing, merging sums of several workers, checking, saving and loading. Does not cover which
rows belong to which matrix (`capture`, `body`) or solving (`solve`).
In: rows [t, k] of any float dtype. Out: the raw sum [k, k] in fp32 and the integer number of rows.
Invariant: a sum is never divided and never holds a row that is not finite; sums of parts add up to
the sum of the whole, however the rows were split.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from artifacts.checkpoint import load_single, write_single
from artifacts.errors import TrimtabError

HEADER_KEY = "trimtab.hessians"
HEADER_VERSION = 1
CHUNK_ROWS = 1 << 14  # rows a product; bounds the fp32 copy of bf16 rows on the CPU


class HessianSum:
    """The running sum of x x^T for matrices that read the same input.

    Args:
        name: who reads the rows; stands in every error.
        k: inputs.
        device: where the sum lives; rows are brought there.
        source: where the rows come from (a set's name or hash), for the ledger.

    Attributes: `sum_kk` fp32 [k, k], not divided by anything; `rows` how many rows are in it.
    """

    def __init__(
        self, name: str, k: int, *, device: torch.device | str = "cpu", source: str = ""
    ) -> None:
        self.name = name
        self.k = k
        self.source = source
        self.rows = 0
        self.sum_kk = torch.zeros((k, k), dtype=torch.float32, device=device)

    def add(self, rows_tk: Tensor, prompt_ids: Sequence[str | int] | None = None) -> None:
        """Adds rows [t, k] or [..., k]; prompt_ids: one per row, for the error.

        Raises TrimtabError as `product` does, and then adds nothing.
        """
        if rows_tk.shape[-1] != self.k:
            raise TrimtabError(f"{self.name}: rows {list(rows_tk.shape)}, wanted [t, {self.k}]")
        self.add_product(*self.product(rows_tk, prompt_ids))

    @torch.no_grad()
    def product(
        self, rows_tk: Tensor, prompt_ids: Sequence[str | int] | None = None
    ) -> tuple[Tensor, int]:
        """(x^T x [k, k] in fp32, number of rows), for `add_product` of every matrix that reads x.

        bf16 rows on CUDA go through the tensor cores with fp32 accumulation (a product of two bf16
        numbers is exact in fp32), all others are cast to fp32 first.
        Raises TrimtabError for rows of an integer dtype, or with a value that is not finite (or
        whose square is not, in fp32); it names prompt and row.
        """
        if not rows_tk.is_floating_point():
            raise TrimtabError(f"{self.name}: rows are {rows_tk.dtype}, wanted floats")
        rows_tk = rows_tk.reshape(-1, rows_tk.shape[-1]).to(self.sum_kk.device)
        if prompt_ids is not None and len(prompt_ids) != len(rows_tk):
            raise TrimtabError(f"{self.name}: {len(prompt_ids)} prompt ids for {len(rows_tk)} rows")
        total_kk = torch.zeros_like(self.sum_kk)
        for start in range(0, len(rows_tk), CHUNK_ROWS):
            total_kk += _gram(rows_tk[start : start + CHUNK_ROWS])
        # A row that is not finite shows on the diagonal; only then is it worth searching for.
        if not bool(torch.isfinite(total_kk.diagonal()).all()):
            raise self._bad_row(rows_tk, prompt_ids)
        return total_kk, len(rows_tk)

    def add_product(self, product_kk: Tensor, rows: int) -> None:
        """Adds what `product` gave, of this sum or of another one that reads the same rows."""
        self.sum_kk += product_kk.to(self.sum_kk.device)
        self.rows += rows

    def merge(self, other: HessianSum) -> None:
        """Adds the sum and the rows of another worker. TrimtabError when widths differ."""
        if other.k != self.k:
            raise TrimtabError(f"{self.name}: cannot add a Hessian of {other.k} to {self.k} inputs")
        self.sum_kk += other.sum_kk.to(self.sum_kk.device)
        self.rows += other.rows

    def check(self, name: str = "") -> None:
        """TrimtabError, naming `name`, unless rows were seen and the sum is finite, symmetric and
        not zero."""
        name = name or self.name
        if self.rows == 0:
            raise TrimtabError(
                f"{name}: rows_seen=0, no calibration row reached this matrix",
                hint="a forward pass that goes around the module, or a set without tokens for it; "
                "add it to `ignore` or mend the model's code",
            )
        diagonal_k = self.sum_kk.diagonal()
        if not bool(torch.isfinite(self.sum_kk).all()):
            raise TrimtabError(f"{name}: its Hessian is not finite")
        trace = float(diagonal_k.double().sum())
        if trace <= 0 or float(diagonal_k.min()) < 0:
            raise TrimtabError(
                f"{name}: its Hessian has trace {trace:g} after {self.rows} rows; all of its "
                "inputs are zero",
                hint="look at what feeds this matrix, or add it to `ignore`",
            )
        skew = float((self.sum_kk - self.sum_kk.T).abs().max())
        if skew > 1e-4 * float(diagonal_k.max()):
            raise TrimtabError(f"{name}: its Hessian is not symmetric, by {skew:g}")

    def _bad_row(self, rows_tk: Tensor, prompt_ids: Sequence[str | int] | None) -> TrimtabError:
        square_t = rows_tk.float().square().sum(dim=1)
        bad_t = ~torch.isfinite(square_t)
        row = int(bad_t.nonzero()[0]) if bool(bad_t.any()) else 0
        where = f"prompt {prompt_ids[row]}" if prompt_ids is not None else "prompt unknown"
        what = "a value that is not finite"
        if bool(torch.isfinite(rows_tk[row]).all()):
            what = "values too large for fp32 sums"
        return TrimtabError(
            f"{self.name}: {where}: input row {row} of this batch has {what} "
            f"({int(bad_t.sum())} such rows)",
            hint="leave that prompt out, or find where the model overflows; damping cannot mend it",
        )


def _gram(rows_tk: Tensor) -> Tensor:
    """x^T x in fp32, [k, k]."""
    if rows_tk.is_cuda and rows_tk.dtype is torch.bfloat16:
        return torch.mm(rows_tk.t(), rows_tk, out_dtype=torch.float32)
    rows_tk = rows_tk.float()
    if rows_tk.is_cuda and torch.get_float32_matmul_precision() != "highest":
        rows_tk = rows_tk.double()  # the caller allows TF32, whose products are not exact enough
    return (rows_tk.t() @ rows_tk).float()


def save(path: Path | str, sums: Mapping[str, HessianSum]) -> None:
    """Writes sums as one safetensors file, atomically, the same bytes for the same sums.

    A sum that several names share (q, k and v read one tensor) is stored once. The header holds,
    as JSON under one key, version and per name: the tensor, rows, source.
    """
    tensors: dict[str, Tensor] = {}
    owner: dict[int, str] = {}
    header: dict[str, dict[str, object]] = {}
    for name in sorted(sums):
        value = sums[name]
        stored = owner.setdefault(id(value), name)
        tensors[stored] = value.sum_kk
        header[name] = {"tensor": stored, "rows": value.rows, "source": value.source}
    text = json.dumps({"version": HEADER_VERSION, "sums": header}, sort_keys=True)
    write_single(path, tensors, metadata={HEADER_KEY: text})


def load(path: Path | str) -> dict[str, HessianSum]:
    """The inverse of `save`; names that shared a sum share it again.

    Raises TrimtabError for a file without our header, or a tensor that is not a square fp32 matrix.
    """
    source = load_single(path)
    try:
        header = json.loads(source.metadata[HEADER_KEY])
        version, entries = header["version"], header["sums"]
    except (KeyError, TypeError, ValueError) as error:
        raise TrimtabError(
            f"{path}: not a file of Hessians", hint="run the stage capture again"
        ) from error
    if version != HEADER_VERSION:
        raise TrimtabError(
            f"{path}: Hessians of version {version}, this program reads {HEADER_VERSION}",
            hint="run the stage capture again",
        )
    loaded: dict[str, HessianSum] = {}
    result: dict[str, HessianSum] = {}
    for name, entry in sorted(entries.items()):
        stored = entry["tensor"]
        if stored not in loaded:
            sum_kk = source.get(stored)
            if sum_kk.dtype is not torch.float32 or sum_kk.shape != sum_kk.T.shape:
                raise TrimtabError(
                    f"{path}: {stored!r} is {sum_kk.dtype} {list(sum_kk.shape)}, not fp32 [k, k]"
                )
            value = HessianSum(stored, sum_kk.shape[0], source=str(entry["source"]))
            value.sum_kk, value.rows = sum_kk, int(entry["rows"])
            loaded[stored] = value
        result[name] = loaded[stored]
    return result
