"""A recipe: what to build, from one YAML file, checked before anything else happens.

Does: read YAML (a key given twice is refused), validate, resolve relative paths against the
recipe's folder, word every error as `recipe.yaml: lm_head.bit: unknown key; did you mean bits?`,
print the resolved recipe and the list of all keys. Does not: look into the checkpoint (see `plan`).

Input: a file. Output: a frozen `Recipe`.

Invariant: two recipes that resolve to the same values build the same bytes; defaults stand here, in
`sections` and in `gates` and nowhere else.
"""

from __future__ import annotations

import difflib
import json
import types
import typing
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, Field, ValidationError
from pydantic_core import ErrorDetails

from artifacts.errors import TrimtabError
from pipeline.gates import COVERAGE, Gate, Gates, Section, coverage_gate
from pipeline.sections import (
    Capture,
    Drafter,
    DraftVocab,
    Embedding,
    LmHead,
    Mtp,
    Prompts,
    Publish,
    Signs,
    Source,
    Target,
    Traffic,
)


class Recipe(Section):
    """What to build. `trimtab recipe fields` prints every key with its sentence."""

    name: str = Field(
        pattern=r"^[a-z0-9][a-z0-9._-]*$",
        description="Short name: of the work folder, and of what is published.",
    )
    seed: int = Field(default=0, ge=0, description="Seed of every choice made at random.")
    threads: int | None = Field(
        default=None, ge=1, description="Threads of the computation; null for all usable cores."
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="Where to compute; auto takes CUDA if a driver finds a card."
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        default="auto", description="dtype of the computation; auto: float32 on CPU, else bfloat16."
    )
    tensor_parallel: int = Field(
        default=1, ge=1, description="Cards the build must still divide over when it is served."
    )
    base: Source = Field(description="The released checkpoint the build is made from.")
    drafter: Drafter | None = Field(default=None, description="A block drafter; null for none.")
    prompts: Prompts = Field(description="The text everything is measured on.")
    target: Target = Field(default=Target(), description="How the decoder layers are quantized.")
    signs: Signs = Field(default=Signs(), description="What an imported body's scales are held to.")
    traffic: Traffic = Field(default=Traffic(), description="The model's own replies.")
    capture: Capture = Field(default=Capture(), description="What is summed over the traffic.")
    lm_head: LmHead = Field(default=LmHead(), description="How the output matrix is quantized.")
    embedding: Embedding = Field(default=Embedding(), description="How the input table is kept.")
    mtp: Mtp | None = Field(
        default=Mtp(), description="How the multi-token head is quantized; null if there is none."
    )
    draft_vocab: DraftVocab | None = Field(
        default=DraftVocab(), description="MTP's reduced vocabulary; null for the full one."
    )
    gates: Gates = Field(default=Gates(), description="What the build must reach.")
    publish: Publish | None = Field(default=None, description="null stops after validation.")

    def active_gates(self) -> dict[str, Gate]:
        """The gates that apply to what this recipe builds, draft_vocab.floor included."""
        built = {
            "always": True,
            "quantized": self.target.source == "quantize",
            "lm_head": self.lm_head.bits < 16,
            "mtp": self.mtp is not None and self.mtp.bits < 16,
            "drafter": self.drafter is not None and self.drafter.bits < 16,
            "stock": self.embedding.format == "keep",
        }
        gates = {name: getattr(self.gates, name) for name in type(self.gates).model_fields}
        active = {name: gate for name, gate in gates.items() if built[gate.part]}
        if self.wants_draft_vocab and self.draft_vocab is not None:
            vocab = self.draft_vocab
            active[COVERAGE] = coverage_gate(vocab.floor, vocab.minimum_sample)
        return active

    @property
    def wants_draft_vocab(self) -> bool:
        """Only MTP drafts from a reduced vocabulary, so without MTP there is none."""
        return self.draft_vocab is not None and self.mtp is not None

    def resolved(self) -> dict[str, Any]:
        """Every key with its value, defaults included, as plain JSON values."""
        return self.model_dump(mode="json")


