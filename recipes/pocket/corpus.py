"""Build the text of the pocket family: packages -> documents -> tokenizer -> tokens -> prompts.

Sub-commands, in order (all of them take ``--scratch DIR``, where the big files go):

``fetch``      download the packages named in ``sources.json`` with apt-get and unpack them
``extract``    turn HTML, manual pages, text and Python files into deduplicated documents
``tokenizer``  train the byte-level BPE and write tokenizer files into ``target/``
``tokens``     split by document, encode, cut shared windows
``data``       write the prompt sets and the held-out texts into ``data/``
``chat``       plan the chat samples of the training mix
``check``      prove, with code of its own, that no 24-token window is shared

The split is a function of a document's text (sha256), so it does not depend on the machine.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import html.parser
import itertools
import json
import lzma
import multiprocessing
import re
import subprocess
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
TARGET = HERE / "target"
DATA = HERE / "data"
VOCAB = 8192
BPE_SIZE = 8170
WINDOW = 24
DOMAINS = ("docs", "code", "manpage")
SPLITS = ("train", "calibration", "development", "heldout")
SPECIALS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
)
#: characters kept of one package, by domain: no package may dominate
CAPS = {"docs": 3_600_000, "code": 2_600_000, "manpage": 2_500_000}
CAP_TOTAL = {"docs": 95_000_000, "code": 70_000_000, "manpage": 30_000_000}
INSTRUCTIONS: dict[str, tuple[str, ...]] = {
    "docs": (
        "Continue this page:",
        "Write the next part of this text:",
        "Carry on from here:",
        "What comes next in this document?",
    ),
    "code": (
        "Complete this module:",
        "Continue this Python code:",
        "Write the rest of this file:",
        "What follows in this source?",
    ),
    "manpage": (
        "Continue this manual page:",
        "Write the next lines of this manual:",
        "Complete this reference page:",
        "What does the manual say next?",
    ),
}
PRE_TOKENIZER = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass
class Document:
    """One document: where it came from and its cleaned text."""

    domain: str
    package: str
    path: str
    text: str

    @property
    def sha(self) -> str:
        """First 16 hex digits of the sha256 of the text."""
        return hashlib.sha256(self.text.encode()).hexdigest()[:16]


# ---------------------------------------------------------------- extraction


class TextOfHtml(html.parser.HTMLParser):
    """HTML to plain text: headings as '#', lists as '-', preformatted text untouched."""

    SKIP = frozenset(
        {"script", "style", "nav", "header", "footer", "form", "svg", "head", "button"}
    )
    VOID = frozenset({"br", "hr", "img", "input", "link", "meta", "col", "wbr", "area", "base"})
    BLOCK = frozenset(
        {
            "p",
            "div",
            "section",
            "ul",
            "ol",
            "dl",
            "dt",
            "dd",
            "table",
            "tr",
            "blockquote",
            "article",
            "main",
            "body",
            "figure",
            "figcaption",
            "aside",
            "center",
            "address",
        }
    )
    NOISE = re.compile(
        r"sphinxsidebar|related|toctree|navheader|navfooter|headerlink|breadcrumb|sidebar"
        r"|navigation|lineno|prevnext|toc|menu|footer|qualifier"
    )

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.out: list[str] = []
        self.stack: list[tuple[str, bool]] = []
        self.skip = 0
        self.pre = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Open a tag: note whether its content is noise, emit the block's prefix."""
        if tag == "br" and not self.skip:
            self.out.append("\n")
        if tag in self.VOID:
            return
        marks = " ".join(v or "" for k, v in attrs if k in ("class", "id", "role"))
        noisy = tag in self.SKIP or (
            tag not in ("body", "html", "main") and bool(self.NOISE.search(marks.lower()))
        )
        self.stack.append((tag, noisy))
        self.skip += noisy
        if self.skip:
            return
        if tag == "pre":
            self.pre += 1
            self.out.append("\n\n")
        elif len(tag) == 2 and tag[0] == "h" and tag[1] in "123456":
            self.out.append("\n\n" + "#" * int(tag[1]) + " ")
        elif tag == "li":
            self.out.append("\n- ")
        elif tag in ("td", "th"):
            self.out.append("  ")
        elif tag in self.BLOCK:
            self.out.append("\n" if tag in ("tr", "dt", "dd") else "\n\n")

    def handle_endtag(self, tag: str) -> None:
        """Close a tag; unclosed ones inside it are closed as well."""
        if not any(name == tag for name, _ in self.stack[-12:]):
            return
        while self.stack:
            name, noisy = self.stack.pop()
            self.skip -= noisy
            if name == "pre" and not noisy and not self.skip:
                self.pre = max(0, self.pre - 1)
            if name == tag:
                break
        if not self.skip and (tag in self.BLOCK or tag == "pre" or tag[:1] == "h"):
            self.out.append("\n")

    def handle_data(self, data: str) -> None:
        """Text: collapse white space unless preformatted."""
        if self.skip:
            return
        self.out.append(data if self.pre else re.sub(r"\s+", " ", data))

    def text(self) -> str:
        """The whole text collected."""
        return "".join(self.out).replace("\u00b6", "")


