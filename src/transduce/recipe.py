"""The typed description of a whole run: load, override, reject, save. Every default of a run lives here, except
the options of parts (of the model, the objective), which live in the signatures of those parts (see contracts.py)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from transduce.errors import InputError, nearest

Fraction = Annotated[float, Field(ge=0, lt=1)]
Positive = Annotated[int, Field(gt=0)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)


class Corpus(Section):
    """Where pairs come from: one file that holds both sides, or two files line by line."""

    path: str | None = Field(
        None, description="TSV, JSONL or Parquet with both sides; .gz and .zst are read as they are"
    )
    source: str | None = Field(None, description="one side of two parallel text files")
    target: str | None = Field(None, description="the other side")
    weight: float = Field(1.0, gt=0, description="share of this corpus when several are mixed")
    inputs: Positive = Field(
        1, description="leading columns of a TSV that make the source, parted by tabs; the next one is the target"
    )
    fields: tuple[str, ...] = Field(
        ("source", "target"),
        min_length=2,
        description="names in JSONL or Parquet: all but the last make the source, parted by tabs; `inputs` follows",
    )

    alignment: str | None = Field(
        None,
        description="where links between words stand (0-0 1-2): a column (column3), a field, or a third parallel file",
    )
    form: Literal["pairs", "lines", "running"] = Field(
        "pairs", description="follows `data.form` and `data.passage`: lines or running text have no source"
    )

    @model_validator(mode="before")
    @classmethod
    def _counted(cls, content: Any) -> Any:
        """More than two fields say how many inputs there are."""
        names = content.get("fields") if isinstance(content, Mapping) else None
        if isinstance(names, (list, tuple)) and len(names) > 2 and "inputs" not in content:
            return {**content, "inputs": len(names) - 1}
        return content

    @model_validator(mode="after")
    def _as_many_fields(self) -> Self:
        if len(self.fields) > 2 and len(self.fields) != self.inputs + 1:
            raise ValueError(f"{self.inputs} inputs and a target, but {len(self.fields)} fields")
        return self

    def like(self, other: Corpus) -> Corpus:
        """With the inputs and fields of another one, unless it names its own."""
        if self.model_fields_set & {"inputs", "fields"}:
            return self
        return self.model_copy(update={"inputs": other.inputs, "fields": other.fields})

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        if self.path is None and self.source is None and self.target is None:
            raise ValueError("a corpus needs `path`, or `source` and `target`")
        if self.path is not None and (self.source or self.target):
            raise ValueError("a corpus has either `path` or `source` and `target`, not both")
        if self.form != "pairs" and self.path is None:
            raise ValueError("`data.form: text` has no source: name one file of text")
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


def _with_form(corpora: Any, form: str) -> Any:
    if not isinstance(corpora, tuple):
        return corpora  # nothing that could be a list of corpora: told of by the field itself
    return tuple(
        item.model_copy(update={"form": form})
        if isinstance(item, Corpus)
        else {**item, "form": form}
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
    form: Literal["pairs", "text"] = Field(
        "pairs", description="text: files without a source, as a language model reads them; of several fields the last"
    )
    passage: Positive | None = Field(
        None, description="text only: tokens of the passages that running text is read in; left out: line by line"
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
        if not isinstance(content, Mapping) or content.get("form") != "text":
            return content
        form = "lines" if content.get("passage") is None else "running"
        sets = {name: _as_corpora(content[name]) for name in ("train", "dev", "test") if content.get(name)}
        return {**content, **{name: _with_form(corpora, form) for name, corpora in sets.items()}}

    @model_validator(mode="after")
    def _text_in_passages(self) -> Self:
        if self.passage is not None and self.form != "text":
            raise ValueError("`passage` cuts running text: set `data.form: text`")
        return self

    @field_validator("dev", "test")
    @classmethod
    def _like_training(cls, corpora: tuple[Corpus, ...], info: ValidationInfo) -> tuple[Corpus, ...]:
        """What is held out has the columns of the (first) training data, unless it says otherwise."""
        training = info.data.get("train") or ()
        return tuple(corpus.like(training[0]) for corpus in corpora) if training else corpora

    def held_out(self, files: str) -> tuple[Corpus, ...]:
        """Files named later, to be read like those of this run."""
        known = {"train": self.train, "form": self.form, "passage": self.passage}
        return DataRecipe.model_validate({**known, "test": files}).test


class TextRecipe(Section):
    """How one side becomes tokens."""

    kind: Literal["chars", "words", "bytes", "bpe", "unigram", "labels"] = "bpe"
    size: Positive = Field(8000, description="vocabulary size asked for, the four special tokens included")
    min_count: Positive = Field(1, description="rarer characters or words become <unk>")
    dropout: Fraction = Field(0.0, description="BPE dropout while training")

    @model_validator(mode="after")
    def _merges_to_drop(self) -> Self:
        if self.dropout and self.kind != "bpe":
            raise ValueError(f"`dropout` leaves out merges, which only bpe has, not {self.kind}")
        return self


class TokensRecipe(Section):
    source: TextRecipe = TextRecipe()
    target: TextRecipe = TextRecipe()
    shared: bool = Field(False, description="one vocabulary for both sides, trained on both")
    numbered: int = Field(
        0, ge=0, le=1000, description="unknown words of a source that are told apart, as <unk1> .. <unkN>; 0: none"
    )

    @model_validator(mode="after")
    def _shared_alike(self) -> Self:
        if self.shared and self.source != self.target:
            raise ValueError("a shared vocabulary needs equal `tokens.source` and `tokens.target`")
        if self.numbered and not (self.shared and self.source.kind == "words"):
            raise ValueError("`numbered` unknowns need one vocabulary of words: set `shared: true` and `kind: words`")
        return self


class CopyingRecipe(Section):
    """Which attention is copied along: decoders/copying.py."""

    layer: int = Field(-1, description="of the decoder; -1: the last")
    head: int | None = Field(None, description="one head of it; left out: the mean of all")


class ModelRecipe(Section):
    """Parts by name: `{kind: ..., option: ...}`. build.py checks the options against the part's signature."""

    encoder: dict[str, Any] | None = None
    decoder: dict[str, Any] | None = None
    head: dict[str, Any] | None = None
    tie: Literal["none", "target", "all"] = Field(
        "none", description="output layer = target embedding; `all`: = source embedding too"
    )
    share: Literal["none", "layers", "all"] = Field(
        "none", description="one set of weights in encoder and decoder where they are alike; `all`: the embedding too"
    )
    copying: CopyingRecipe | None = Field(
        None, description="words of the source may be said by looking at them; {} for the usual options"
    )


