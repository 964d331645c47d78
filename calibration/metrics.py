"""How well a model predicts text, how far two models are apart, what a vocabulary covers.

Axes: b documents of a batch, t positions or rows, h hidden, v vocabulary, d documents.
Covers likelihood and top-1 by document, KL divergence of models and of heads, coverage; intervals
and diversity come from `intervals` and `diversity`, re-exported here. Does not cover acceptance
(`replay`) or thresholds (the recipe's gates).
In: targets of the runtime and token ids, or hidden states and head weights. Out: sums by document
or row, never a mean without its count. Units: nats.
Invariant: at most CHUNK_LOGITS logits exist at once, whatever the text's length.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from artifacts.errors import TrimtabError
from calibration.diversity import DiversityReport, diversity
from calibration.intervals import (
    Interval,
    bootstrap,
    group_sums,
    mean_interval,
    perplexity_ratio_interval,
    rate_ratio_interval,
    ratio_interval,
)

__all__ = [
    "Comparison",
    "Coverage",
    "DiversityReport",
    "DocumentNll",
    "Interval",
    "bootstrap",
    "compare_documents",
    "coverage",
    "diversity",
    "document_nll",
    "group_sums",
    "head_kl",
    "kl_rows",
    "mean_interval",
    "perplexity_ratio_interval",
    "rate_ratio_interval",
    "ratio_interval",
]

CHUNK_LOGITS = 1 << 24  # fp32 logits of one model held at once: 64 MiB
BATCH_TOKENS = 1 << 13  # tokens a forward pass, padding included


class LanguageModel(Protocol):
    """What is used of `artifacts.runtime.target.Target`."""

    device: Any

    def forward(self, ids_bt: Tensor, *, lengths_b: Tensor | None = None) -> Any: ...
    def logits(self, hidden: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class DocumentNll:
    """Per document: nll_d summed negative log-likelihood in nats, tokens_d predicted tokens (the
    first of a document is not predicted), top1_d how often the likeliest token was the right one.
    """

    nll_d: NDArray[np.float64]
    tokens_d: NDArray[np.int64]
    top1_d: NDArray[np.int64]

    @property
    def tokens(self) -> int:
        return int(self.tokens_d.sum())

    @property
    def perplexity(self) -> float:
        """exp of the mean over all tokens."""
        return float(np.exp(self.nll_d.sum() / self.tokens))

    @property
    def top1(self) -> float:
        return float(self.top1_d.sum() / self.tokens)


@dataclass(frozen=True)
class Comparison:
    """Two models on the same documents. kl_d: summed KL(reference || other) per document;
    agree_d: positions where their likeliest tokens are the same."""

    reference: DocumentNll
    other: DocumentNll
    kl_d: NDArray[np.float64]
    agree_d: NDArray[np.int64]

    @property
    def kl(self) -> float:
        """Mean KL a token."""
        return float(self.kl_d.sum() / self.reference.tokens)

    @property
    def perplexity_ratio(self) -> float:
        """The other's perplexity over the reference's."""
        return self.other.perplexity / self.reference.perplexity


@dataclass(frozen=True)
class Coverage:
    """Per output: covered_o tokens whose id is in the vocabulary, of total_o."""

    covered_o: NDArray[np.int64]
    total_o: NDArray[np.int64]

    @property
    def share(self) -> float:
        return float(self.covered_o.sum() / self.total_o.sum())


def kl_rows(p_logits: Tensor, q_logits: Tensor) -> Tensor:
    """KL(p || q) of logits [t, v] in nats, fp32 [t]: sum of p (log p - log q)."""
    log_p_tv = torch.log_softmax(p_logits.float(), dim=-1)
    log_q_tv = torch.log_softmax(q_logits.float(), dim=-1)
    log_q_tv.neg_().add_(log_p_tv)
    return log_p_tv.exp_().mul_(log_q_tv).sum(dim=-1)


@torch.no_grad()
def head_kl(states_th: Tensor, reference_vh: Tensor, other_vh: Tensor) -> Tensor:
    """KL(reference || other) of two heads [v, h] on states [t, h] after the final norm: fp64 [t].

    Logits in fp32, a chunk of rows at a time.
    """
    step = max(1, CHUNK_LOGITS // max(reference_vh.shape[0], 1))
    reference_hv, other_hv = reference_vh.float().T, other_vh.float().T
    parts = []
    for rows in _slices(len(states_th), step):
        states = states_th[rows].float()
        parts.append(kl_rows(states @ reference_hv, states @ other_hv).double())
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64)


@torch.no_grad()
def document_nll(
    target: LanguageModel, docs: Sequence[Sequence[int]], *, batch_tokens: int = BATCH_TOKENS
) -> DocumentNll:
    """Teacher-forced likelihood of each document on its own, from its first token.

    Raises TrimtabError when no document has two tokens.
    """
    result = _empty(docs)
    for index_b, (hidden_th,), next_t, owner_t in _batches([target], docs, batch_tokens):
        for rows in _slices(len(next_t), _rows(target, hidden_th)):
            logits_tv = target.logits(hidden_th[rows]).float()
            _score(result, index_b[owner_t[rows]], logits_tv, next_t[rows])
    return result


@torch.no_grad()
def compare_documents(
    reference: LanguageModel,
    other: LanguageModel,
    docs: Sequence[Sequence[int]],
    *,
    batch_tokens: int = BATCH_TOKENS,
) -> Comparison:
    """Both models on the same documents: likelihoods, KL(reference || other), top-1 agreement.

    Raises TrimtabError when no document has two tokens.
    """
    first, second = _empty(docs), _empty(docs)
    kl_d, agree_d = np.zeros(len(docs)), np.zeros(len(docs), dtype=np.int64)
    for index_b, hidden, next_t, owner_t in _batches([reference, other], docs, batch_tokens):
        for rows in _slices(len(next_t), _rows(reference, hidden[0])):
            documents_t = index_b[owner_t[rows]]
            p_tv = reference.logits(hidden[0][rows]).float()
            q_tv = other.logits(hidden[1][rows]).float()
            _score(first, documents_t, p_tv, next_t[rows])
            _score(second, documents_t, q_tv, next_t[rows])
            same_t = (p_tv.argmax(dim=-1) == q_tv.argmax(dim=-1)).cpu().numpy()
            np.add.at(agree_d, documents_t, same_t.astype(np.int64))
            np.add.at(kl_d, documents_t, kl_rows(p_tv, q_tv).double().cpu().numpy())
    return Comparison(first, second, kl_d, agree_d)


def coverage(ids: Sequence[int] | NDArray[np.int64], outputs: Sequence[Sequence[int]]) -> Coverage:
    """How many tokens of each output are among the ids of a draft vocabulary."""
    known = np.unique(np.asarray(ids, dtype=np.int64))
    covered = [int(np.isin(np.asarray(o, dtype=np.int64), known).sum()) for o in outputs]
    return Coverage(
        np.asarray(covered, dtype=np.int64),
        np.asarray([len(output) for output in outputs], dtype=np.int64),
    )


def _empty(docs: Sequence[Sequence[int]]) -> DocumentNll:
    """Zeros for each document, with its number of predicted tokens."""
    tokens_d = np.asarray([max(len(document) - 1, 0) for document in docs], dtype=np.int64)
    if not tokens_d.sum():
        raise TrimtabError(
            f"no token to predict in {len(docs)} documents", hint="give documents of 2 tokens up"
        )
    return DocumentNll(np.zeros(len(docs)), tokens_d, np.zeros(len(docs), dtype=np.int64))


def _score(
    result: DocumentNll, documents_t: NDArray[np.int64], logits_tv: Tensor, next_t: Tensor
) -> None:
    """Adds the rows' likelihoods and hits to their documents."""
    next_t = next_t.to(logits_tv.device)
    nll_t = torch.nn.functional.cross_entropy(logits_tv, next_t, reduction="none")
    np.add.at(result.nll_d, documents_t, nll_t.double().cpu().numpy())
    hit_t = (logits_tv.argmax(dim=-1) == next_t).cpu().numpy()
    np.add.at(result.top1_d, documents_t, hit_t.astype(np.int64))