def tidy(text: str) -> str:
    """Normalise line ends, trailing blanks and runs of empty lines."""
    text = text.replace("\r\n", "\n").replace("\r", "\n").replace("\u00a0", " ")
    text = text.replace("\t", "    ")
    text = re.sub(r"[^\S\n]+\n", "\n", text)
    text = re.sub(r"\n{3,}", "\n\n", text)
    return text.strip() + "\n"


def read_bytes(path: Path) -> str:
    """A file's text; .gz is unpacked."""
    raw = path.read_bytes()
    if path.suffix == ".gz":
        raw = gzip.decompress(raw)
    return raw.decode("utf-8", errors="ignore")


def html_text(path: Path) -> str:
    """Text of one HTML file."""
    parser = TextOfHtml()
    raw = read_bytes(path)
    start = max(raw.find('role="main"'), raw.find("<main"), 0)
    start = raw.rfind("<", 0, start + 1) if start else 0
    parser.feed(raw[max(start, 0) :])
    lines = (re.sub(r"^ (?=\S)", "", line) for line in parser.text().split("\n"))
    return tidy("\n".join(lines))


def man_text(path: Path, mandoc: Path) -> str:
    """Text of one manual page, through mandoc; its first and last line are page furniture."""
    source = read_bytes(path)
    if source.startswith(".so "):
        return ""
    done = subprocess.run(
        [str(mandoc), "-T", "utf8", "-O", "indent=0,width=74"],
        input=source.encode(),
        capture_output=True,
        check=False,
        timeout=20,
    )
    text = re.sub(r".\x08", "", done.stdout.decode("utf-8", errors="ignore"))
    text = text.replace("\u2010", "-").replace("\u2212", "-").replace("\u2019", "'")
    lines = text.strip().split("\n")
    return tidy("\n".join(lines[1:-1]))


def code_text(path: Path) -> str:
    """Text of one Python file without its licence header."""
    lines = tidy(read_bytes(path)).split("\n")
    end = 0
    while end < len(lines) and (lines[end].startswith("#") or not lines[end].strip()):
        end += 1
    header = "\n".join(lines[:end]).lower()
    if "copyright" in header or "licen" in header or header.startswith("#!"):
        lines = lines[end:]
    return tidy("\n".join(lines))


SKIP_PATH = re.compile(
    r"_modules/|_static/|genindex|modindex|/search\.html|changelog|copyright|licen[cs]e"
    r"|/(NEWS|README)[./]|/whatsnew/|release.?notes|/locale/|sitemap|/all-?members|-members\.html"
    r"|/lib2to3/tests/data|/idlelib/|searchindex|/contributors|-obsolete|/images/",
    re.IGNORECASE,
)
FOREIGN = re.compile(r"\.(de|fr|es|ja|ko|tr|da|pt-br|zh-cn|ru|it)(\.|$)")
FOREIGN_DIR = re.compile(
    r"/(man|html|doc|[a-z0-9-]+-doc|debian-handbook|gnucash-docs)/(?:.*/)?"
    r"(de|fr|es|ja|ko|tr|da|pt|pt_BR|pt-BR|zh|zh_CN|zh_TW|zh-CN|zh-TW|ru|it|pl|cs|nl|sv|uk|ro|hu"
    r"|ar|ar-MA|el|fa|hr-HR|hr|id|id-ID|nb|nb-NO|sr|sl|fi|vi|vi-VN|da-DK|de-DE|es-ES|fr-FR|it-IT"
    r"|ja-JP|ko-KR|pl-PL|ro-RO|ru-RU|tr-TR|sv-SE|fa-IR|el-GR|sq|ca|gl|sk|bg|mk|eo|lt)(/|\.)"
)
STOPWORDS = frozenset(
    [
        "the",
        "of",
        "to",
        "and",
        "a",
        "in",
        "is",
        "for",
        "be",
        "that",
        "this",
        "with",
        "as",
        "are",
        "or",
        "it",
        "by",
        "on",
    ]
)


