"""The sections of a recipe: one frozen model each, one sentence and a default for every key.

Does: types, ranges and the rules within one section. Does not: read YAML or word errors (see
`recipe`), or compare the recipe with a checkpoint (see `plan`).

Invariant: what a section does not forbid can be carried out; no key is accepted and ignored.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, ValidationInfo, model_validator
from pydantic_core import PydanticCustomError

from pipeline.gates import Section

Bits = Literal[4, 8, 16]
COMMIT = re.compile(r"[0-9a-f]{40}")
REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def _resolve(path: Path, info: ValidationInfo) -> Path:
    """A relative path, made absolute against the recipe's folder (the validation context)."""
    folder = (info.context or {}).get("folder")
    path = path.expanduser()
    return path if folder is None or path.is_absolute() else (Path(folder) / path).resolve()


def _group_size(value: int) -> int:
    if value != -1 and (value < 8 or value % 8):
        raise PydanticCustomError(
            "group_size", "is {value}, must be -1 (one group a row) or a multiple of 8", locals()
        )
    return value


InputPath = Annotated[Path, AfterValidator(_resolve)]
GroupSize = Annotated[int, AfterValidator(_group_size)]


def _refuse(text: str, **values: object) -> PydanticCustomError:
    return PydanticCustomError("rule", text, values)


class Source(Section):
    """A checkpoint: a local folder, or a Hub repository at a commit."""

    path: InputPath | None = Field(
        default=None, description="Folder of the checkpoint, relative to the recipe's folder."
    )
    repo: str | None = Field(default=None, description="Hub repository, owner/name.")
    revision: str | None = Field(
        default=None,
        description="Commit of `repo`, 40 hexadecimal digits; a branch would move under the build.",
    )

    @model_validator(mode="after")
    def _one_place(self) -> Source:
        if (self.path is None) == (self.repo is None):
            raise _refuse("needs exactly one of path and repo")
        if self.path is not None and self.revision is not None:
            raise _refuse("revision belongs to repo, not to path")
        if self.repo is not None:
            if not REPOSITORY.fullmatch(self.repo):
                raise _refuse("repo is {repo}, must be owner/name", repo=repr(self.repo))
            if not COMMIT.fullmatch(self.revision or ""):
                raise _refuse(
                    "revision is {value}, must be a commit of {repo} (40 hexadecimal digits)",
                    value=repr(self.revision),
                    repo=self.repo,
                )
        return self

    def label(self) -> str:
        """What messages call it."""
        return str(self.path) if self.path is not None else f"{self.repo}@{self.revision}"


class Drafter(Source):
    """A DFlash or DFlash2 drafter trained for the base, and how its matrices are quantized."""

    bits: Bits = Field(default=4, description="Bits of a weight; 16 keeps the drafter as it is.")
    group_size: GroupSize = Field(
        default=128, description="Input columns that share one scale; -1 for a whole row."
    )
    dampening: float = Field(
        default=0.01, gt=0, lt=1, description="Added to the Hessian's diagonal, share of its mean."
    )


class PromptSource(Section):
    """Rows of chat prompts or texts: a local JSON lines file, or a data set at a commit."""

    path: InputPath | None = Field(
        default=None, description="A .json or .jsonl file, relative to the recipe's folder."
    )
    dataset: str | None = Field(default=None, description="Hub data set, owner/name.")
    revision: str | None = Field(
        default=None, description="Commit of `dataset`, 40 hexadecimal digits."
    )
    subset: str | None = Field(default=None, description="Configuration name of `dataset`.")
    split: str = Field(default="train", description="Split of `dataset`.")
    max_rows: int | None = Field(
        default=None, ge=1, description="Read at most this many rows of `dataset`; null for all."
    )
    limit: int | None = Field(
        default=None, ge=1, description="Rows taken, by a stable hash; null for every usable one."
    )
    allow_shortfall: bool = Field(
        default=False, description="Go on, and say so, with fewer usable rows than `limit`."
    )
    min_tokens: int = Field(default=1, ge=1, description="Shorter rows are dropped and counted.")
    max_tokens: int = Field(
        default=2048, ge=1, description="Longer prompts are dropped and counted, longer texts cut."
    )
    columns: dict[str, str] = Field(
        default_factory=dict,
        description="Our field (messages, text, id, domain, language, thinking, document) to "
        "the source's column, where they differ.",
    )
    domain: str = Field(default="general", description="Label of rows without a domain column.")
    language: str = Field(default="en", description="Label of rows without a language column.")
    thinking_share: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="Share of the rows without a thinking column that are rendered thinking.",
    )

    @model_validator(mode="after")
    def _one_place(self) -> PromptSource:
        if (self.path is None) == (self.dataset is None):
            raise _refuse("needs exactly one of path and dataset")
        if self.path is not None and (self.revision or self.subset or self.max_rows):
            raise _refuse("revision, subset and max_rows belong to dataset, not to path")
        if self.dataset is not None and not COMMIT.fullmatch(self.revision or ""):
            raise _refuse(
                "revision is {value}, must be a commit of {dataset} (40 hexadecimal digits)",
                value=repr(self.revision),
                dataset=self.dataset,
            )
        known = ("messages", "text", "id", "domain", "language", "thinking", "document")
        unknown = sorted(set(self.columns) - set(known))
        if unknown:
            raise _refuse(
                "columns.{name}: unknown field; known are {known}",
                name=unknown[0],
                known=", ".join(known),
            )
        return self

    def label(self) -> str:
        """What messages call it."""
        return str(self.path) if self.path is not None else f"{self.dataset}@{self.revision}"