class InitRecipe(Section):
    """Trained runs whose weights a new one begins with, where name, shape and tokens agree."""

    model: str | None = Field(None, description="a run to take everything from that fits")
    encoder: str | None = Field(None, description="a run to take the encoder from")
    decoder: str | None = Field(None, description="a run to take the decoder from")


def _as_names(value: Any) -> Any:
    """One name may stand for a list of it."""
    return (value,) if isinstance(value, str) else value


Names = Annotated[tuple[str, ...], BeforeValidator(_as_names)]


class AdaptersRecipe(Section):
    """Low-rank adapters: W x + alpha / rank * B A x, with A and B trained and W as it was (Hu 2021)."""

    rank: Positive = Field(8, description="rows of A, columns of B")
    alpha: float = Field(16.0, gt=0)
    targets: Names = Field(("*",), description="which matrices: by the beginning of their name, or with *")


class OptimiserRecipe(Section):
    kind: Literal["adamw", "adam", "sgd"] = "adamw"
    learning_rate: float = Field(1e-3, gt=0)
    betas: tuple[Fraction, Fraction] = (0.9, 0.98)
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    momentum: Fraction = Field(0.9, description="sgd only")


class ScheduleRecipe(Section):
    kind: Literal["constant", "inverse_sqrt", "cosine", "linear", "plateau"] = "inverse_sqrt"
    warmup: int = Field(400, ge=0, description="updates of linear growth")
    floor: Fraction = Field(0.0, description="lowest share of the learning rate (cosine, linear, plateau)")
    factor: float = Field(0.5, gt=0, lt=1, description="plateau: what the rate is multiplied with")
    patience: int = Field(2, ge=0, description="plateau: validations without progress before it is")