def good(domain: str, text: str) -> bool:
    """Keep English text of a sensible size and shape."""
    if not len(text) >= 600:
        return False
    ascii_share = sum(map(str.isascii, text[:6000])) / len(text[:6000])
    if ascii_share < 0.97:
        return False
    sample = text[:8000]
    digits = sum(c.isdigit() for c in sample) / len(sample)
    if digits > 0.12:
        return False
    longest = max(map(len, text.split("\n")))
    if domain == "code":
        return longest < 400 and len(text) / (text.count("\n") + 1) < 90
    words = re.findall(r"[a-z]+", sample.lower())
    return len(words) > 60 and sum(w in STOPWORDS for w in words) / len(words) > 0.14


def candidates(package: Path) -> list[tuple[str, Path]]:
    """(domain, file) of everything readable in one unpacked package, in stable order."""
    found: list[tuple[str, Path]] = []
    for path in package.rglob("*"):
        name = path.relative_to(package).as_posix()
        if path.is_symlink() or not path.is_file() or SKIP_PATH.search("/" + name):
            continue
        if FOREIGN.search(path.name) or FOREIGN_DIR.search("/" + name):
            continue
        if "/man/man" in name and name.endswith(".gz"):
            found.append(("manpage", path))
        elif path.suffix in (".html", ".htm") or name.endswith((".html.en", ".html.gz")):
            found.append(("docs", path))
        elif path.suffix == ".py":
            found.append(("code", path))
        elif path.suffix == ".pod" or (
            path.suffix == ".txt" and "/vim/" in name and "/doc/" in name
        ):
            found.append(("docs", path))
    found.sort(key=lambda x: hashlib.sha256(x[1].relative_to(package).as_posix().encode()).digest())
    return found


def extract_package(args: tuple[str, str]) -> list[dict[str, str]]:
    """All documents of one package, up to the caps."""
    package, mandoc = Path(args[0]), Path(args[1])
    kept: list[dict[str, str]] = []
    used: Counter[str] = Counter()
    for domain, path in candidates(package):
        if used[domain] > CAPS[domain] * 1.25 or path.stat().st_size > 1_500_000:
            continue
        try:
            if domain == "manpage":
                text = man_text(path, mandoc)
            elif domain == "code":
                text = code_text(path)
            elif path.suffix in (".pod", ".txt"):
                text = tidy(read_bytes(path))
            else:
                text = html_text(path)
        except (OSError, subprocess.TimeoutExpired, AssertionError):
            continue
        text = text[:100_000]
        if good(domain, text):
            name = path.relative_to(package).as_posix()
            kept.append({"domain": domain, "package": package.name, "path": name, "text": text})
            used[domain] += len(text)
    return kept


def line_key(line: str) -> int:
    """64-bit key of a line's content."""
    return int.from_bytes(hashlib.blake2b(line.strip().encode(), digest_size=8).digest(), "big")


def deduplicate(documents: list[Document]) -> list[Document]:
    """Drop repeated furniture lines, exact duplicates, and near duplicates (by shared lines)."""
    counts: dict[str, Counter[int]] = defaultdict(Counter)
    keyed: list[tuple[Document, list[str], list[int]]] = []
    for doc in documents:
        lines = doc.text.split("\n")
        keys = [line_key(x) if len(x.strip()) >= 12 else 0 for x in lines]
        counts[doc.package].update({k for k in keys if k})
        keyed.append((doc, lines, keys))
    seen: set[int] = set()
    texts: set[str] = set()
    used: Counter[str] = Counter()
    by_package: Counter[tuple[str, str]] = Counter()
    kept: list[Document] = []
    for doc, lines, keys in keyed:
        if doc.domain != "code":
            common = counts[doc.package]
            pairs = [(x, k) for x, k in zip(lines, keys, strict=True) if not k or common[k] <= 12]
            lines, keys = [p[0] for p in pairs], [p[1] for p in pairs]
            doc.text = tidy("\n".join(lines))
        long = [k for k, x in zip(keys, lines, strict=True) if len(x.strip()) >= 24]
        old = sum(k in seen for k in long)
        if len(doc.text) < 600 or not long or old > 0.3 * len(long) or doc.sha in texts:
            continue
        size = len(doc.text)
        slot = (doc.package, doc.domain)
        if used[doc.domain] > CAP_TOTAL[doc.domain] or by_package[slot] > CAPS[doc.domain]:
            continue
        seen.update(k for k in keys if k)
        texts.add(doc.sha)
        used[doc.domain] += size
        by_package[slot] += size
        kept.append(doc)
    return kept


def documents_file(scratch: Path) -> Path:
    """Where the extracted documents are kept."""
    return scratch / "documents.jsonl.gz"


def load_documents(scratch: Path) -> list[Document]:
    """The extracted documents."""
    with gzip.open(documents_file(scratch), "rt", encoding="utf-8") as lines:
        return [Document(**json.loads(line)) for line in lines]


