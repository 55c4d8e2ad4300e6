"""The typed description of a whole run: load, override, reject, save. Every default of a run lives here, except
the options of parts (of the model, the objective), which live in the signatures of those parts (see contracts.py)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

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
    fields: tuple[str, str] = Field(("source", "target"), description="names of the two fields in JSONL or Parquet")

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        if self.path is None and self.source is None and self.target is None:
            raise ValueError("a corpus needs `path`, or `source` and `target`")
        if self.path is not None and (self.source or self.target):
            raise ValueError("a corpus has either `path` or `source` and `target`, not both")
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


Corpora = Annotated[tuple[Corpus, ...], BeforeValidator(_as_corpora)]


class DataRecipe(Section):
    train: Corpora = ()
    dev: Corpora = Field((), description="left out: split off the training data")
    test: Corpora = ()
    dev_size: Positive | None = Field(
        None, description="pairs split off when `dev` is left out; by default 2 %, 100 to 2,000"
    )
    min_length: int = Field(1, ge=0, description="fewest tokens on either side")
    max_length: Positive = Field(512, description="most tokens on either side; longer pairs are dropped and counted")
    max_ratio: float | None = Field(None, gt=1, description="most tokens of one side for one of the other")
    duplicates: Literal["keep", "drop"] = "keep"
    invalid: Literal["error", "drop"] = Field("error", description="what a line that cannot be read does")
    cache: str | None = Field(
        None, description="folder for tokenised corpora; by default under the user's cache folder"
    )


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

    @model_validator(mode="after")
    def _shared_alike(self) -> Self:
        if self.shared and self.source != self.target:
            raise ValueError("a shared vocabulary needs equal `tokens.source` and `tokens.target`")
        return self


class ModelRecipe(Section):
    """Parts by name: `{kind: ..., option: ...}`. build.py checks the options against the part's signature."""

    encoder: dict[str, Any] | None = None
    decoder: dict[str, Any] | None = None
    head: dict[str, Any] | None = None
    tie: Literal["none", "target", "all"] = Field(
        "none", description="output layer = target embedding; `all`: = source embedding too"
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
    """`training.steps=100` sets one value; the value is read as YAML, so lists and mappings work too."""
    result: dict[str, Any] = _copy(content)
    for item in overrides:
        key, equals, text = item.partition("=")
        if not equals or not key:
            raise InputError(f"cannot read the setting {item!r}", remedy="write it as key.path=value")
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError:
            value = text
        place = result
        *parents, last = key.split(".")
        for name in parents:
            inner = place.get(name)
            place[name] = place = inner if isinstance(inner, dict) else {}
        place[last] = value
    return result


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
