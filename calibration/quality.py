"""How close a quantized target is to its 16-bit source: head KL, perplexity, KL, diversity.

Does: compare a head on held-out states with round-to-nearest; compare whole targets on held-out
texts; compare the variety of sampled outputs. Does not: read a build (see the stage `validate`),
measure drafters (see `acceptance`), or judge.

Inputs: targets of the runtime, dense heads, token lists. Outputs: `Measured` figures by statistic.

Invariant: each figure compares two models on the same rows, resampled by document.

Axes: t rows, h hidden, v vocabulary, d documents.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from artifacts.packing import PackedMatrix, Scheme
from calibration.diversity import diversity
from calibration.grid import amax_scales
from calibration.intervals import (
    bootstrap,
    group_sums,
    perplexity_ratio_interval,
    ratio_interval,
)
from calibration.measured import Measured
from calibration.metrics import compare_documents, document_nll, head_kl
from calibration.solve import solve_rtn
from calibration.states import States

if TYPE_CHECKING:
    from artifacts.runtime.target import Target

TAILS = (0.5, 0.9, 0.99, 0.999)


def plain_round_to_nearest(weight_nk: Tensor, scheme: Scheme) -> PackedMatrix:
    """The baseline: codes rounded with scale amax/7 (amax/127 for int8), stored in bf16."""
    scale_ng = amax_scales(weight_nk, scheme)
    return solve_rtn("baseline", weight_nk, scheme, reason="baseline", scale_ng=scale_ng).matrix


def head_figures(states: States, reference_vh: Tensor, head_vh: Tensor, rtn_vh: Tensor) -> Measured:
    """`lm_head_kl_ratio`: KL(reference || head) over KL(reference || rtn), by document.

    The detail holds both means in nats and the tail quantiles of the head's KL.
    """
    head_t = head_kl(states.hidden_th, reference_vh, head_vh).numpy()
    rtn_t = head_kl(states.hidden_th, reference_vh, rtn_vh).numpy()
    interval = ratio_interval(head_t, rtn_t, states.groups())
    return Measured.of(
        interval,
        len(head_t),
        kl=float(head_t.mean()),
        kl_round_to_nearest=float(rtn_t.mean()),
        kl_quantiles={str(q): float(np.quantile(head_t, q)) for q in TAILS},
        documents=interval.groups,
    )


def text_figures(
    reference: Target,
    quantized: Target,
    docs: Sequence[Sequence[int]],
    documents: Sequence[str],
    *,
    body: Target | None = None,
    body_rtn: Target | None = None,
) -> dict[str, Measured]:
    """Perplexity and KL on texts.

    Args:
        docs, documents: token ids of each text and the document it belongs to.
        body: the quantized body with the 16-bit head; with `body_rtn`, the same body rounded to
            nearest, it gives `body_excess_ratio`.
    """
    both = compare_documents(reference, quantized, docs)
    tokens_d = both.reference.tokens_d
    ratio = perplexity_ratio_interval(
        both.other.nll_d, both.reference.nll_d, tokens_d, list(documents)
    )
    kl = ratio_interval(both.kl_d, tokens_d.astype(np.float64), list(documents))
    tokens = both.reference.tokens
    figures = {
        "target_perplexity_ratio": Measured.of(
            ratio,
            tokens,
            perplexity=both.other.perplexity,
            perplexity_16bit=both.reference.perplexity,
            top1=both.other.top1,
            top1_16bit=both.reference.top1,
            documents=ratio.groups,
        ),
        "target_kl": Measured.of(
            kl, tokens, top1_agreement=float(both.agree_d.sum() / tokens), documents=kl.groups
        ),
    }
    if body is not None and body_rtn is not None:
        own, rtn = document_nll(body, docs), document_nll(body_rtn, docs)
        sums = group_sums([own.nll_d, rtn.nll_d, both.reference.nll_d, tokens_d], list(documents))
        excess = bootstrap(sums, _excess_ratio)
        figures["body_excess_ratio"] = Measured.of(
            excess,
            tokens,
            perplexity=own.perplexity,
            perplexity_round_to_nearest=rtn.perplexity,
            perplexity_16bit=both.reference.perplexity,
            documents=excess.groups,
        )
    return figures


def _excess_ratio(sums: np.ndarray) -> np.ndarray:  # type: ignore[type-arg]
    """(PPL own - PPL 16-bit) / (PPL rtn - PPL 16-bit) from nll sums [..., 3] and tokens."""
    own, rtn, reference = (np.exp(sums[..., i] / sums[..., 3]) for i in range(3))
    result: np.ndarray = (own - reference) / (rtn - reference)  # type: ignore[type-arg]
    return result


def diversity_figures(
    outputs: Sequence[Sequence[int]], reference: Sequence[Sequence[int]]
) -> dict[str, Measured]:
    """Loops and variety of sampled outputs beside those of the 16-bit target, same prompts."""
    own, other = diversity(outputs), diversity(reference)
    n = min(own.outputs, other.outputs)
    return {
        "loop_share_increase": Measured(
            point=own.loop_outputs - other.loop_outputs,
            sample=n,
            detail={
                "loop_outputs": own.loop_outputs,
                "loop_outputs_16bit": other.loop_outputs,
                "loop_tokens": own.loop_tokens,
                "longest_run": own.longest_run,
            },
        ),
        "distinct_ratio": Measured(
            point=own.distinct_ngrams[4] / max(other.distinct_ngrams[4], 1e-9),
            sample=n,
            detail={
                "distinct_4grams": own.distinct_ngrams[4],
                "distinct_4grams_16bit": other.distinct_ngrams[4],
                "distinct_outputs": own.distinct_outputs,
            },
        ),
    }