def sources() -> dict[str, Any]:
    """The list of packages."""
    loaded: dict[str, Any] = json.loads((HERE / "sources.json").read_text())
    return loaded


def command_fetch(scratch: Path) -> None:
    """Download the pinned packages and unpack them below SCRATCH/x."""
    (scratch / "debs").mkdir(parents=True, exist_ok=True)
    wanted = [f"{p['name']}={p['version']}" for p in sources()["packages"]]
    subprocess.run(["apt-get", "download", *wanted], cwd=scratch / "debs", check=True)
    for deb in sorted((scratch / "debs").glob("*.deb")):
        out = scratch / "x" / deb.name.split("_")[0]
        subprocess.run(["dpkg-deb", "-x", str(deb), str(out)], check=True)


def command_extract(scratch: Path) -> None:
    """Extract, deduplicate and store all documents."""
    mandoc = scratch / "x" / "mandoc" / "usr" / "bin" / "mandoc"
    folders = sorted(p for p in (scratch / "x").iterdir() if p.is_dir())
    with multiprocessing.Pool(2) as pool:
        jobs = [(str(p), str(mandoc)) for p in folders]
        parts = pool.map(extract_package, jobs, chunksize=1)
    documents = [Document(**d) for part in parts for d in part]
    documents.sort(key=lambda d: hashlib.sha256(f"{d.package}/{d.path}".encode()).digest())
    before = Counter(d.domain for d in documents)
    documents = deduplicate(documents)
    with gzip.open(documents_file(scratch), "wt", encoding="utf-8", compresslevel=3) as out:
        for doc in documents:
            out.write(json.dumps(doc.__dict__, ensure_ascii=False) + "\n")
    sizes: Counter[str] = Counter()
    for doc in documents:
        sizes[doc.domain] += len(doc.text)
    print("documents before", dict(before), "after", dict(Counter(d.domain for d in documents)))
    print("characters", dict(sizes), "packages", len({d.package for d in documents}))


# ----------------------------------------------------------------- tokenizer

CHAT_TEMPLATE = """\
{%- for message in messages %}
{%- if message.role == 'assistant' %}
{%- set reasoning = message.reasoning_content if message.reasoning_content is defined and \
message.reasoning_content else '' %}
{{- '<|im_start|>assistant\\n<think>\\n' + (reasoning + '\\n' if reasoning else '\\n') + \
'</think>\\n\\n' + message.content + '<|im_end|>\\n' }}
{%- else %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}
{{- '<think>\\n\\n</think>\\n\\n' }}
{%- endif %}
{%- endif %}
"""


