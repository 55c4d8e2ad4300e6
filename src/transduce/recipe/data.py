"""The section `data`: files and what is done to their lines -> corpora that know how they are read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator, model_validator

from transduce.recipe.schema import Positive, Section


class Corpus(Section):
    """Where pairs come from: one file that holds both sides, or two files line by line."""

    path: str | None = Field(
        None,
        description="TSV, JSONL or Parquet with both sides; .gz and .zst read as they are. Where sources are files, "
        "also a folder with captions.jsonl, or with a folder of files for each label",
    )
    source: str | None = Field(
        None, description="one side of two parallel text files; where sources name files, also an IDX file of arrays"
    )
    target: str | None = Field(None, description="the other side")
    weight: float = Field(1.0, gt=0, description="share of this corpus when several are mixed")
    source_columns: Positive = Field(
        1, description="number of leading TSV columns that form the source; the next column is the target"
    )
    columns: tuple[str, ...] = Field(
        ("source", "target"),
        min_length=2,
        description="names in JSONL or Parquet: all but the last form the source, the last is the target",
    )

    alignment: str | None = Field(
        None,
        description="where links between words stand (0-0 1-2): a column (column3), a field, or a third parallel file",
    )
    format: Literal["pairs", "lines", "running"] = Field(
        "pairs", description="follows `data.format` and `data.block_size`: lines or running text have no source"
    )
    reads: tuple[str, ...] = Field(
        (), description="follows `data.sources`: the kind of each source column; any kind but text names a file"
    )

    @model_validator(mode="before")
    @classmethod
    def _counted(cls, content: Any) -> Any:
        """More than two columns imply the number of source columns."""
        names = content.get("columns") if isinstance(content, Mapping) else None
        if isinstance(names, (list, tuple)) and len(names) > 2 and "source_columns" not in content:
            return {**content, "source_columns": len(names) - 1}
        return content

    @model_validator(mode="after")
    def _as_many_fields(self) -> Self:
        if len(self.columns) > 2 and len(self.columns) != self.source_columns + 1:
            raise ValueError(f"{self.source_columns} source columns and a target, but {len(self.columns)} columns")
        return self

    def like(self, other: Corpus) -> Corpus:
        """With the columns of another corpus, unless it names its own."""
        if self.model_fields_set & {"source_columns", "columns"}:
            return self
        return self.model_copy(update={"source_columns": other.source_columns, "columns": other.columns})

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        if self.path is None and self.source is None and self.target is None:
            raise ValueError("a corpus needs `path`, or `source` and `target`")
        if self.path is not None and (self.source or self.target):
            raise ValueError("a corpus has either `path` or `source` and `target`, not both")
        if self.format != "pairs" and self.path is None:
            raise ValueError("`data.format: text` has no source: name one file of text")
        return self


def _as_corpora(value: Any) -> Any:
    """`a.tsv`, `a.en,a.de`, `[a.tsv, {path: b.tsv, weight: 2}]` all mean a list of corpora."""
    if isinstance(value, (str, Path, Mapping, Corpus)):
        value = [value]
    if not isinstance(value, Iterable):
        return value
    return tuple(_as_corpus(item) for item in value)


def _as_corpus(item: Any) -> Any:
    if not isinstance(item, (str, Path)):
        return item
    source, comma, target = str(item).partition(",")
    return {"source": source, "target": target} if comma else {"path": source}


def _told(corpora: Any, facts: Mapping[str, Any]) -> Any:
    if not isinstance(corpora, tuple):
        return corpora  # nothing that could be a list of corpora: told of by the field itself
    return tuple(
        item.model_copy(update=facts)
        if isinstance(item, Corpus)
        else {**item, **facts}
        if isinstance(item, Mapping)
        else item
        for item in corpora
    )


Corpora = Annotated[tuple[Corpus, ...], BeforeValidator(_as_corpora)]


class DataRecipe(Section):
    train: Corpora = ()
    dev: Corpora = Field((), description="left out: split off the training data")
    test: Corpora = ()
    dev_size: Positive | None = Field(
        None,
        description="pairs split off when `dev` is left out; by default 2 %, 100 to 2,000. Of running text: tokens at "
        "the end of each file, in proportion; by default a tenth, at most 100,000 in all",
    )
    format: Literal["pairs", "text"] = Field(
        "pairs", description="text: files without a source, as a language model reads them; of several columns the last"
    )
    block_size: Positive | None = Field(
        None, description="text only: tokens of the passages that running text is read in; left out: line by line"
    )
    sources: dict[str, dict[str, Any] | str] = Field(
        {},
        description="named sources, in column order: `{name: {kind: ..., option: ...}}`; default: text",
    )
    min_length: int = Field(1, ge=0, description="fewest tokens on either side")
    max_length: Positive = Field(512, description="most tokens on either side; longer pairs are dropped and counted")
    max_ratio: float | None = Field(None, gt=1, description="most tokens of one side for one of the other")
    duplicates: Literal["keep", "drop"] = "keep"
    invalid: Literal["error", "drop"] = Field("error", description="what a line that cannot be read does")
    noise: dict[str, Any] | None = Field(
        None, description="how a text is damaged to be its own source, anew in every epoch: `{kind: ..., option: ...}`"
    )
    cache: str | None = Field(
        None, description="folder for tokenised corpora; by default under the user's cache folder"
    )

    @model_validator(mode="before")
    @classmethod
    def _formed(cls, content: Any) -> Any:
        """Every corpus knows what its file holds, so whoever reads one need not ask."""
        if not isinstance(content, Mapping):
            return content
        facts: dict[str, Any] = {}
        if content.get("format") == "text":
            facts["format"] = "lines" if content.get("block_size") is None else "running"
        if isinstance(sources := content.get("sources"), Mapping) and sources:
            kinds = [spec if isinstance(spec, str) else dict(spec or {}).get("kind", "") for spec in sources.values()]
            facts |= {"reads": tuple(map(str, kinds)), "source_columns": len(kinds)}
        if not facts:
            return content
        sets = {name: _as_corpora(content[name]) for name in ("train", "dev", "test") if content.get(name)}
        return {**content, **{name: _told(corpora, facts) for name, corpora in sets.items()}}

    @model_validator(mode="after")
    def _pairs_of_sources(self) -> Self:
        if self.sources and (self.format != "pairs" or self.noise is not None):
            raise ValueError("`sources` are those of pairs: leave out `format`, `block_size` and `noise`")
        return self

    @model_validator(mode="after")
    def _text_in_passages(self) -> Self:
        if self.block_size is not None and self.format != "text":
            raise ValueError("`block_size` cuts running text: set `data.format: text`")
        return self

    @field_validator("dev", "test")
    @classmethod
    def _like_training(cls, corpora: tuple[Corpus, ...], info: ValidationInfo) -> tuple[Corpus, ...]:
        """What is held out has the columns of the (first) training data, unless it says otherwise."""
        training = info.data.get("train") or ()
        return tuple(corpus.like(training[0]) for corpus in corpora) if training else corpora

    def held_out(self, files: str) -> tuple[Corpus, ...]:
        """Files named later, to be read like those of this run."""
        known = {"train": self.train, "format": self.format, "block_size": self.block_size, "sources": self.sources}
        return DataRecipe.model_validate({**known, "test": files}).test
