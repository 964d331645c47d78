"""Prompt sets: rendering, shortfall, stable choice and split, overlap, save and load."""

from __future__ import annotations

import hashlib
import json
import random
import socket
from pathlib import Path

import pytest

from artifacts.errors import TrimtabError
from calibration.prompts import (
    PromptSet,
    Source,
    TextTokenizer,
    build_set,
    read_rows,
    refuse_overlap,
    split_by_document,
)
from calibration.tokensets import Entry, stable_unit

TEMPLATE = (
    "{% for m in messages %}<s>{{ m.role }} {{ m.content }}<e>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant"
    "{% if not enable_thinking %}<t></t>{% endif %}{% endif %}"
)


def make_tokenizer(folder: Path, template: str | None = TEMPLATE) -> Path:
    """A byte-level tokenizer of 256 bytes and five added tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "<e>", "<t>", "</t>", "<pad>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<e>"}
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    return TextTokenizer(make_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def write_rows(path: Path, rows: list[dict[str, object]]) -> Source:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Source(files=(path,))


def chat(row: int, text: str | None = None) -> dict[str, object]:
    content = f"question {row}" if text is None else text
    return {
        "id": f"p{row}",
        "messages": [{"role": "user", "content": content}],
        "domain": "code" if row % 2 else "chat",
        "thinking": row % 4 == 0,
        "document": f"doc{row // 2}",
    }


def build(name: str, source: Source, tokenizer: TextTokenizer, **more: object) -> PromptSet:
    options: dict[str, object] = {"count": None, "seed": 0, "max_tokens": 200, **more}
    return build_set(name, str(options.pop("kind", "prompts")), source, tokenizer, **options)  # type: ignore[arg-type]


def test_chats_are_rendered_by_the_models_own_template(
    tmp_path: Path, tokenizer: TextTokenizer
) -> None:
    rows = [chat(0), chat(1)]
    answered = [*rows[0]["messages"], {"role": "assistant", "content": "x"}]  # type: ignore[misc]
    rows.append({**chat(2), "messages": [*answered, *chat(5)["messages"], *answered[1:]]})  # type: ignore[misc]
    made = build("set", write_rows(tmp_path / "a.jsonl", rows), tokenizer)
    by_id = {e.id: (ids, e) for ids, e in zip(made.ids, made.entries, strict=True)}
    on, off = "<s>user question 0<e><s>assistant", "<s>user question 1<e><s>assistant<t></t>"
    assert by_id["p0"][0] == tokenizer.encode(on)
    assert by_id["p1"][0] == tokenizer.encode(off)
    asked = "<s>user question 0<e><s>assistant x<e><s>user question 5<e><s>assistant<t></t>"
    assert by_id["p2"][0] == tokenizer.encode(asked)
    assert by_id["p0"][1] == Entry(
        id="p0", domain="chat", language="en", thinking=True, document="doc0"
    )
    assert made.header["template_sha256"] == tokenizer.template_sha256 != ""
    summary = made.summary()
    assert summary["thinking_share"] == pytest.approx(1 / 3, abs=1e-4)
    assert summary["domains"] == {"chat": 2, "code": 1}


def test_thinking_share_stands_in_for_a_missing_column(
    tmp_path: Path, tokenizer: TextTokenizer
) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps([{"text": f"question {i}"} for i in range(200)]))
    source = Source(files=(path,), thinking_share=0.3, domain="faq")
    made = build("set", source, tokenizer)
    assert 0.2 < made.summary()["thinking_share"] < 0.4
    assert {e.domain for e in made.entries} == {"faq"}
    assert all(e.document == e.id and len(e.id) == 16 for e in made.entries)


def test_shortfall_is_an_error_with_both_numbers(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    rows = [chat(i, None if i % 25 == 0 else " " if i % 2 else "long " * 99) for i in range(1000)]
    source = write_rows(tmp_path / "a.jsonl", rows)
    with pytest.raises(TrimtabError) as caught:
        build("calibration", source, tokenizer, count=128)
    assert "40/128" in str(caught.value)
    assert "480 longer than 200 tokens" in str(caught.value)
    assert "480 without a user turn" in str(caught.value)
    made = build("calibration", source, tokenizer, count=128, allow_shortfall=True)
    header = made.header
    assert (header["requested"], header["obtained"], header["rows_read"]) == (128, 40, 1000)
    sizes = sorted(len(ids) for ids in made.ids)
    assert header["min_tokens"] == sizes[0] and header["max_tokens"] == sizes[-1]
    assert header["median_tokens"] == (sizes[19] + sizes[20]) / 2


def test_the_choice_does_not_depend_on_the_files_order(
    tmp_path: Path, tokenizer: TextTokenizer
) -> None:
    rows = [chat(i) for i in range(60)] + [chat(60 + i, f"question {i}") for i in range(5)]
    first = build("a", write_rows(tmp_path / "a.jsonl", rows), tokenizer, count=20)
    random.Random(3).shuffle(rows)
    second = build("a", write_rows(tmp_path / "b.jsonl", rows), tokenizer, count=20)
    assert first.ids == second.ids and first.entries == second.entries
    # rows 60, 62, 64 differ from 0, 2, 4 in their thinking flag only by chance of the modulus
    assert first.header["dropped"] == second.header["dropped"]
    assert sum(first.header["dropped"].values()) >= 2
    other = build("a", write_rows(tmp_path / "b.jsonl", rows), tokenizer, count=20, seed=1)
    assert other.ids != first.ids


def test_split_keeps_documents_whole_and_is_stable(
    tmp_path: Path, tokenizer: TextTokenizer
) -> None:
    made = build("all", write_rows(tmp_path / "a.jsonl", [chat(i) for i in range(200)]), tokenizer)
    parts = split_by_document(made, {"calibration": 0.5, "heldout": 0.5}, seed=7)
    assert sum(map(len, parts.values())) == 200
    assert 60 < len(parts["heldout"]) < 140
    documents = [{e.document for e in part.entries} for part in parts.values()]
    assert not documents[0] & documents[1]
    refuse_overlap(list(parts.values()))
    expected = {d for d in documents[0] | documents[1] if stable_unit(7, d) < 0.5}
    assert documents[0] == expected
    digest = hashlib.sha256(b"7:doc3").hexdigest()  # not Python's salted hash
    assert stable_unit(7, "doc3") == int(digest[:14], 16) / 16**14
    with pytest.raises(TrimtabError, match="sum to 1"):
        split_by_document(made, {"a": 0.5}, seed=0)
    with pytest.raises(TrimtabError, match="empty"):
        split_by_document(made.select([0]), {"a": 0.5, "b": 0.5}, seed=0)


def test_overlap_between_sets_is_refused(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    def texts(name: str, rows: list[tuple[str, str]]) -> PromptSet:
        path = tmp_path / f"{name}.jsonl"
        source = write_rows(path, [{"id": i, "text": t} for i, t in rows])
        return build(name, source, tokenizer, kind="texts")

    a = texts("a", [("1", "the quick brown fox jumps over the dog"), ("2", "something else")])
    with pytest.raises(TrimtabError, match="'a' and 'b' share 1 times the same document"):
        refuse_overlap([a, texts("b", [("2", "another text")])])
    with pytest.raises(TrimtabError, match="same text, for instance '9'"):
        refuse_overlap([a, texts("b", [("9", "something else")])])
    c = texts("c", [("8", "a slow quick brown fox jumps over a cat")])
    refuse_overlap([a, c], window=None)
    refuse_overlap([a, c], window=30)
    with pytest.raises(TrimtabError, match="24-token window"):
        refuse_overlap([a, c], window=24)


def test_texts_are_cut_and_have_no_template(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    source = write_rows(tmp_path / "a.jsonl", [{"text": "x" * 500}, {"text": "short"}])
    made = build("t", source, tokenizer, kind="texts", max_tokens=64, min_tokens=6)
    assert [len(r) for r in made.ids] == [64]
    assert made.header["dropped"] == {"shorter than 6 tokens": 1}
    assert made.header["template_sha256"] == "" and not made.entries[0].thinking


def test_save_and_load_and_damage(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    made = build("set", write_rows(tmp_path / "a.jsonl", [chat(i) for i in range(9)]), tokenizer)
    made.save(tmp_path / "one" / "set.safetensors")
    made.save(tmp_path / "two" / "set.safetensors")
    for name in ("set.safetensors", "set.json"):
        one = (tmp_path / "one" / name).read_bytes()
        assert one == (tmp_path / "two" / name).read_bytes()
        assert str(tmp_path).encode() not in one
    assert sorted(p.name for p in (tmp_path / "one").iterdir()) == ["set.json", "set.safetensors"]
    loaded = PromptSet.load(tmp_path / "one" / "set.safetensors")
    assert loaded == made
    made.select([1, 0]).save(tmp_path / "two" / "set.safetensors")
    (tmp_path / "two" / "set.json").write_bytes((tmp_path / "one" / "set.json").read_bytes())
    with pytest.raises(TrimtabError, match=r"not those that set\.json describes"):
        PromptSet.load(tmp_path / "two" / "set.safetensors")
    whole = (tmp_path / "one" / "set.safetensors").read_bytes()
    (tmp_path / "one" / "set.safetensors").write_bytes(whole[:-3])
    with pytest.raises(TrimtabError, match="not a readable token file"):
        PromptSet.load(tmp_path / "one" / "set.safetensors")


def test_bad_input_is_a_users_error(
    tmp_path: Path, tokenizer: TextTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_network(*_: object) -> None:
        raise AssertionError("the network was touched for a local file")

    monkeypatch.setattr(socket.socket, "connect", no_network)
    with pytest.raises(TrimtabError, match="either files or a dataset"):
        Source()
    with pytest.raises(TrimtabError, match="'main' is not a commit"):
        Source(dataset="a/b", revision="main")
    with pytest.raises(TrimtabError, match="'mesages'"):
        Source(files=(tmp_path,), columns={"mesages": "x"})
    with pytest.raises(TrimtabError, match="no such prompt file"):
        read_rows(Source(files=(tmp_path / "absent.jsonl",)))
    (tmp_path / "broken.jsonl").write_text("{ nothing")
    with pytest.raises(TrimtabError, match=r"broken\.jsonl: not readable"):
        read_rows(Source(files=(tmp_path / "broken.jsonl",)))
    twice = [chat(0), {**chat(1), "id": "p0"}]
    with pytest.raises(TrimtabError, match="id 'p0' stands on more than one row"):
        build("set", write_rows(tmp_path / "a.jsonl", twice), tokenizer)
    with pytest.raises(TrimtabError, match="neither 'prompts' nor 'texts'"):
        build("set", Source(files=(tmp_path / "a.jsonl",)), tokenizer, kind="poems")


def test_tokenizer_folder_without_tokenizer_template_or_vocabulary(tmp_path: Path) -> None:
    with pytest.raises(TrimtabError, match=r"no tokenizer\.json"):
        TextTokenizer(tmp_path)
    plain = TextTokenizer(make_tokenizer(tmp_path / "plain", template=None))
    with pytest.raises(TrimtabError, match="no chat template"):
        plain.render([{"role": "user", "content": "x"}], thinking=False)
    empty = make_tokenizer(tmp_path / "empty")
    record = json.loads((empty / "tokenizer.json").read_text())
    record["model"]["vocab"] = {}
    (empty / "tokenizer.json").write_text(json.dumps(record))
    with pytest.raises(TrimtabError, match="encodes to nothing"):
        TextTokenizer(empty)