class _Loader(yaml.SafeLoader):
    """SafeLoader that refuses a key given twice and reads dates as text."""

    yaml_implicit_resolvers = {  # noqa: RUF012 (PyYAML's own class attribute)
        first: [(tag, pattern) for tag, pattern in rules if not tag.endswith(":timestamp")]
        for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


def _mapping(loader: _Loader, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
    seen: dict[Any, int] = {}
    for key_node, _ in node.value:
        if key_node.tag == "tag:yaml.org,2002:merge":
            continue
        key = loader.construct_object(key_node, deep=True)
        line = key_node.start_mark.line + 1
        if not isinstance(key, str):
            raise yaml.constructor.ConstructorError(
                None, None, f"key {key!r} is not text; put it in quotes", key_node.start_mark
            )
        if key in seen:
            raise yaml.constructor.ConstructorError(
                None, None, f"{key}: given twice, before in line {seen[key]}", key_node.start_mark
            )
        seen[key] = line
    return yaml.SafeLoader.construct_mapping(loader, node, deep=deep)


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def load(path: Path) -> Recipe:
    """Read and check a recipe.

    Raises:
        TrimtabError: one line for each thing that is wrong, each starting with the file's name and
            the key.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = "no such file" if isinstance(error, FileNotFoundError) else type(error).__name__
        raise TrimtabError(
            f"{path}: cannot be read ({why})", hint="give the path of a recipe, a YAML file"
        ) from None
    return parse(text, name=path.name, folder=path.resolve().parent)


def parse(text: str, *, name: str, folder: Path) -> Recipe:
    """As `load`, of a text; `name` starts each error, `folder` is what paths are relative to."""
    try:
        raw = yaml.load(text, Loader=_Loader)
        data = json.dumps(raw, allow_nan=False)
    except yaml.YAMLError as error:
        raise TrimtabError(f"{name}: {_yaml_error(error)}") from None
    except ValueError:
        raise TrimtabError(f"{name}: holds .nan or .inf, which no key takes") from None
    except TypeError as error:
        raise TrimtabError(f"{name}: not plain YAML values ({error})") from None
    if not isinstance(raw, dict):
        raise TrimtabError(f"{name}: must hold keys such as name, base and prompts")
    try:
        return Recipe.model_validate_json(data, context={"folder": folder})
    except ValidationError as error:
        lines = [f"{name}: {_line(item)}" for item in error.errors()]
        raise TrimtabError(
            "\n".join(lines), hint="trimtab recipe fields prints every key"
        ) from None


def dump(recipe: Recipe) -> str:
    """The resolved recipe as YAML."""
    return yaml.safe_dump(recipe.resolved(), sort_keys=False, allow_unicode=True, width=100)


def fields(model: type[BaseModel] = Recipe, prefix: str = "") -> list[tuple[str, str, str]]:
    """Every key as (name, default, sentence), sections before their keys, in the schema's order."""
    rows: list[tuple[str, str, str]] = []
    for key, field in model.model_fields.items():
        section = _section(field.annotation)
        if field.is_required():
            default = "required"
        elif section is not None and field.default is not None:
            default = ""
        else:
            default = json.dumps(field.get_default(call_default_factory=True), default=str)
        if isinstance(field.default, Gate):
            gate = field.default
            default = f"{gate.side} {gate.threshold:g}, {gate.bound}, {gate.minimum_sample}"
            section = None
        rows.append((prefix + key, default, field.description or ""))
        if section is not None:
            rows += fields(section, f"{prefix}{key}.")
    return rows


def _section(annotation: Any) -> type[BaseModel] | None:
    """The model inside an annotation such as `Mtp | None`."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        found = [_section(a) for a in typing.get_args(annotation)]
        return next((f for f in found if f is not None), None)
    if typing.get_origin(annotation) is typing.Annotated:
        return _section(typing.get_args(annotation)[0])
    is_model = isinstance(annotation, type) and issubclass(annotation, BaseModel)
    return annotation if is_model else None


def _model_at(location: tuple[int | str, ...]) -> type[BaseModel] | None:
    model: type[BaseModel] | None = Recipe
    for part in location:
        field = model.model_fields.get(str(part)) if model is not None else None
        model = _section(field.annotation) if field is not None else None
    return model


def _yaml_error(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or str(error)
    return f"line {mark.line + 1}: {problem}" if mark is not None else problem


def _line(item: ErrorDetails) -> str:
    """One pydantic error in our words."""
    where = ".".join(str(part) for part in item["loc"])
    kind, context, value = item["type"], item.get("ctx", {}), item["input"]
    model = _model_at(item["loc"][:-1])
    if kind == "extra_forbidden":
        text = "unknown key" + _suggestion(str(item["loc"][-1]), where, model)
    elif kind == "missing":
        text = "is required and missing"
    elif kind in ("model_type", "model_attributes_type"):
        section = _model_at(item["loc"])
        keys = ", ".join(section.model_fields) if section is not None else ""
        text = f"is {_show(value)}, must be a section with keys of {keys}"
    elif kind in _KINDS:
        text = f"is {_show(value)}, must be {_KINDS[kind].format(**context)}"
    elif kind in ("rule", "group_size", "fixed_key"):
        text = item["msg"]
    else:
        text = f"is {_show(value)}: {item['msg'][0].lower()}{item['msg'][1:]}"
    if kind == "fixed_key":
        return f"{where}.{text}"
    return f"{where}: {text}" if where else text


_KINDS = {
    "literal_error": "{expected}",
    "int_type": "a whole number",
    "float_type": "a number",
    "string_type": "text (put it in quotes)",
    "bool_type": "true or false",
    "tuple_type": "a list in [ ]",
    "dict_type": "keys with values",
    "path_type": "a path",
    "greater_than": "above {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than": "below {lt}",
    "less_than_equal": "at most {le}",
    "string_pattern_mismatch": "of the form {pattern}",
}


def _show(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


def _suggestion(key: str, where: str, model: type[BaseModel] | None) -> str:
    if where == f"gates.{COVERAGE}":
        return "; its threshold is draft_vocab.floor"
    if model is None:
        return ""
    close = difflib.get_close_matches(key, model.model_fields, n=1, cutoff=0.5)
    if close:
        return f"; did you mean {close[0]}?"
    return f"; known here: {', '.join(model.model_fields)}"
