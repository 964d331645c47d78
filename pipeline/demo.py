"""`make demo`: the whole way once, on the pocket family, ending with one table.

Does: run the recipe, fetch what it published with the published script itself, verify it, generate
with every way of drafting from the fetched copy, print the report. Does not: take a shortcut; each
step is what a user would call.

Invariant: the table's figures come from the fetched files.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from itertools import islice
from pathlib import Path

from artifacts.errors import GateFailed, TrimtabError
from pipeline import cli

RECIPE = Path("recipes/pocket.yaml")
PROMPTS = Path("recipes/pocket/data/heldout.jsonl")
PLACE = Path("demo")
SHOWN_PROMPTS = 4
NEW_TOKENS = 64


def main() -> int:
    """Run it; the exit code."""
    if not RECIPE.is_file():
        print(f"error: {RECIPE}: no such file\n  next: run this from a clone of the repository")
        return 2
    started = time.monotonic()
    code = cli.main(["run", str(RECIPE), "--work", str(PLACE / "work")])
    if code:
        return code
    fetched = PLACE / "pocket"
    script = PLACE / "work" / "hub" / "pocket" / "fetch_pocket.py"
    print(f"\n$ python {script} {fetched}", flush=True)
    done = subprocess.run([sys.executable, str(script), str(fetched)], check=False)
    if done.returncode:
        return done.returncode
    code = cli.main(["verify", str(fetched)])
    if code:
        return code
    try:
        stats = generate_with_each(fetched)
    except TrimtabError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    code = cli.main(["report", str(fetched), "--stats", str(stats)])
    print(f"built, published, fetched and used in {time.monotonic() - started:.0f} s")
    return code


def generate_with_each(build: Path) -> Path:
    """Greedy replies to a few held-out prompts by every method; the file of their figures.

    Raises:
        GateFailed: a method's text differs from plain decoding's.
    """
    from artifacts.runtime.build import load_build
    from artifacts.runtime.decode import Decoder
    from artifacts.runtime.sampling import SamplingParams
    from pipeline.generating import Request, stats_line

    loaded = load_build(build)
    with PROMPTS.open(encoding="utf-8") as lines:
        rows = [json.loads(line) for line in islice(lines, SHOWN_PROMPTS)]
    prompts = [
        loaded.tokenizer.apply_chat_template(
            row["messages"],
            add_generation_prompt=True,
            enable_thinking=row["thinking"],
            tokenize=True,
            return_dict=False,
        )
        for row in rows
    ]
    stats = build.with_name(f"{build.name}-generated.jsonl")
    plain: list[list[int]] = []
    written = []
    for method in loaded.methods():
        decoder = Decoder.of(loaded, method, depth=3)
        replies = [
            decoder.complete(p, SamplingParams(), NEW_TOKENS, stop_ids=loaded.stop_ids)
            for p in prompts
        ]
        plain = plain or replies
        if replies != plain:
            raise GateFailed(f"{method}: greedy text differs from plain greedy decoding")
        written.append(stats_line(Request(prompt="", draft=method), decoder.stats))
    stats.write_text("".join(json.dumps(line) + "\n" for line in written), encoding="utf-8")
    print("\na prompt, and the reply that every way of drafting gave:")
    print(rows[0]["messages"][-1]["content"])
    print(f"--> {loaded.tokenizer.decode(plain[0], skip_special_tokens=True)}\n")
    return stats


if __name__ == "__main__":
    sys.exit(main())