class Prompts(Section):
    """The sets of text; no two may share a document."""

    calibration: PromptSource = Field(
        description="Chats the body is calibrated on and whose replies everything else learns from."
    )
    calibration_texts: PromptSource | None = Field(
        default=None, description="Documents the body is calibrated on beside the chats."
    )
    development: PromptSource = Field(description="Chats on which settings are chosen.")
    heldout: PromptSource = Field(description="Chats on which gates are measured.")
    texts: PromptSource = Field(description="Documents on which perplexity and KL are measured.")


class Target(Section):
    """The body: the matrices inside the decoder layers."""

    source: Literal["quantize", "imported"] = Field(
        default="quantize",
        description="quantize: GPTQ of a 16-bit base; imported: base is a published W4A16 body, "
        "taken byte for byte.",
    )
    bits: Literal[4, 8] = Field(default=4, description="Bits of a weight.")
    group_size: GroupSize = Field(
        default=128, description="Input columns that share one scale; -1 for a whole row."
    )
    ignore: tuple[str, ...] = Field(
        default=(r"re:.*linear_attn\.in_proj_[ab]$",),
        description="Matrices that stay in 16 bits: exact names, or re: and a pattern that must "
        "match from the start of the name.",
    )
    engine: Literal["oneshot"] = Field(
        default="oneshot", description="What walks the layers: llmcompressor's oneshot."
    )
    samples: int = Field(default=128, ge=1, description="Calibration rows.")
    sequence_length: int = Field(default=2048, ge=16, description="Tokens of a calibration row.")
    dampening: float = Field(
        default=0.01, gt=0, lt=1, description="Added to the Hessian's diagonal, share of its mean."
    )
    fallback_limit: int = Field(
        default=0, ge=0, description="Matrices that may fall back to round-to-nearest."
    )

    @model_validator(mode="after")
    def _patterns(self) -> Target:
        for pattern in self.ignore:
            try:
                if pattern.startswith("re:"):
                    re.compile(pattern.removeprefix("re:"))
            except re.error as error:
                raise _refuse(
                    "ignore: {pattern} is not a regular expression ({why})",
                    pattern=repr(pattern),
                    why=str(error),
                ) from None
        return self


class Signs(Section):
    """Negative group scales of an imported body are folded to positive ones."""

    original: Source | None = Field(
        default=None,
        description="The 16-bit checkpoint the imported body was made from: flipped groups are "
        "solved again from it, and gates compare with it. null: fold and saturate.",
    )


class Sampling(Section):
    """How tokens are drawn; null means off."""

    temperature: float = Field(default=1.0, gt=0, description="Divides the logits.")
    top_k: int | None = Field(default=None, ge=1, description="Keep so many likeliest ids.")
    top_p: float | None = Field(
        default=None, gt=0, le=1, description="Keep the likeliest ids that reach this probability."
    )


class Traffic(Section):
    """The quantized target's own replies to the prompts."""

    max_new_tokens: int = Field(default=512, ge=1, description="Longest reply, tokens.")
    prompts: int | None = Field(
        default=None, ge=1, description="Calibration prompts replied to; null for all."
    )
    chunk: int = Field(
        default=64, ge=1, description="Prompts decoded together and saved as one resumable piece."
    )
    heldout_new_tokens: int = Field(
        default=128, ge=1, description="Longest reply to a development or held-out prompt, tokens."
    )
    sampling: Sampling | None = Field(
        default=None,
        description="Instead of the base's generation_config; needed if that decodes greedily.",
    )