def command_tokenizer(scratch: Path) -> None:
    """Train the BPE on a sample of training documents and write tokenizer files."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    documents = [d for d in load_documents(scratch) if split_of(d) == "train"]
    texts: list[str] = []
    size = 0
    for doc in documents:
        texts.append(doc.text[:20_000])
        size += len(texts[-1])
        if size > 45_000_000:
            break
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRE_TOKENIZER), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=BPE_SIZE - len(SPECIALS),
        min_frequency=2,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens(list(SPECIALS))
    TARGET.mkdir(exist_ok=True)
    tokenizer.save(str(TARGET / "tokenizer.json"))
    (TARGET / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    added = {
        str(tokenizer.token_to_id(t)): {
            "content": t,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": True,
        }
        for t in SPECIALS
    }
    config = {
        "add_prefix_space": False,
        "added_tokens_decoder": added,
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "model_max_length": 4096,
        "pad_token": "<|endoftext|>",
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": None,
    }
    (TARGET / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    print("tokens in the tokenizer", tokenizer.get_vocab_size(), "trained on", size, "characters")


def load_tokenizer() -> Any:
    """The trained tokenizer, as the tokenizers library has it."""
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(TARGET / "tokenizer.json"))


# --------------------------------------------------------------- token arrays


def split_of(doc: Document) -> str:
    """Split of a document, from the sha256 of its text alone."""
    bucket = int(doc.sha[:8], 16) % 1000
    if bucket < 31:
        return "heldout"
    if bucket < 56:
        return "development"
    return "calibration" if bucket < 94 else "train"


def window_hashes(tokens: np.ndarray) -> np.ndarray:
    """Polynomial hash (mod 2^64) of each WINDOW-token window, uint64 [n - WINDOW + 1]."""
    n = len(tokens) - WINDOW + 1
    if n <= 0:
        return np.zeros(0, np.uint64)
    wide = tokens.astype(np.uint64) + np.uint64(1)
    out = np.zeros(n, np.uint64)
    for j in range(WINDOW):
        out *= np.uint64(0x9E3779B97F4A7C15)
        out += wide[j : j + n]
    return out


def member(values: np.ndarray, sorted_set: np.ndarray) -> np.ndarray:
    """Which values lie in a sorted array."""
    if not len(sorted_set):
        return np.zeros(len(values), bool)
    at = np.minimum(np.searchsorted(sorted_set, values), len(sorted_set) - 1)
    return np.asarray(sorted_set[at] == values)


@dataclass
class Tokens:
    """Documents as one token array; document i is tokens[starts[i]:starts[i + 1]]."""

    tokens: np.ndarray
    starts: np.ndarray

    def __getitem__(self, i: int) -> np.ndarray:
        return self.tokens[self.starts[i] : self.starts[i + 1]]

    def __len__(self) -> int:
        return len(self.starts) - 1


def pack(parts: Iterable[np.ndarray | list[int]]) -> Tokens:
    """Concatenate token lists."""
    arrays = [np.asarray(p, np.uint16) for p in parts]
    starts = np.zeros(len(arrays) + 1, np.int64)
    np.cumsum([len(a) for a in arrays], out=starts[1:])
    return Tokens(np.concatenate(arrays) if arrays else np.zeros(0, np.uint16), starts)


def encode_all(documents: list[Document]) -> Tokens:
    """Encode every document."""
    tokenizer = load_tokenizer()
    parts: list[np.ndarray] = []
    for i in range(0, len(documents), 256):
        batch = tokenizer.encode_batch_fast([d.text for d in documents[i : i + 256]])
        parts.extend(np.asarray(e.ids, np.uint16) for e in batch)
    return pack(parts)


def held_documents(documents: list[Document], encoded: Tokens) -> list[int]:
    """Held documents that do not repeat training text or one another too much (< 25 % shared)."""
    train = [i for i, d in enumerate(documents) if split_of(d) == "train"]
    known = np.unique(np.concatenate([window_hashes(encoded[i]) for i in train]))
    kept: list[int] = []
    seen: set[int] = set()
    for i, doc in enumerate(documents):
        if split_of(doc) == "train":
            continue
        hashes = window_hashes(encoded[i])
        if len(hashes) < 100:
            continue
        if member(hashes, known).mean() >= 0.25:
            continue
        values = hashes.tolist()
        if sum(v in seen for v in values) < 0.10 * len(values):
            kept.append(i)
            seen.update(values)
    return kept


def clean_pieces(tokens: np.ndarray, held: np.ndarray) -> list[tuple[int, int]]:
    """Spans of a training document that share no window with the held documents."""
    bad = member(window_hashes(tokens), held)
    if not bad.any():
        return [(0, len(tokens))]
    covered = np.zeros(len(tokens) + 1, np.int32)
    at = np.flatnonzero(bad)
    np.add.at(covered, at, 1)
    np.add.at(covered, at + WINDOW, -1)
    free = np.concatenate([[0], (np.cumsum(covered[:-1]) == 0).astype(np.int8), [0]])
    edges = np.flatnonzero(np.diff(free))
    spans = list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))
    if sum(b - a for a, b in spans) < 0.4 * len(tokens):
        return []
    return [(a, b) for a, b in spans if b - a >= 64]


def outline(domain: str, text: str) -> str:
    """A one-line plan of a text: names defined, headings, or the first words."""
    if domain == "code":
        items = re.findall(r"^\s*(?:def|class) (\w+)", text, re.MULTILINE)
    else:
        items = [h.strip() for h in re.findall(r"^#+ (.{3,40})$", text, re.MULTILINE)]
        items += re.findall(r"^ {0,4}(-[-\w]{1,20})", text, re.MULTILINE)
    if not items:
        items = [" ".join(text.split()[:6])]
    return "Next: " + ", ".join(items[:4]) + "."


@dataclass
class ChatBuilder:
    """Assembles chat samples from token slices, exactly as the chat template renders them."""

    tokenizer: Any

    def __post_init__(self) -> None:
        encode = self.tokenizer.encode
        self.head = {
            d: [encode(f"<|im_start|>user\n{text}\n\n").ids for text in INSTRUCTIONS[d]]
            for d in DOMAINS
        }
        self.turn = encode("<|im_end|>\n<|im_start|>assistant\n").ids
        self.empty = encode("<think>\n\n</think>\n\n").ids
        self.end = encode("<|im_end|>\n").ids

    def think(self, text: str) -> list[int]:
        """A think block with content."""
        ids: list[int] = self.tokenizer.encode(f"<think>\n{text}\n</think>\n\n").ids
        return ids

    def prompt(self, domain: str, style: int, body: np.ndarray) -> list[int]:
        """User turn and the assistant's header."""
        return [*self.head[domain][style], *body.tolist(), *self.turn]


