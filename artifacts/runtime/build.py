"""Loading a build (a `dist` folder or what `fetch` left): everything that decoding needs.

Covers `target/`, its MTP head, `draft_vocab/`, `drafter/`, the tokenizer and the generation config;
the manifest's hashes are checked first. Does not cover making or publishing builds, or decoding.
In: a folder. Out: `Build`.
Invariant: a build loads completely or not at all; what is absent is absent from the folder, and no
path or name decides what a part is.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from artifacts.checkpoint import Checkpoint, TensorSource, read_json
from artifacts.draft_vocab import DraftVocab, check_binding, head_of, read
from artifacts.errors import TrimtabError
from artifacts.manifest import verify as verify_manifest
from artifacts.names import head_module
from artifacts.runtime.dflash import Drafter
from artifacts.runtime.draft_head import DraftHead
from artifacts.runtime.mtp import MtpHead
from artifacts.runtime.sampling import SamplingParams
from artifacts.runtime.target import Target

REMAKE = "fetch the build again, or run `trimtab validate` on it for every problem"


@dataclass
class Build:
    """A loaded build.

    mtp, drafter, draft_vocab, draft_head: None when the build has none; the MTP head drafts with
    `draft_head` if there is one. tokenizer: transformers' own, from `target/`. generation: the
    parsed generation_config.json ({} without one). stop_ids: its eos ids, else the config's.
    draftable: bool [v], ids below the tokenizer's length except the drafter's mask id.
    choices: automatic choices with their reasons, one line each.
    """

    root: Path
    target: Target
    mtp: MtpHead | None
    drafter: Drafter | None
    draft_vocab: DraftVocab | None
    draft_head: DraftHead | None
    tokenizer: Any
    generation: dict[str, Any]
    stop_ids: tuple[int, ...]
    draftable: Tensor
    choices: list[str]

    @property
    def sampling(self) -> SamplingParams:
        """The sampling that the generation config asks for."""
        return SamplingParams.from_generation_config(self.generation)

    def methods(self) -> list[str]:
        """The draft methods that this build has the parts for, `none` first."""
        found = ["none"]
        if self.mtp is not None:
            found.append("mtp")
        if self.drafter is not None:
            found.append("dflash" if self.drafter.selector is None else "dflash2")
        found.append("lookup")
        if "dflash2" in found:
            found.append("dflash2+lookup")
        return found


def load_build(
    path: Path | str,
    *,
    verify: bool = True,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
) -> Build:
    """Load a build.

    Args:
        verify: compare every file with the manifest first; False takes an unsealed folder.
        dtype: compute dtype; by default fp32 on the CPU and bf16 on CUDA.

    Raises: TrimtabError naming the file, tensor or field that is missing, changed or unread.
    """
    root = Path(path)
    if not (root / "target").is_dir():
        raise TrimtabError(f"{root}: no folder target/ in it, so it is not a build", hint=REMAKE)
    if verify:
        problems = verify_manifest(root)
        if problems:
            more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
            raise TrimtabError(f"{root}: {problems[0]}{more}", hint=REMAKE)
    choices: list[str] = []
    if dtype is None:
        on_cpu = torch.device(device).type == "cpu"
        dtype = torch.float32 if on_cpu else torch.bfloat16
        why = "the CPU computes fp32 as fast" if on_cpu else "half the memory of fp32"
        choices.append(f"dtype {dtype} on {device}: {why}")
    source = Checkpoint.open(root / "target")
    target = Target.load(source, dtype=dtype, device=device)
    vocab, head = _draft_vocab(root / "draft_vocab", source, target)
    mtp = None
    if any(name.startswith("mtp.") for name in source.names()):
        mtp = MtpHead.load(source, target, head=head)
    elif head is not None:
        raise TrimtabError(f"{root}: has a draft vocabulary but no mtp.* tensors that use it")
    drafter = None
    if (root / "drafter").is_dir():
        drafter = Drafter.load(Checkpoint.open(root / "drafter"), target)
    tokenizer = _tokenizer(root / "target")
    generation, stop_ids = _generation(root / "target", source.config)
    draftable = torch.arange(target.config.vocab_size) < len(tokenizer)
    if drafter is not None:
        draftable[drafter.config.mask_id] = False
    return Build(
        root=root,
        target=target,
        mtp=mtp,
        drafter=drafter,
        draft_vocab=vocab,
        draft_head=head,
        tokenizer=tokenizer,
        generation=generation,
        stop_ids=stop_ids,
        draftable=draftable.to(target.device),
        choices=choices,
    )


def _draft_vocab(
    folder: Path, source: TensorSource, target: Target
) -> tuple[DraftVocab | None, DraftHead | None]:
    """The draft vocabulary, if there is one, proven to be cut from this target's head."""
    if not folder.is_dir():
        return None, None
    vocab = read(folder)
    problems = check_binding(vocab, head_of(source, head_module(source)))
    if problems:
        raise TrimtabError(problems[0], hint="run the draft-vocab stage again for this head")
    return vocab, DraftHead.reduced(target, vocab.head, vocab.target_ids)


def _tokenizer(folder: Path) -> Any:
    """transformers' tokenizer of the folder; never an empty one, never remote code."""
    if not (folder / "tokenizer.json").is_file():
        raise TrimtabError(f"{folder}: tokenizer.json is missing", hint=REMAKE)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(
        folder, local_files_only=True, trust_remote_code=False
    )
    if len(tokenizer) < 2:
        raise TrimtabError(f"{folder}: the tokenizer has {len(tokenizer)} ids", hint=REMAKE)
    return tokenizer


def _generation(folder: Path, config: dict[str, Any]) -> tuple[dict[str, Any], tuple[int, ...]]:
    """(generation config, stop ids): eos ids of the generation config, else of the model's."""
    path = folder / "generation_config.json"
    generation = read_json(path) if path.is_file() else {}
    eos = generation.get("eos_token_id")
    if eos is None:
        eos = config.get("eos_token_id", (config.get("text_config") or {}).get("eos_token_id"))
    ids = [] if eos is None else eos if isinstance(eos, list) else [eos]
    if not all(type(i) is int for i in ids):
        raise TrimtabError(f"{path}: eos_token_id {eos!r} is not an id or a list of ids")
    return generation, tuple(ids)
