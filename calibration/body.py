"""The body's matrices to packed GPTQ codes, layer by layer, each layer fed by the quantized ones.

Axes: b rows of a batch, t positions.
Covers choosing the matrices, batching the calibration rows, running llmcompressor's `oneshot` and
writing what it made. Does not cover the head (its Hessian comes from the quantized body: stage
`lm-head`), `mtp.*` (not in transformers' class), or choosing the rows.
In: a 16-bit checkpoint folder, token rows. Out: one safetensors file of packed triples under the
checkpoint's own names, and a ledger entry for each.
Invariant: only declared matrices leave here, every one with codes times scale equal to the weight
that its successors were calibrated on; the base folder is only read. Same rows, seed, threads and
machine: same bytes.

The library's saved model is never used: it rounds the (1 + w) norms there and back in bf16.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from artifacts.checkpoint import Checkpoint, write_single
from artifacts.errors import TrimtabError
from artifacts.ledger import LedgerEntry
from artifacts.names import add_prefix, matches_any, runtime_names
from artifacts.packing import Scheme
from calibration.library import contained, import_quietly

WITH_BARS = (
    "llmcompressor.pipelines.sequential.pipeline",
    "llmcompressor.pipelines.cache",
    "compressed_tensors.quantization.lifecycle.apply",
)
BATCH_TOKENS = 1 << 12  # positions a forward pass, padding included


def quantize_body(
    base_folder: Path | str,
    token_rows: Sequence[Sequence[int]],
    scheme: Scheme,
    ignore: Sequence[str],
    out_path: Path | str,
    *,
    seed: int,
    threads: int,
    work_dir: Path | str,
    dampening: float = 0.01,
    dampening_cap: float = 1.0,
    fallback_limit: int = 0,
    source: str = "calibration rows",
    progress: Callable[[int, int], None] | None = None,
) -> list[LedgerEntry]:
    """Quantizes every Linear of the transformers model but the head and what `ignore` selects.

    Args:
        token_rows: token ids; rows of one length need no padding (padding never reaches a Hessian).
        ignore: entries as in `quantization_config`, matched against every name that a consumer
            knows the matrix by.
        seed, threads: of the run; the process's own random state and threads are restored.
        work_dir: the library's current folder while it runs, so that nothing it might leave behind
            lands elsewhere.
        dampening, dampening_cap: as in `solve`.
        fallback_limit: matrices that may be rounded to nearest when their Hessian fails at the cap.
        source: what the ledger calls the rows. progress(solved, total): after each layer.

    Raises TrimtabError for unusable rows, a group size that does not fit, a base that is quantized
    already, a matrix that no row reached, and more fallbacks than the limit.
    """
    out_path = Path(out_path).absolute()
    checkpoint = Checkpoint.open(base_folder)
    if "quantization_config" in checkpoint.config:
        raise TrimtabError(
            f"{base_folder}: already quantized", hint="set target.source to imported"
        )
    _check_rows(token_rows, checkpoint)
    library = import_quietly("calibration.sequential")
    with contained(seed=seed, threads=threads, folder=Path(work_dir)):
        model = _load_model(Path(base_folder).absolute())
        names = _declared(model, checkpoint, ignore, scheme)
        batches, masks = _batches(token_rows, BATCH_TOKENS)
        modifier = library.LayerwiseGptq(config_groups=_config_groups(names, scheme)).prepare(
            names,
            masks,
            scheme,
            source=source,
            done=progress or (lambda solved, total: None),
            damping=dampening,
            damping_cap=dampening_cap,
            allow_fallback=fallback_limit > 0,
        )
        _oneshot(model, batches, modifier)
    solved = modifier.solved
    entries = [solved[name].entry for name in sorted(solved)]
    _check_fallbacks(entries, fallback_limit)
    tensors = {k: v for name, one in solved.items() for k, v in one.matrix.tensors(name).items()}
    write_single(out_path, tensors)
    return entries


def _check_rows(token_rows: Sequence[Sequence[int]], checkpoint: Checkpoint) -> None:
    """Refuses calibration without tokens, or with tokens that the model does not have."""
    empty = [index for index, row in enumerate(token_rows) if not len(row)]
    if not token_rows or empty:
        what = f"row {empty[0]} is empty" if empty else "there is no row"
        raise TrimtabError(f"calibration rows: {what}", hint="give rows of at least one token")
    config = checkpoint.config.get("text_config", checkpoint.config)
    for index, row in enumerate(token_rows):
        bad = [token for token in (min(row), max(row)) if not 0 <= token < config["vocab_size"]]
        if bad:
            raise TrimtabError(
                f"calibration rows: token {bad[0]} of row {index} is outside the vocabulary of "
                f"{config['vocab_size']}",
                hint="tokenize with this checkpoint's tokenizer",
            )


def _load_model(folder: Path) -> Any:
    """The transformers model: fp32 on the CPU, bf16 where an accelerator computes."""
    from transformers import AutoModelForCausalLM

    dtype = torch.bfloat16 if torch.accelerator.is_available() else torch.float32
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)


def _declared(
    model: Any, checkpoint: Checkpoint, ignore: Sequence[str], scheme: Scheme
) -> dict[str, str]:
    """Module name in the model to name in the checkpoint, of every matrix to quantize.

    Raises TrimtabError when none is left, when the checkpoint has no weight of that name and shape,
    or when the scheme does not fit (all before any work).
    """
    head = model.get_output_embeddings()
    names: dict[str, str] = {}
    for name, module in model.named_modules():
        if not isinstance(module, torch.nn.Linear) or module is head:
            continue
        stored = next((n for n in (name, add_prefix(name)) if f"{n}.weight" in checkpoint), None)
        aliases = runtime_names(stored or name)
        if any(matches_any(ignore, alias, "Linear") for alias in aliases):
            continue
        if stored is None:
            raise TrimtabError(
                f"{name}: the checkpoint has no weight of that name; its codes would fit nothing",
                hint="add it to `ignore`",
            )
        if checkpoint.info(f"{stored}.weight").shape != tuple(module.weight.shape):
            raise TrimtabError(f"{stored}: stored in another shape than transformers loads it")
        scheme.groups(module.weight.shape[1], stored)
        names[name] = stored
    if not names:
        raise TrimtabError("`ignore` leaves no matrix to quantize", hint="shorten it")
    return names


def _batches(
    token_rows: Sequence[Sequence[int]], limit: int
) -> tuple[list[dict[str, Tensor]], list[Tensor | None]]:
    """Rows of like length together, longest first, padded on the right; with their token masks.

    The models are causal, so tokens before the padding do not see it and no attention mask is
    needed; the masks keep the padding out of the Hessians.
    """
    order = sorted(range(len(token_rows)), key=lambda row: -len(token_rows[row]))
    batches: list[dict[str, Tensor]] = []
    masks: list[Tensor | None] = []
    while order:
        width = len(token_rows[order[0]])
        size = max(1, limit // width)
        rows, order = [token_rows[row] for row in order[:size]], order[size:]
        ids_bt = torch.zeros((len(rows), width), dtype=torch.int64)
        for index, row in enumerate(rows):
            ids_bt[index, : len(row)] = torch.tensor(row, dtype=torch.int64)
        lengths_b = torch.tensor([len(row) for row in rows])
        mask_bt = torch.arange(width) < lengths_b.unsqueeze(1)
        batches.append({"input_ids": ids_bt})
        masks.append(None if bool(mask_bt.all()) else mask_bt)
    return batches, masks


def _config_groups(names: dict[str, str], scheme: Scheme) -> dict[str, Any]:
    """The library's scheme for exactly these modules."""
    quantization = import_quietly("compressed_tensors.quantization")
    channel = scheme.group_size == -1
    weights = quantization.QuantizationArgs(
        num_bits=scheme.bits,
        type="int",
        symmetric=True,
        strategy="channel" if channel else "group",
        group_size=None if channel else scheme.group_size,
    )
    return {"body": quantization.QuantizationScheme(targets=sorted(names), weights=weights)}