class TrainingRecipe(Section):
    steps: Positive = Field(10_000, description="most updates")
    minutes: float | None = Field(None, gt=0, description="most minutes; whichever of the two ends first")
    batch_tokens: Positive = Field(4096, description="source + target tokens in one update, over all processes")
    accumulate: Positive = Field(
        1, description="micro-batches that one update is computed in; the gradient is the same"
    )
    pool: Positive = Field(100, description="batches whose examples are sorted by length together")
    objective: dict[str, Any] = Field(
        {"kind": "cross_entropy"}, description="what is made small: `{kind: ..., option: ...}`"
    )
    freeze: Names = Field(
        (), description="weights that are not trained, by the beginning of their name (encoder, decoder.embedding) or *"
    )
    unfreeze: Positive | None = Field(
        None,
        description="updates after which the next layer from the top begins to train; left out: all from the first",
    )
    layer_decay: float = Field(1.0, gt=0, le=1, description="rate of each layer relative to the one above it")
    adapters: AdaptersRecipe | None = Field(
        None, description="train these beside the weights of `init.model`, which stay as they are"
    )
    optimiser: OptimiserRecipe = OptimiserRecipe()
    schedule: ScheduleRecipe = ScheduleRecipe()
    clip: float | None = Field(1.0, gt=0, description="largest gradient norm")
    precision: Literal["fp32", "bf16"] = "fp32"
    compile: bool = False
    ema: Fraction = Field(0.0, description="decay of the moving average of the weights; 0: off")
    average: Positive = Field(1, description="mean of the weights at the last n checkpoints")
    checkpoint_every: Positive = 500
    keep: Positive = Field(3, description="checkpoints kept besides the best one")
    validate_every: Positive = 500
    validate_examples: Positive = Field(500, description="most development pairs generated for at each validation")
    monitor: str = Field("loss", description="what is watched on the development set: loss, or a metric by name")
    patience: Positive | None = Field(5, description="validations without progress before training stops")
    log_every: Positive = 10
    bad_updates: Positive = Field(5, description="non-finite updates in a row after which training stops")
    seed: int = 1
    deterministic: bool = Field(False, description="refuse operations whose result may differ between runs")
    device: str = Field("auto", description="auto, cpu, cuda, cuda:1, mps")
    tensorboard: bool = False


class GenerationRecipe(Section):
    strategy: Literal["beam", "greedy", "sample"] = "beam"
    beam: Positive = Field(5, description="beam width; samples a line when sampling")
    nbest: Positive = 1
    length_penalty: float = Field(1.0, ge=0, description="finished hypotheses are ranked by score / length ** penalty")
    temperature: float = Field(1.0, gt=0)
    top_k: int = Field(0, ge=0, description="sample from the k best tokens; 0: all")
    top_p: float = Field(1.0, gt=0, le=1, description="sample from the smallest set with this probability")
    min_length: int = Field(0, ge=0, description="fewest tokens")
    max_length: Positive = Field(256, description="most tokens")
    max_ratio: float = Field(3.0, gt=0, description="most tokens also: ratio * source tokens + 50")
    no_repeat: int = Field(0, ge=0, description="no n-gram of this size twice; 0: off")
    repetition_penalty: float = Field(1.0, ge=1)
    max_source: Positive = Field(2048, description="longer sources are cut to this many tokens, counted and flagged")
    batch_tokens: Positive = 4096
    seed: int = 1


class EvaluationRecipe(Section):
    metrics: tuple[str, ...] = ("bleu", "chrf")
    references: Literal["each", "by_source"] = Field(
        "each", description="by_source: lines with an equal source are one line with several right answers"
    )
    resamples: Positive = Field(1000, description="bootstrap resamples for the 95 % intervals")


class Recipe(Section):
    data: DataRecipe = DataRecipe()
    tokens: TokensRecipe = TokensRecipe()
    model: ModelRecipe = ModelRecipe()
    init: InitRecipe = InitRecipe()
    training: TrainingRecipe = TrainingRecipe()
    generation: GenerationRecipe = GenerationRecipe()
    evaluation: EvaluationRecipe = EvaluationRecipe()

    @model_validator(mode="after")
    def _links_to_follow(self) -> Self:
        if self.training.objective.get("kind") == "guided_alignment":
            if any(corpus.alignment is None for corpus in self.data.train):
                raise ValueError("`guided_alignment` needs links: set `alignment` of every corpus in `data.train`")
            if self.tokens.source.dropout or self.tokens.target.dropout:
                raise ValueError("`guided_alignment` needs tokens that stay the same: set `dropout` of `tokens` to 0")
        return self

    @model_validator(mode="after")
    def _adapters_stand_on_a_run(self) -> Self:
        if self.training.adapters is not None:
            if self.init.model is None:
                raise ValueError("`training.adapters` stand beside the weights of a trained run: set `init.model`")
            if self.init.encoder is not None or self.init.decoder is not None:
                raise ValueError("`training.adapters` have one base: leave out `init.encoder` and `init.decoder`")
        return self


