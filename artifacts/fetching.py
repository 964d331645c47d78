"""Fetching published builds: the command, and the script that every build carries.

Covers `fetch` (a build with a manifest, from a folder or the Hub) and the text of
`fetch_<name>.py`; both run `fetch_core`. Does not cover fetching source checkpoints, which have no
manifest (the pipeline's stage `fetch`). Needs no torch.
Invariant: what `fetch` leaves under its own name was verified.
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from artifacts import fetch_core
from artifacts.errors import TrimtabError
from artifacts.manifest import Manifest, load, script_name

TAG_LENGTH = 12


def tag_of(manifest_sha256: str) -> str:
    """The tag that names a build in its repository."""
    return f"build-{manifest_sha256[:TAG_LENGTH]}"


def render_script(manifest: Manifest, manifest_sha256: str, *, repo_id: str | None = None) -> str:
    """The text of `fetch_<name>.py`: self-contained, pinned to this manifest.

    `repo_id` replaces the manifest's when the build goes to another repository.
    """
    template = resources.files("artifacts").joinpath("fetch_script.py.txt").read_text("utf-8")
    core = resources.files("artifacts").joinpath("fetch_core.py").read_text("utf-8")
    body = core.split("from __future__ import annotations\n", 1)[1].strip("\n")
    repo = repo_id or manifest.repo_id or ""
    revision = tag_of(manifest_sha256) if repo else ""
    values = {
        "CORE": body,
        "NAME": manifest.name,
        "SCRIPT": script_name(manifest.name),
        "WHERE": f"the Hub, {repo} at {revision}" if repo else "the folder this script lies in",
        "REPO_ID": repo,
        "REVISION": revision,
        "MANIFEST_SHA256": manifest_sha256,
    }
    for key, value in values.items():
        template = template.replace(f"@@{key}@@", value)
    return template


def fetch(
    ref: str | Path, dest: Path | str, *, manifest_sha256: str | None = None, quiet: bool = False
) -> Manifest:
    """Fetches a build from a folder, `owner/name[@revision]` or `hf://owner/name[@revision]`.

    `manifest_sha256` pins it; without it the source's manifest is trusted and all else is checked
    against it. Raises TrimtabError naming the file that is missing, wrong or in the way.
    """
    try:
        source: fetch_core.FolderSource | fetch_core.HubSource
        if Path(ref).is_dir():
            source = fetch_core.FolderSource(Path(ref))
        else:
            repo = fetch_core.parse_repo(str(ref))
            if repo is None or isinstance(ref, Path):
                raise fetch_core.FetchError(f"{ref}: neither a folder nor owner/name[@revision]")
            source = fetch_core.HubSource(*repo)
        fetch_core.fetch_build(source, Path(dest), manifest_sha256=manifest_sha256, quiet=quiet)
    except fetch_core.FetchError as error:
        raise TrimtabError(str(error), hint="check the source, then run the same again") from error
    return load(dest)