def _slices(total: int, step: int) -> list[slice]:
    """0..total in slices of step."""
    return [slice(start, min(start + step, total)) for start in range(0, total, step)]


def _rows(target: LanguageModel, hidden_th: Tensor) -> int:
    """Rows a chunk so that its logits stay below CHUNK_LOGITS."""
    width = target.logits(hidden_th[:1]).shape[-1] if len(hidden_th) else 1
    return max(1, CHUNK_LOGITS // int(width))


@torch.no_grad()
def _batches(
    targets: Sequence[LanguageModel], docs: Sequence[Sequence[int]], batch_tokens: int
) -> Iterator[tuple[NDArray[np.int64], list[Tensor], Tensor, NDArray[np.int64]]]:
    """Documents of like length together: (documents of the batch, hidden [t, h] of each target at
    the positions that predict a token, those tokens [t], row of the batch [t])."""
    order = sorted((d for d in range(len(docs)) if len(docs[d]) > 1), key=lambda d: -len(docs[d]))
    while order:
        width = len(docs[order[0]])
        size = max(1, batch_tokens // width)
        batch, order = order[:size], order[size:]
        ids_bt = torch.zeros((len(batch), width), dtype=torch.int64)
        for row, document in enumerate(batch):
            ids_bt[row, : len(docs[document])] = torch.tensor(docs[document], dtype=torch.int64)
        lengths_b = torch.tensor([len(docs[document]) for document in batch])
        used_bt = torch.arange(width - 1) < (lengths_b - 1).unsqueeze(1)
        owner_t = torch.arange(len(batch)).unsqueeze(1).expand_as(used_bt)[used_bt]
        hidden = []
        for target in targets:
            output = target.forward(ids_bt.to(target.device), lengths_b=lengths_b.to(target.device))
            hidden.append(output.hidden_bth[:, :-1][used_bt.to(target.device)])
        yield np.asarray(batch), hidden, ids_bt[:, 1:][used_bt], owner_t.numpy()
