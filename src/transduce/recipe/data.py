"""Section `data` of a recipe: corpora, filters, sources, noise and augmentation."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from glob import glob
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator, model_validator

from transduce.data.readers.remote import is_remote, matching_addresses
from transduce.recipe.schema import Positive, Section


def _names(value: Any) -> Any:
    """`de,en` stands for the list of both names."""
    if isinstance(value, str):
        return [name.strip() for name in value.split(",")]
    return [str(name) if isinstance(name, int) else name for name in value] if isinstance(value, list) else value


Names = Annotated[tuple[str, ...], BeforeValidator(_names)]


class Corpus(Section):
    """One file that holds both sides, or two parallel files."""

    path: str | None = Field(
        None,
        description="File with both sides: TSV, CSV, JSONL, JSON, Parquet, Arrow, TMX, PO or WMT XML, .gz and .zst "
        "included, on this machine or at an address (s3://, gs://, https://); a pattern of such names; a folder of "
        "`Dataset.save_to_disk`; hf://NAME:CONFIG:SPLIT. Where sources are files: also a folder with captions.jsonl, "
        "or with one folder of files per label.",
    )
    source: str | None = Field(
        None, description="Source side of two parallel text files; where sources are files: also an IDX file of arrays."
    )
    target: str | None = Field(None, description="Target side of two parallel files.")
    weight: float = Field(1.0, gt=0, description="Relative weight of this corpus in a mixture.")
    source_columns: Positive = Field(
        1, description="Number of columns that form the source; without `columns` the leading ones of a TSV or CSV."
    )
    columns: Names = Field(
        (),
        description="Columns by name, with a dot for nested fields, or by position (`column2`, `2`) in a TSV or CSV. "
        "All but the last form the source, the last is the target; with `format: text` one. Default: found by name.",
    )
    header: bool | None = Field(
        None, description="Whether the first line of a TSV or CSV names the columns; null: found by the names."
    )
    alignment: str | None = Field(
        None,
        description="Word alignment in Pharaoh format (0-0 1-2): a column (column3), a field, or a third file.",
    )
    language: str | None = Field(
        None,
        description="Language of the targets, such as de: sources are tagged with it. With `language_column`: only its "
        "pairs.",
    )
    group: str | None = Field(
        None,
        description="Name of a group of corpora, such as web: `data.language_temperature` samples groups as it does "
        "languages.",
    )
    language_column: str | None = Field(
        None, description="Column (column3) or field that holds the language of each target."
    )
    format: Literal["pairs", "lines", "running"] = Field(
        "pairs", description="Follows `data.format` and `data.block_size`: lines and running text have no source."
    )
    context: int = Field(0, ge=0, description="Follows `data.context`.")
    document_column: str | None = Field(None, description="Follows `data.document_column`.")
    modalities: tuple[str, ...] = Field(
        (),
        description="Follows `data.sources`: the modality of each source column; but for `text` and `tags`, files.",
    )

    @model_validator(mode="before")
    @classmethod
    def _count_source_columns(cls, content: Any) -> Any:
        """More than two columns imply the number of source columns."""
        names = _names(content.get("columns")) if isinstance(content, Mapping) else None
        if isinstance(names, (list, tuple)) and len(names) > 2 and "source_columns" not in content:
            return {**content, "source_columns": len(names) - 1}
        return content

    @model_validator(mode="after")
    def _column_numbers_agree(self) -> Self:
        if len(self.columns) > 2 and len(self.columns) != self.source_columns + 1:
            raise ValueError(f"{self.source_columns} source columns and a target, but {len(self.columns)} columns")
        return self

    def like(self, other: Corpus) -> Corpus:
        """With the columns of another corpus, unless it names its own; names only where both have the same format."""
        named = self if self.language or self.language_column else self._with_language_column(other)
        differs = "source_columns" in self.model_fields_set and self.source_columns != other.source_columns
        if differs or "columns" in self.model_fields_set:
            return named
        columns = other.columns if self._extension == other._extension else ()
        return named.model_copy(update={"source_columns": other.source_columns, "columns": columns})

    def _with_language_column(self, other: Corpus) -> Corpus:
        return self.model_copy(update={"language_column": other.language_column})

    def absolute(self) -> Corpus:
        """With absolute file names: a run may be resumed from another directory. `hf://NAME` is no file."""
        names = ("path",) if self.path is not None else ("source", "target", "alignment")
        files = {name: getattr(self, name) for name in names}
        found = {name: str(Path(file).absolute()) for name, file in files.items() if file and "://" not in file}
        return self.model_copy(update=found)

    @property
    def source_parts(self) -> int:
        """The parts of a source: the columns, and the context."""
        return self.source_columns + (self.context > 0)

    @property
    def _extension(self) -> str:
        return Path((self.path or "").removesuffix(".gz").removesuffix(".zst")).suffix.lower()

    @model_validator(mode="after")
    def _one_file_or_two(self) -> Self:
        if self.path is None and self.source is None and self.target is None:
            raise ValueError("a corpus needs `path`, or `source` and `target`")
        if self.path is not None and (self.source or self.target):
            raise ValueError("a corpus has either `path`, or `source` and `target`, not both")
        if self.format != "pairs" and self.path is None:
            raise ValueError("`data.format: text` has no source: give one text file as `path`")
        return self


def _as_corpora(value: Any) -> Any:
    """`a.tsv`, `a.en,a.de`, `part-*.tsv` and `[a.tsv, {path: b.tsv, weight: 2}]` all stand for a list of corpora."""
    if isinstance(value, (str, Path, Mapping, Corpus)):
        value = [value]
    if not isinstance(value, Iterable):
        return value
    return tuple(corpus for item in value for corpus in _expand(item))


def _expand(item: Any) -> list[Any]:
    """The corpora that a name or a corpus with options stands for: one file, or all files that match a pattern."""
    if isinstance(item, Mapping):
        names = [item.get(name) for name in ("path", "source", "target")]
        if not any(isinstance(name, str) and _is_pattern(name) for name in names) or "alignment" in item:
            return [item]
        path, source, target = names
        found = _files(str(path)) if path is not None else _files(str(source), str(target))
        return [{**item, **files} for files in found]
    if not isinstance(item, (str, Path)):
        return [item]
    return _files(*str(item).split(",", 1))


def _files(source: str, target: str | None = None) -> list[dict[str, str]]:
    """The files of one name, or of two parallel ones."""
    if target is None:
        return [{"path": name} for name in _matching(source)]
    sources, targets = _matching(source), _matching(target)
    if len(sources) != len(targets):
        raise ValueError(f"{source} matches {len(sources)} files, {target} matches {len(targets)}")
    return [{"source": one, "target": other} for one, other in zip(sources, targets, strict=True)]


def _is_pattern(name: str) -> bool:
    return any(sign in name for sign in ("*" if is_remote(name) else "*?["))  # ? begins the query of an address


def _matching(name: str) -> list[str]:
    """The files that match a pattern, sorted; a name that is no pattern, or matches nothing, is itself."""
    if not _is_pattern(name) or Path(name).exists():
        return [name]
    return (matching_addresses(name) if is_remote(name) else sorted(glob(name, recursive=True))) or [name]


def _with_facts(corpora: Any, facts: Mapping[str, Any], columns: Any) -> Any:
    if not isinstance(corpora, tuple):
        return corpora  # not a list of corpora: the field itself reports the error
    items = (item.model_dump(exclude_unset=True) if isinstance(item, Corpus) else item for item in corpora)
    named = {"columns": columns} if columns else {}
    return tuple({**named, **item, **facts} if isinstance(item, Mapping) else item for item in items)


Corpora = Annotated[tuple[Corpus, ...], BeforeValidator(_as_corpora)]


class CurriculumRecipe(Section):
    """Curriculum: pairs with high scores first, all of them after some epochs (Platanios et al. 2019)."""

    column: str = Field(
        "score", description="Column or field with the score of each pair: `score` of a prepared corpus."
    )
    epochs: Positive = Field(4, description="Epochs until all pairs are used.")
    start: float = Field(0.25, gt=0, le=1, description="Share of the pairs in the first epoch.")

    def share(self, epoch: int) -> float:
        """The share of the pairs in an epoch, from 0: square-root competence."""
        return min(1.0, math.sqrt(self.start**2 + (1 - self.start**2) * epoch / self.epochs))


class DataRecipe(Section):
    """Data: files, how they are read, which pairs are used."""

    train: Corpora = Field(
        (), description="Training corpora: `a.tsv`, `a.en,a.de`, or a list of such names and of corpora with options."
    )
    dev: Corpora = Field((), description="Development corpora; by default a part of the training data is split off.")
    test: Corpora = Field((), description="Test corpora.")
    columns: Names = Field(
        (),
        description="Source and target columns of all corpora that do not name their own; see `columns` of a corpus.",
    )
    dev_size: Positive | None = Field(
        None,
        description="Number of pairs split off without `dev`; default 2 %, at least 100, at most 2,000. For running "
        "text: tokens at the end of each file; default a tenth, at most 100,000 in all.",
    )
    dev_seed: int | None = Field(
        None, description="Seed by which `dev_size` pairs are split off; default: training.seed."
    )
    format: Literal["pairs", "text"] = Field(
        "pairs", description="`text`: files without a source, for language models: plain text, or the named column."
    )
    block_size: Positive | None = Field(
        None, description="Tokens per block of running text, with `format: text`; null: every line is a text."
    )
    sources: dict[str, dict[str, Any] | str] = Field(
        {},
        description="Modality of each source by name, in column order: `{name: {kind: ..., option: ...}}`; `text`: a "
        "text; `tags`: morphological features such as V;IND;3;SG, one token each.",
    )
    context: int = Field(
        0,
        ge=0,
        description="Number of preceding source sentences of the document that are read too, as the last part of each "
        "source; blank lines separate documents. With `sources`, the last of them is the context.",
    )
    document_column: str | None = Field(
        None, description="Column (column3) or field with the document of each pair; with `context`."
    )
    language_temperature: float = Field(
        1.0,
        ge=1,
        description="Languages, and groups of corpora, are sampled in proportion to p^(1/T), p being their shares of "
        "the pairs; 1: by size.",
    )
    curriculum: CurriculumRecipe | None = Field(
        None, description="Pairs with high scores first: `{column: score, epochs: 4, start: 0.25}`."
    )
    streaming: bool = Field(
        False,
        description="Read the training data part by part while training, without a pass over all of it before; needs "
        "`dev`.",
    )
    min_length: int = Field(1, ge=0, description="Minimal number of tokens on either side.")
    max_length: Positive = Field(
        512, description="Maximal number of tokens on either side; longer pairs are dropped and counted."
    )
    max_ratio: float | None = Field(None, gt=1, description="Maximal ratio of the two lengths of a pair.")
    duplicates: Literal["keep", "drop"] = Field("keep", description="What happens to repeated pairs.")
    invalid: Literal["error", "drop"] = Field("error", description="What happens to lines that cannot be read.")
    noise: dict[str, Any] | None = Field(
        None,
        description="Noise that makes a text its own source, drawn anew in every epoch: `{kind: ..., option: ...}`.",
    )
    augmentation: dict[str, Any] | None = Field(
        None,
        description="Artificial training pairs, made from those that are given: `{kind: ..., option: ...}`.",
    )
    cache: str | None = Field(None, description="Folder for tokenised corpora; default: in the user's cache folder.")

    @model_validator(mode="before")
    @classmethod
    def _inform_corpora(cls, content: Any) -> Any:
        """Passes format, columns and modalities on to every corpus, so that a corpus can be read by itself."""
        if not isinstance(content, Mapping):
            return content
        facts: dict[str, Any] = {}
        if content.get("format") == "text":
            facts["format"] = "lines" if content.get("block_size") is None else "running"
        context = content.get("context")
        if context:
            facts |= {"context": context, "document_column": content.get("document_column")}
        if isinstance(sources := content.get("sources"), Mapping) and sources:
            kinds = [spec.get("kind", "") if isinstance(spec, Mapping) else spec for spec in sources.values()]
            columns_of_file = len(kinds) - bool(context)  # the context is no column
            facts |= {"modalities": tuple(map(str, kinds)), "source_columns": max(columns_of_file, 1)}
        columns = _names(content.get("columns"))
        if not facts and not columns:
            return content
        sets = {name: _as_corpora(content[name]) for name in ("train", "dev", "test") if content.get(name)}
        return {**content, **{name: _with_facts(corpora, facts, columns) for name, corpora in sets.items()}}

    @model_validator(mode="after")
    def _sources_need_pairs(self) -> Self:
        if self.sources and (self.format != "pairs" or self.noise is not None):
            raise ValueError("`sources` need pairs: leave out `format`, `block_size` and `noise`")
        return self

    @model_validator(mode="after")
    def _context_needs_pairs(self) -> Self:
        if self.context and (self.format != "pairs" or self.noise is not None):
            raise ValueError("`context` needs pairs: leave out `format`, `block_size` and `noise`")
        if self.context and len(self.sources) == 1:
            raise ValueError("`context` is the last of `sources`: name the sentence and its context")
        if self.document_column is not None and not self.context:
            raise ValueError("`document_column` belongs to `context`: set data.context")
        return self

    @model_validator(mode="after")
    def _blocks_need_text(self) -> Self:
        if self.block_size is not None and self.format != "text":
            raise ValueError("`block_size` splits running text: set `data.format: text`")
        return self

    @model_validator(mode="after")
    def _streaming_knows_parts_only(self) -> Self:
        if not self.streaming:
            return self
        if not self.dev:
            raise ValueError("`streaming` splits no development data off: set data.dev")
        columns = any(corpus.language_column and not corpus.language for corpus in self.train)
        whole = {
            "block_size": self.block_size,
            "sources": self.sources,
            "augmentation": self.augmentation,
            "curriculum": self.curriculum,
            "duplicates: drop": self.duplicates == "drop",
            "language_column": columns,
        }
        for name, used in whole.items():
            if used:
                raise ValueError(f"`{name}` needs all of the data before training: leave out `streaming`")
        return self

    @model_validator(mode="after")
    def _curriculum_needs_rows(self) -> Self:
        if self.curriculum is not None and self.block_size is not None:
            raise ValueError("`curriculum` orders pairs or lines: leave out `block_size`")
        return self

    @field_validator("dev", "test")
    @classmethod
    def _columns_of_training(cls, corpora: tuple[Corpus, ...], info: ValidationInfo) -> tuple[Corpus, ...]:
        """Held-out corpora have the columns of the first training corpus, unless they name their own."""
        training = info.data.get("train") or ()
        return tuple(corpus.like(training[0]) for corpus in corpora) if training else corpora

    @property
    def multilingual(self) -> bool:
        """Whether sources are tagged with languages."""
        return any(corpus.language or corpus.language_column for corpus in self.train)

    def held_out(self, files: str, language: str | None = None) -> tuple[Corpus, ...]:
        """Files given after training, read like those of this run; all targets in one language, if it is given."""
        known: dict[str, Any] = {"train": self.train, "format": self.format, "block_size": self.block_size}
        known |= {"sources": self.sources, "context": self.context, "document_column": self.document_column}
        found = DataRecipe.model_validate({**known, "test": files}).test
        if language is None:
            return found
        return tuple(one.model_copy(update={"language": language, "language_column": None}) for one in found)