def load(path: str | Path, overrides: Iterable[str] = ()) -> Recipe:
    """A recipe from a YAML file, with `key.path=value` overrides applied on top."""
    path = Path(path)
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError("no such recipe", where=str(path), remedy="see `transduce train --help`") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InputError(f"not readable as YAML: {error}", where=str(path), remedy="correct it there") from None
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", where=str(path)) from None
    if content is not None and not isinstance(content, dict):
        raise InputError("a recipe is a mapping of sections", where=str(path), remedy="see `transduce train --help`")
    return parse(override(content or {}, overrides), where=str(path))


def override(content: Mapping[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """`training.steps=100` sets one value; the value is read as YAML, so lists and mappings work too.

    A part that stands there by its name alone (`reader: bahdanau`) takes options as if it were written out. A part that
    is given another kind begins afresh: what was set for the old kind goes, what is set beside the new one counts.
    """
    result: dict[str, Any] = _copy(content)
    done: list[tuple[list[str], Any]] = []
    for item in overrides:
        key, equals, text = item.partition("=")
        if not equals or not key:
            raise InputError(f"cannot read the setting {item!r}", remedy="write it as key.path=value")
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError:
            value = text
        path = key.split(".")
        if _renews(result, path, value):
            _put(result, path[:-1], {})
            for earlier, given in done:
                if earlier[: len(path) - 1] == path[:-1] and len(earlier) >= len(path):
                    _put(result, earlier, given)
        _put(result, path, value)
        done.append((path, value))
    return result


def _put(content: dict[str, Any], path: list[str], value: Any) -> None:
    *parents, last = path
    for name in parents:
        inner = content.get(name)
        if isinstance(inner, str) and _of_part(path):
            inner = {"kind": inner}
        content[name] = content = inner if isinstance(inner, dict) else {}
    content[last] = value


def _of_part(path: list[str]) -> bool:
    """Whether a key belongs to a part, whose options are those of its kind."""
    return path[:1] == ["model"] or path[:2] == ["training", "objective"]


def _renews(content: Mapping[str, Any], path: list[str], value: Any) -> bool:
    """Whether this setting gives a part another kind than it has."""
    if path[-1] != "kind" or not _of_part(path):
        return False
    place: Any = content
    for name in path[:-1]:
        place = place.get(name) if isinstance(place, Mapping) else None
    given = "cross_entropy" if path[:-1] == ["training", "objective"] else value  # what a part without a kind is
    kind = place.get("kind", given) if isinstance(place, Mapping) else place
    return kind is not None and kind != value


def _copy(content: Any) -> Any:
    return {key: _copy(value) for key, value in content.items()} if isinstance(content, Mapping) else content


def parse(content: Mapping[str, Any], where: str = "recipe") -> Recipe:
    """A mapping to a recipe, or an error that names the key, the reason and the nearest known key."""
    try:
        return Recipe.model_validate(content)
    except ValidationError as error:
        raise explain_error(error, where, _known_keys(error.errors()[0]["loc"][:-1])) from None


def explain_error(error: ValidationError, where: str, known: Iterable[str], prefix: str = "") -> InputError:
    """The first thing that is wrong, in words that name the key and, for an unknown one, the nearest known."""
    first = error.errors()[0]
    key = ".".join(str(part) for part in (prefix, *first["loc"]) if part != "")
    if first["type"] == "extra_forbidden":
        return InputError(f"unknown key {key!r}", where=where, remedy=nearest(str(first["loc"][-1]), known))
    given = f" (got {first['input']!r})" if not isinstance(first["input"], (dict, BaseModel)) else ""
    return InputError(f"{key}: {first['msg'].removeprefix('Value error, ')}{given}", where=where)


def _known_keys(location: tuple[int | str, ...]) -> list[str]:
    section: type[BaseModel] = Recipe
    for part in location:
        field = section.model_fields.get(str(part))
        candidates = [field.annotation, *getattr(field.annotation, "__args__", ())] if field else []
        section = next((item for item in candidates if isinstance(item, type) and issubclass(item, BaseModel)), section)
    return list(section.model_fields)


def dump(recipe: Recipe) -> str:
    return yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