def newline_tokens(tokenizer: Any) -> np.ndarray:
    """Which token ids end with a line feed, bool [VOCAB]."""
    flags = np.zeros(VOCAB, bool)
    for i in range(tokenizer.get_vocab_size()):
        flags[i] = (tokenizer.id_to_token(i) or "").endswith("\u010a")
    return flags


def cut_points(
    body: np.ndarray, flags: np.ndarray, rng: np.random.Generator, room: int
) -> tuple[int, int, int] | None:
    """(start, prompt end, response end) of a chat sample in one document, at line ends."""
    lines = np.flatnonzero(flags[body]) + 1
    if len(body) < 140:
        return None
    start = 0
    if rng.random() < 0.7:
        choices = lines[lines < len(body) - 130]
        start = int(rng.choice(choices)) if len(choices) else 0
    wanted = start + int(rng.integers(44, 125))
    near = lines[(lines > wanted - 14) & (lines <= wanted)]
    middle = int(near[-1]) if len(near) else wanted
    last = min(len(body), middle + int(rng.integers(60, room)))
    ends = lines[(lines > middle + 40) & (lines <= last)]
    if not len(ends):
        return None
    return start, middle, int(ends[-1])


def plan_chat(
    pieces: Tokens, domains: np.ndarray, held: np.ndarray, share: float, seed: int
) -> tuple[Tokens, Tokens]:
    """Chat samples of about ``share`` of the raw tokens: (prompts, responses).

    ``held`` are the sorted window hashes of the rendered held prompts; a sample that shares one
    (through the template's own tokens and a few common words) is left out.
    """
    tokenizer = load_tokenizer()
    builder = ChatBuilder(tokenizer)
    flags = newline_tokens(tokenizer)
    rng = np.random.default_rng(seed)
    prompts: list[list[int]] = []
    responses: list[list[int]] = []
    total = 0
    while total < share * len(pieces.tokens):
        for i in rng.permutation(len(pieces)).tolist():
            body = pieces[i]
            points = cut_points(body, flags, rng, 420)
            if points is None:
                continue
            a, b, c = points
            domain = DOMAINS[int(domains[i])]
            reply = body[b:c].tolist()
            if rng.random() < 0.2:
                block = builder.think(outline(domain, tokenizer.decode(reply)))
            else:
                block = builder.empty
            style = int(rng.integers(len(INSTRUCTIONS[domain])))
            prompt = builder.prompt(domain, style, body[a:b])
            response = [*block, *reply, *builder.end]
            if member(window_hashes(np.asarray(prompt + response, np.uint16)), held).any():
                continue
            prompts.append(prompt)
            responses.append(response)
            total += len(prompts[-1]) + len(responses[-1])
            if total >= share * len(pieces.tokens):
                break
    return pack(prompts), pack(responses)


def command_tokens(scratch: Path) -> None:
    """Encode, split, decontaminate and store everything in SCRATCH/corpus.npz."""
    documents = load_documents(scratch)
    encoded = encode_all(documents)
    held = held_documents(documents, encoded)
    held_hashes = np.unique(np.concatenate([window_hashes(encoded[i]) for i in held]))
    pieces: list[np.ndarray] = []
    domains: list[int] = []
    trained: list[int] = []
    cut = before = 0
    for i, doc in enumerate(documents):
        if split_of(doc) != "train":
            continue
        before += len(encoded[i])
        spans = clean_pieces(encoded[i], held_hashes)
        cut += len(encoded[i]) - sum(b - a for a, b in spans)
        pieces.extend(encoded[i][a:b] for a, b in spans)
        domains.extend([DOMAINS.index(doc.domain)] * len(spans))
        if spans:
            trained.append(i)
    raw = pack(pieces)
    kinds = np.asarray(domains, np.uint8)
    np.savez(scratch / "raw.npz", raw=raw.tokens, raw_starts=raw.starts, raw_domains=kinds)
    splits = {documents[i].sha: split_of(documents[i]) for i in held}
    splits.update({documents[i].sha: "train" for i in trained})
    write_documents(documents, splits, encoded)
    sizes = {DOMAINS[k]: int(np.diff(raw.starts)[kinds == k].sum()) for k in range(3)}
    report = {
        "training_tokens": len(raw.tokens),
        "training_tokens_by_domain": sizes,
        "training_tokens_before_the_cut": before,
        "tokens_cut": cut,
        "training_documents": len(trained),
        "pieces": len(raw),
        "held_documents": dict(Counter(splits[documents[i].sha] for i in held)),
        "characters_per_token": sum(len(documents[i].text) for i in trained) / before,
    }
    (HERE / "corpus.json").write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report, indent=2))