class Capture(Section):
    """One pass over the traffic that sums the Hessians."""

    depth: int = Field(default=3, ge=1, description="Longest MTP chain whose rows are captured.")
    lm_head: Literal["outputs", "all"] = Field(
        default="outputs", description="Rows of lm_head's Hessian: replies only, or prompts too."
    )
    heldout_rows: int = Field(
        default=20_000, ge=1, description="Final hidden states kept from held-out replies for KL."
    )
    chunk_tokens: int = Field(
        default=8192, ge=64, description="Tokens in one forward pass, padding included."
    )


class LmHead(Section):
    """The output matrix."""

    bits: Bits = Field(default=4, description="Bits of a weight; 16 keeps it as it is.")
    group_size: GroupSize = Field(
        default=128, description="Input columns that share one scale; -1 for a whole row."
    )
    dampening: float = Field(
        default=0.01, gt=0, lt=1, description="Added to the Hessian's diagonal, share of its mean."
    )


class Embedding(Section):
    """The input table."""

    format: Literal["keep", "int8"] = Field(
        default="keep", description="int8 saves memory and loads in no stock vLLM for this family."
    )
    group_size: GroupSize = Field(
        default=128, description="Columns that share one scale with int8; -1 for a whole row."
    )


class Mtp(Section):
    """The target's own multi-token head."""

    bits: Bits = Field(default=4, description="Bits of a weight; 16 keeps it as it is.")
    group_size: GroupSize = Field(
        default=128, description="Input columns that share one scale; -1 for a whole row."
    )
    dampening: float = Field(
        default=0.01, gt=0, lt=1, description="Added to the Hessian's diagonal, share of its mean."
    )
    depth: int = Field(
        default=3, ge=1, description="Chain length at which acceptance is measured, draft tokens."
    )


class DraftVocab(Section):
    """The reduced vocabulary of MTP's drafts."""

    fraction: float = Field(
        default=0.25, gt=0, le=1, description="Share of the vocabulary that is shipped."
    )
    rows: int | None = Field(
        default=None, ge=1, description="Rows shipped, instead of `fraction`; rounded up to 64."
    )
    compare: tuple[float, ...] = Field(
        default=(0.0625, 0.125, 0.5),
        description="Further shares whose coverage is reported beside the shipped one's.",
    )
    floor: float = Field(
        default=0.90,
        ge=0,
        le=1,
        description="Least coverage of held-out replies; the gate draft_vocab_coverage.",
    )
    minimum_sample: int = Field(
        default=20_000, ge=1, description="Held-out reply tokens on which coverage counts."
    )
    own_counts: InputPath | None = Field(
        default=None, description="File of token counts of more of the model's own replies."
    )
    text_counts: InputPath | None = Field(
        default=None, description="File of token counts of ordinary text."
    )
    force: tuple[int, ...] = Field(
        default=(), description="Ids that are in whatever their count, beside the special ones."
    )

    @model_validator(mode="after")
    def _shares(self) -> DraftVocab:
        wrong = [share for share in self.compare if not 0 < share <= 1]
        if wrong:
            raise _refuse("compare has {value}, must be shares above 0 and up to 1", value=wrong[0])
        if any(token < 0 for token in self.force):
            raise _refuse("force has a negative id")
        return self


class Destination(Section):
    """Where a build is published: a folder laid out as a Hub repository, or a Hub repository."""

    path: Path | None = Field(default=None, description="Folder, relative to the work folder.")
    repo: str | None = Field(default=None, description="Hub repository, owner/name.")

    @model_validator(mode="after")
    def _one_place(self) -> Destination:
        if (self.path is None) == (self.repo is None):
            raise _refuse("needs exactly one of path and repo")
        if self.repo is not None and not REPOSITORY.fullmatch(self.repo):
            raise _refuse("repo is {repo}, must be owner/name", repo=repr(self.repo))
        return self


class Publish(Section):
    """The last stage."""

    to: Destination = Field(description="Where the sealed build goes.")
    name: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$",
        description="Name on the card and of fetch_<name>.py; null for the recipe's name.",
    )
    licence: str = Field(description="Licence of the build, an SPDX id or the base's own.")
    base_model: str | None = Field(
        default=None, description="Hub name of the base for the card; null for base.repo."
    )
