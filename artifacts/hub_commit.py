"""Publishing to the Hub: upload the bytes first, then exactly one commit, read back, tag.

Covers one publication through huggingface_hub. Does not cover folders or refusals (`hub`).
In: a checked build and owner/name. Out: a `Publication` with the commit. The bytes move before the
commit (`preupload_lfs_files`, resumable), so that users see the old revision or the whole new one;
the commit also deletes remote weights that the manifest does not list.
Invariant: at most one commit a publication; what the Hub states after it equals the manifest. A
refusal (4xx other than 408 and 429) is final; other failures are tried again a bounded number of
times, and never before looking whether the commit has been made after all.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from artifacts.errors import TrimtabError
from artifacts.fetch_core import reason
from artifacts.fetching import tag_of
from artifacts.files import sha256_file
from artifacts.hub import Publication, overrides, published_files
from artifacts.manifest import MANIFEST, PICKLES, Manifest

if TYPE_CHECKING:
    from huggingface_hub import (
        CommitOperationAdd,
        CommitOperationCopy,
        CommitOperationDelete,
        HfApi,
    )
    from huggingface_hub.hf_api import RepoFile

T = TypeVar("T")
ATTEMPTS = 5
LONGEST_WAIT = 60.0  # seconds
OWN_FOLDERS = ("target/", "drafter/", "draft_vocab/")
WEIGHTS = (".safetensors", ".safetensors.index.json", ".gguf", *PICKLES)


def publish_hub(
    build: Path, repo_id: str, manifest: Manifest, failed: list[str], *, dry_run: bool
) -> Publication:
    """Publishes and returns the commit; `changed` is False if the Hub held exactly this build."""
    digest = sha256_file(build / MANIFEST)
    replaced = overrides(manifest, digest, repo_id)
    wanted: dict[str, Path | bytes] = {
        name: replaced.get(name, build / name) for name in published_files(manifest)
    }
    sizes = sum(len(v) if isinstance(v, bytes) else v.stat().st_size for v in wanted.values())

    def result(changed: bool, commit: str | None, deleted: list[str]) -> Publication:
        return Publication(
            kind="hub",
            location=repo_id,
            manifest_sha256=digest,
            files=len(wanted),
            bytes=sizes,
            changed=changed,
            revision=commit,
            url=f"https://huggingface.co/{repo_id}/tree/{commit}" if commit else None,
            deleted=deleted,
            failed_gates=failed,
        )

    if dry_run:
        return result(True, None, [])
    from huggingface_hub import HfApi

    api = HfApi()
    _retry(repo_id, lambda: api.create_repo(repo_id, exist_ok=True))
    head, remote = _state(api, repo_id)
    stale = _stale(remote, wanted)
    changed = bool(stale or _differences(remote, wanted))
    if changed:
        head = _commit(api, repo_id, head, wanted, stale, f"Publish {manifest.name}")
        _, remote = _state(api, repo_id, head)
        differences = _differences(remote, wanted) + _stale(remote, wanted)
        if differences:
            raise TrimtabError(
                f"{repo_id}@{head}: the Hub holds another {differences[0]} than was published",
                hint="publish again, and do not use this revision",
            )
    _retry(
        repo_id, lambda: api.create_tag(repo_id, tag=tag_of(digest), revision=head, exist_ok=True)
    )
    return result(changed, head, stale if changed else [])


def _state(api: HfApi, repo_id: str, revision: str = "main") -> tuple[str, dict[str, RepoFile]]:
    """(commit, path -> what the Hub states of the file)."""
    from huggingface_hub.hf_api import RepoFile

    commit = str(_retry(repo_id, lambda: api.repo_info(repo_id, revision=revision)).sha)
    tree = _retry(
        repo_id, lambda: list(api.list_repo_tree(repo_id, recursive=True, revision=commit))
    )
    return commit, {entry.path: entry for entry in tree if isinstance(entry, RepoFile)}


def _stale(remote: dict[str, RepoFile], wanted: dict[str, Path | bytes]) -> list[str]:
    """Remote weights, and files in our folders, that this build does not have."""
    return sorted(
        name
        for name in remote
        if name not in wanted and (name.endswith(WEIGHTS) or name.startswith(OWN_FOLDERS))
    )


def _differences(remote: dict[str, RepoFile], wanted: dict[str, Path | bytes]) -> list[str]:
    """Paths that the Hub lacks or states another hash for."""
    return [name for name, content in wanted.items() if not _equal(remote.get(name), content)]


def _equal(stated: RepoFile | None, content: Path | bytes) -> bool:
    data = content if isinstance(content, bytes) else None
    size = len(data) if data is not None else Path(str(content)).stat().st_size
    if stated is None or stated.size != size:
        return False
    if stated.lfs is not None:
        own = hashlib.sha256(data).hexdigest() if data is not None else sha256_file(str(content))
        return bool(stated.lfs.sha256 == own)
    if data is None:
        data = Path(str(content)).read_bytes()
    blob = hashlib.sha1(f"blob {size}\0".encode() + data, usedforsecurity=False)
    return bool(stated.blob_id == blob.hexdigest())


def _commit(
    api: HfApi,
    repo_id: str,
    parent: str,
    wanted: dict[str, Path | bytes],
    stale: list[str],
    message: str,
) -> str:
    """Uploads, then commits once on top of `parent`; returns the commit."""
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

    additions: list[CommitOperationAdd] = [
        CommitOperationAdd(
            path_in_repo=name,
            path_or_fileobj=content if isinstance(content, bytes) else str(content),
        )
        for name, content in wanted.items()
    ]
    _retry(
        repo_id, lambda: api.preupload_lfs_files(repo_id, additions=additions, free_memory=False)
    )

    def commit() -> str:
        deletions = [CommitOperationDelete(path_in_repo=name) for name in stale]
        operations: list[CommitOperationAdd | CommitOperationCopy | CommitOperationDelete]
        operations = [*additions, *deletions]
        done = api.create_commit(
            repo_id, operations=operations, commit_message=message, parent_commit=parent
        )
        return str(done.oid)

    def made_already() -> str | None:
        head, remote = _state(api, repo_id)
        return head if head != parent and not _differences(remote, wanted) else None

    return _retry(repo_id, commit, made_already)


def _retry(
    repo_id: str, call: Callable[[], T], made_already: Callable[[], T | None] | None = None
) -> T:
    """Calls until it succeeds, a refusal comes, or the attempts are used up.

    Before every repetition `made_already` may find that the call did succeed on the Hub's side.
    """
    from huggingface_hub.errors import HfHubHTTPError

    for attempt in range(ATTEMPTS):
        try:
            return call()
        except (HfHubHTTPError, ConnectionError, TimeoutError, OSError) as error:
            response = getattr(error, "response", None)
            status = getattr(response, "status_code", None)
            final = status is not None and 400 <= status < 500 and status not in (408, 429)
            if not final and made_already is not None:
                found = made_already()
                if found is not None:
                    return found
            if final or attempt == ATTEMPTS - 1:
                raise TrimtabError(
                    f"{repo_id}: the Hub refused or did not answer: {reason(error)}",
                    hint="check the name and `hf auth whoami`; a write token is needed",
                ) from error
            time.sleep(min(_wait(response, attempt), LONGEST_WAIT))
    raise AssertionError("unreachable")


def _wait(response: object, attempt: int) -> float:
    """Seconds: what Retry-After says, else 1, 2, 4, ..."""
    told = getattr(response, "headers", {}).get("Retry-After", "")
    return float(told) if str(told).isdigit() else float(2**attempt)