def write_documents(documents: list[Document], splits: dict[str, str], encoded: Tokens) -> None:
    """documents.txt.xz: one used document a line: sha, split, domain, tokens, package."""
    lines = [
        f"{d.sha} {splits[d.sha][0]} {d.domain[0]} {len(encoded[i])} {d.package}"
        for i, d in enumerate(documents)
        if d.sha in splits
    ]
    head = "# sha256[:16] split(t,c,d,h) domain(d,c,m) tokens package\n"
    with lzma.open(HERE / "documents.txt.xz", "wt", preset=9) as out:
        out.write(head + "\n".join(sorted(lines)) + "\n")


# ------------------------------------------------------------- prompts, texts


def held_by_split(scratch: Path) -> dict[str, list[Document]]:
    """Held documents by split, in the order of their hashes."""
    with lzma.open(HERE / "documents.txt.xz", "rt") as lines:
        rows = [line.split() for line in lines if not line.startswith("#")]
    names = {s[0]: s for s in SPLITS}
    splits = {row[0]: names[row[1]] for row in rows}
    out: dict[str, list[Document]] = {s: [] for s in SPLITS}
    for doc in sorted(load_documents(scratch), key=lambda d: d.sha):
        if splits.get(doc.sha, "train") != "train":
            out[splits[doc.sha]].append(doc)
    return out


def make_prompts(documents: list[Document], split: str, count: int) -> list[dict[str, Any]]:
    """Chat prompts, at most one per document, the domains in equal parts as far as they go."""
    tokenizer = load_tokenizer()
    flags = newline_tokens(tokenizer)
    rng = np.random.default_rng({"heldout": 1, "development": 2, "calibration": 3}[split])
    queues = {d: [x for x in documents if x.domain == d] for d in DOMAINS}
    rows: list[dict[str, Any]] = []
    firsts: Counter[str] = Counter()
    while len(rows) < count and any(queues.values()):
        for domain in DOMAINS:
            if not queues[domain] or len(rows) >= count:
                continue
            doc = queues[domain].pop()
            body = np.asarray(tokenizer.encode(doc.text).ids, np.uint16)
            points = cut_points(body, flags, rng, 420)
            if points is None:
                continue
            part = tokenizer.decode(body[points[0] : points[1]].tolist(), skip_special_tokens=False)
            if firsts[part[:24]] >= 2:
                continue
            firsts[part[:24]] += 1
            text = f"{INSTRUCTIONS[domain][int(rng.integers(4))]}\n\n{part}"
            rows.append(
                {
                    "id": f"{split}-{doc.sha}",
                    "domain": domain,
                    "language": "en",
                    "thinking": bool(rng.random() < 0.2),
                    "messages": [{"role": "user", "content": text}],
                    "document": doc.sha,
                }
            )
    return rows


