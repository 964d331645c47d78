"""The GPTQ modifier that llmcompressor's sequential pipeline runs: our sums, our solve.

Axes: b rows of a batch, t positions, n outputs, k inputs.
llmcompressor owns the walk (tracing, one decoder layer after another, a second pass that carries
the quantized outputs on); this subclass of its `GPTQModifier` owns what happens at a matrix: inputs
are summed by `HessianSum` without padding, a matrix is solved by `calibration.solve` with scales in
their stored dtype, and every solve leaves a ledger entry. Not used of the base class: observers,
its Hessians, its fallback. Importing this module imports llmcompressor (5 s).
Invariant: a targeted matrix ends with codes and an entry, or the run ends naming it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from compressed_tensors.offload import update_offload_parameter
from llmcompressor.core import active_session
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.quantization.quantization import QuantizationMixin
from pydantic import PrivateAttr
from torch import Tensor

from artifacts.errors import TrimtabError
from artifacts.packing import Scheme
from calibration.hessian import HessianSum
from calibration.solve import Solved, solve


class LayerwiseGptq(GPTQModifier):  # type: ignore[misc]  # the library is untyped
    """Sums and solves the matrices it is prepared for; the results are in `solved`."""

    _names: dict[str, str] = PrivateAttr(default_factory=dict)
    _solver: Callable[[str, Tensor, HessianSum], Solved] = PrivateAttr()
    _masks: list[Tensor | None] = PrivateAttr(default_factory=list)
    _done: Callable[[int, int], None] = PrivateAttr()
    _source: str = PrivateAttr("")
    _sums: dict[torch.nn.Module, HessianSum] = PrivateAttr(default_factory=dict)
    _last: tuple[Tensor, Tensor, int] | None = PrivateAttr(None)
    _solved: dict[str, Solved] = PrivateAttr(default_factory=dict)

    def prepare(
        self,
        names: dict[str, str],
        masks: list[Tensor | None],
        scheme: Scheme,
        *,
        source: str,
        done: Callable[[int, int], None],
        **options: Any,
    ) -> LayerwiseGptq:
        """Sets what a run needs.

        names: module name in the model to its name in the checkpoint, of all matrices to solve.
        masks: per batch, bool [b, t] of the positions that are tokens, None where all are.
        source: what the ledger calls the rows. done(solved, total): called after each layer.
        options: passed to `solve`.
        """
        self._names = names
        self._masks = masks
        self._source = source
        self._done = done
        self._solver = lambda name, w_nk, total: solve(name, w_nk, total, scheme, **options)
        return self

    @property
    def solved(self) -> dict[str, Solved]:
        """Results by name in the checkpoint."""
        return self._solved

    def calibrate_module(
        self, module: torch.nn.Module, args: tuple[Tensor, ...], _output: Tensor
    ) -> None:
        """Forward hook: adds the rows of one call. Matrices that read one tensor share a product.

        Raises TrimtabError for rows that are not finite, or that cannot be told from padding.
        """
        name = self._names[self._module_names[module]]
        x = args[0]
        if module not in self._sums:
            self._sums[module] = HessianSum(
                name, x.shape[-1], device=_weight(module).device, source=self._source
            )
        total = self._sums[module]
        if self._last is None or self._last[0] is not x:
            rows_tk = self._tokens(name, x)
            prompts = [f"batch {active_session().state.current_batch_idx}"] * len(rows_tk)
            self._last = (x, *total.product(rows_tk, prompts))
        total.add_product(*self._last[1:])

    def _tokens(self, name: str, x: Tensor) -> Tensor:
        """The rows of x that are tokens, [t, k]."""
        mask_bt = self._masks[active_session().state.current_batch_idx]
        rows_tk = x.reshape(-1, x.shape[-1])
        if mask_bt is None:
            return rows_tk
        if len(rows_tk) != mask_bt.numel():
            raise TrimtabError(
                f"{name}: reads {len(rows_tk)} rows of a batch of {mask_bt.numel()} positions, "
                "some of them padding",
                hint="give calibration rows of one length",
            )
        return rows_tk[mask_bt.reshape(-1).to(rows_tk.device)]

    def on_sequential_epoch_end(
        self, state: Any, event: Any, modules: list[torch.nn.Module], **kwargs: Any
    ) -> None:
        """Solves the layer's matrices and puts their quantized weights in place."""
        self._last = None
        for module in modules:
            name = self._names.get(self._module_names.get(module, ""))
            if name is None or name in self._solved:
                continue
            w_nk = _weight(module)
            total = self._sums.pop(module, None) or HessianSum(name, w_nk.shape[1])
            self._solved[name] = self._solver(name, w_nk, total)
            quantized_nk = self._solved[name].matrix.dense(w_nk.dtype)
            update_offload_parameter(module, "weight", quantized_nk)
        self._done(len(self._solved), len(self._names))

    def on_calibration_end(self, state: Any, event: Any, **kwargs: Any) -> None:
        """TrimtabError for a matrix that no layer held."""
        missing = sorted(set(self._names.values()) - set(self._solved))
        if missing:
            raise TrimtabError(
                f"{missing[0]}: rows_seen=0, it is in no layer that the model runs "
                f"({len(missing)} such matrices)",
                hint="add it to `ignore`",
            )
        QuantizationMixin.end_calibration(self, state.model)
        self.remove_hooks()


def _weight(module: torch.nn.Module) -> Tensor:
    """The weight itself, not a copy, outside autograd."""
    return cast(Tensor, module.weight).detach()