def _oneshot(model: Any, batches: list[dict[str, Tensor]], modifier: Any) -> None:
    """Runs the sequential pipeline; an error of ours comes out as itself."""
    from torch.utils.data import DataLoader

    library = import_quietly("llmcompressor")
    patch_attr = import_quietly("compressed_tensors.utils").patch_attr
    loader: Any = DataLoader(batches, batch_size=None, shuffle=False)  # type: ignore[arg-type]
    try:
        with ExitStack() as stack:
            stack.enter_context(library.create_session())
            for name in WITH_BARS:
                stack.enter_context(patch_attr(import_quietly(name), "tqdm", _no_bar))
            library.oneshot(
                model=model,
                processor=_NoProcessor(),
                dataset=loader,
                recipe=modifier,
                pipeline="sequential",
                num_calibration_samples=len(batches),
                shuffle_calibration_samples=False,
            )
    except Exception as error:
        ours = _cause(error)
        if ours is None or ours is error:
            raise
        raise ours from error


class _NoProcessor:
    """Stands where the library would load a tokenizer: rows are token ids already."""


def _no_bar(iterable: Any, **_: Any) -> Any:
    """tqdm's place; progress is told by layer."""
    return iterable


def _cause(error: BaseException | None) -> TrimtabError | None:
    """The error of ours behind one that the library raised in its stead."""
    while error is not None and not isinstance(error, TrimtabError):
        error = error.__cause__ or error.__context__
    return error


def _check_fallbacks(entries: Sequence[LedgerEntry], limit: int) -> None:
    """TrimtabError when more matrices were rounded than allowed, naming them."""
    rounded = [entry.name for entry in entries if entry.method != "gptq"]
    if len(rounded) > limit:
        raise TrimtabError(
            f"{len(rounded)} of {len(entries)} matrices fell back to round-to-nearest, "
            f"{limit} allowed: {', '.join(rounded[:5])}",
            hint="calibrate on more rows, or raise target.fallback_limit",
        )