def make_texts(
    documents: list[Document], split: str, total: int, most: int
) -> list[dict[str, Any]]:
    """Beginnings of held documents, up to ``most`` tokens each, ``total`` tokens in all."""
    tokenizer = load_tokenizer()
    queues = {d: [x for x in documents if x.domain == d] for d in DOMAINS}
    rows: list[dict[str, Any]] = []
    size = 0
    while size < total and any(queues.values()):
        for domain in DOMAINS:
            if not queues[domain]:
                continue
            doc = queues[domain].pop(0)
            ids = tokenizer.encode(doc.text).ids[:most]
            text = tokenizer.decode(ids, skip_special_tokens=False)
            if "\ufffd" in text or len(ids) < 200:
                continue
            size += len(ids)
            rows.append(
                {
                    "id": f"{split}-text-{doc.sha}",
                    "domain": domain,
                    "document": doc.sha,
                    "text": text,
                }
            )
    return rows


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> None:
    """One JSON object a line."""
    path.write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in rows), "utf-8")


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file."""
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def command_data(scratch: Path) -> None:
    """Write prompt sets and held-out texts."""
    DATA.mkdir(exist_ok=True)
    held = held_by_split(scratch)
    for split, count in (("calibration", 600), ("development", 384), ("heldout", 480)):
        rows = make_prompts(held[split], split, count)
        write_jsonl(DATA / f"{split}.jsonl", rows)
        print(split, len(rows), dict(Counter(r["domain"] for r in rows)))
    for split, total, most in (("heldout", 84_000, 640), ("calibration", 170_000, 640)):
        rows = make_texts(held[split], split, total, most)
        write_jsonl(DATA / f"{split}_text.jsonl", rows)
        print(split, "texts", len(rows), sum(len(r["text"]) for r in rows), "characters")


def command_chat(scratch: Path) -> None:
    """Plan the chat samples and store the whole training set in SCRATCH/corpus.npz."""
    rows = [ids for name, part in held_sequences().items() if "text" not in name for ids in part]
    held = np.unique(np.concatenate([window_hashes(np.asarray(r, np.uint16)) for r in rows]))
    with np.load(scratch / "raw.npz") as z:
        raw, kinds = Tokens(z["raw"], z["raw_starts"]), z["raw_domains"]
    prompts, responses = plan_chat(raw, kinds, held, 0.3, 11)
    np.savez(
        scratch / "corpus.npz",
        raw=raw.tokens,
        raw_starts=raw.starts,
        raw_domains=kinds,
        prompts=prompts.tokens,
        prompt_starts=prompts.starts,
        responses=responses.tokens,
        response_starts=responses.starts,
    )
    report = json.loads((HERE / "corpus.json").read_text())
    report["chat_samples"] = len(prompts)
    report["chat_tokens"] = len(prompts.tokens) + len(responses.tokens)
    (HERE / "corpus.json").write_text(json.dumps(report, indent=2) + "\n")
    print("chat samples", report["chat_samples"], "tokens", report["chat_tokens"])


# ---------------------------------------------------------------------- check


def streams(scratch: Path) -> Iterator[tuple[str, bytes]]:
    """Every training sequence as raw bytes (two bytes a token): pieces, then chat samples."""
    with np.load(scratch / "corpus.npz") as z:
        raw, at = z["raw"], z["raw_starts"].tolist()
        for a, b in itertools.pairwise(at):
            yield "raw", raw[a:b].tobytes()
        prompts, p = z["prompts"], z["prompt_starts"].tolist()
        replies, r = z["responses"], z["response_starts"].tolist()
        for i in range(len(p) - 1):
            yield "chat", prompts[p[i] : p[i + 1]].tobytes() + replies[r[i] : r[i + 1]].tobytes()


def held_sequences() -> dict[str, list[list[int]]]:
    """Every held prompt as the template renders it, and every held text, as the model's tokens."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(TARGET))
    out: dict[str, list[list[int]]] = {}
    for name in ("calibration", "development", "heldout"):
        out[name] = [
            tokenizer(
                tokenizer.apply_chat_template(
                    row["messages"],
                    tokenize=False,
                    add_generation_prompt=True,
                    enable_thinking=row["thinking"],
                )
            )["input_ids"]
            for row in read_jsonl(DATA / f"{name}.jsonl")
        ]
    for name in ("heldout_text", "calibration_text"):
        out[name] = [
            tokenizer(row["text"])["input_ids"] for row in read_jsonl(DATA / f"{name}.jsonl")
        ]
    return out


def command_check(scratch: Path) -> None:
    """Count shared windows exactly (sets of byte strings, no hashing scheme of our own)."""
    width = 2 * WINDOW
    held: dict[str, set[bytes]] = {}
    lengths: dict[str, list[int]] = {}
    for name, rows in held_sequences().items():
        blobs = [np.asarray(ids, np.uint16).tobytes() for ids in rows]
        lengths[name] = [len(b) // 2 for b in blobs]
        held[name] = {b[i : i + width] for b in blobs for i in range(0, len(b) - width + 1, 2)}
    everything = set().union(*held.values())
    shared: Counter[str] = Counter()
    windows: Counter[str] = Counter()
    for kind, blob in streams(scratch):
        stop = len(blob) - width + 1
        windows[kind] += max(0, (stop + 1) // 2)
        hits = {blob[i : i + width] for i in range(0, stop, 2)} & everything
        for name, values in held.items():
            shared[f"{kind}/{name}"] += len(hits & values)
    across = {
        f"{a}/{b}": len(held[a] & held[b])
        for a in held
        for b in held
        if a < b and a.split("_")[0] != b.split("_")[0]
    }
    result = {
        "window": WINDOW,
        "training_windows": dict(windows),
        "held": {
            n: {
                "sequences": len(v),
                "tokens": sum(v),
                "shortest": min(v),
                "longest": max(v),
                "windows": len(held[n]),
            }
            for n, v in lengths.items()
        },
        "windows_shared_with_training": dict(sorted(shared.items())),
        "windows_shared_between_held_sets": across,
    }
    (HERE / "check.json").write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))
    if sum(shared.values()):
        raise SystemExit("windows are shared with the training text")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    commands = {
        "fetch": command_fetch,
        "extract": command_extract,
        "tokenizer": command_tokenizer,
        "tokens": command_tokens,
        "data": command_data,
        "chat": command_chat,
        "check": command_check,
    }
    parser.add_argument("command", choices=commands)
    parser.add_argument("--scratch", type=Path, required=True)
    args = parser.parse_args()
    commands[args.command](args.scratch)


if __name__ == "__main__":
    main()
