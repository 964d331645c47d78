"""Reading from the Hub at a pinned commit: listings, small files, headers, whole files.

Does: the four calls that `skeleton` and the stage `fetch` need, with errors in one line that never
hold a token. Does not: decide what to read, or publish.

Invariant: everything is asked for at one commit, and the answer is checked to be of that commit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from artifacts.checkpoint import TensorInfo
from artifacts.errors import TrimtabError
from pipeline.redaction import redact


@dataclass(frozen=True)
class RemoteFile:
    """A file of a repository: size in bytes, and what the Hub knows of its content.

    Exactly one of `sha256` (large files) and `git_sha1` (the others) is set.
    """

    name: str
    size: int
    sha256: str | None
    git_sha1: str | None

    def differs(self, path: Path) -> str:
        """ "" if the local file is this one, else what differs."""
        size = path.stat().st_size
        if size != self.size:
            return f"{self.name}: {size} bytes, the Hub says {self.size}"
        wanted, digest = self.sha256, hashlib.sha256()
        if wanted is None:
            wanted, digest = self.git_sha1, hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
        with path.open("rb") as stream:
            while block := stream.read(1 << 22):
                digest.update(block)
        if digest.hexdigest() != wanted:
            return f"{self.name}: hash {digest.hexdigest()[:12]}, the Hub says {str(wanted)[:12]}"
        return ""


@contextmanager
def worded(what: str) -> Iterator[None]:
    """Turn the Hub client's errors into one line without headers or tokens."""
    import httpx
    from huggingface_hub import errors

    try:
        yield
    except errors.GatedRepoError:
        raise TrimtabError(
            f"{what}: access is gated",
            hint="accept the terms on the repository's page, then log in with `hf auth login`",
        ) from None
    except errors.RevisionNotFoundError:
        raise TrimtabError(f"{what}: no such commit there", hint="copy it from the page") from None
    except errors.RepositoryNotFoundError:
        raise TrimtabError(
            f"{what}: no such repository, or it is private",
            hint="check the name; for a private one log in with `hf auth login`",
        ) from None
    except (errors.HfHubHTTPError, httpx.HTTPError, errors.LocalEntryNotFoundError) as error:
        status = getattr(getattr(error, "response", None), "status_code", None)
        reason = f"HTTP {status}" if status else type(error).__name__
        raise TrimtabError(f"{what}: {redact(reason)}", hint="try again later") from None


def listing(repo: str, revision: str) -> list[RemoteFile]:
    """Every file of the repository at the commit.

    Raises:
        TrimtabError: it cannot be read, or the Hub answers for another commit.
    """
    from huggingface_hub import HfApi

    with worded(f"{repo}@{revision[:12]}"):
        info = HfApi().model_info(repo, revision=revision, files_metadata=True)
    if info.sha != revision:
        raise TrimtabError(f"{repo}: asked for commit {revision}, the Hub answered for {info.sha}")
    return [
        RemoteFile(
            name=file.rfilename,
            size=int(file.size or 0),
            sha256=file.lfs.sha256 if file.lfs else None,
            git_sha1=None if file.lfs else file.blob_id,
        )
        for file in info.siblings or []
    ]


def small_files(repo: str, revision: str, names: list[str]) -> Path:
    """The named files in the Hub's own cache; the folder that holds them."""
    from huggingface_hub import snapshot_download

    with worded(f"{repo}@{revision[:12]}"):
        return Path(str(snapshot_download(repo, revision=revision, allow_patterns=names)))


def download(repo: str, revision: str, name: str, folder: Path) -> None:
    """One file into `folder`; what an earlier attempt left of it is gone on with.

    The client's own bookkeeping stays in `folder`/.cache.
    """
    from huggingface_hub import hf_hub_download

    with worded(f"{repo}@{revision[:12]}: {name}"):
        hf_hub_download(repo, name, revision=revision, local_dir=folder)


def headers(repo: str, revision: str, file: str) -> dict[str, TensorInfo]:
    """The tensors of a safetensors file, from its header alone."""
    from huggingface_hub import HfApi

    with worded(f"{repo}@{revision[:12]}: {file}"):
        found = HfApi().parse_safetensors_file_metadata(repo, file, revision=revision)
    return {
        name: TensorInfo(
            name=name,
            dtype=str(info.dtype),
            shape=tuple(info.shape),
            file=file,
            start=info.data_offsets[0],
            end=info.data_offsets[1],
        )
        for name, info in found.tensors.items()
    }
