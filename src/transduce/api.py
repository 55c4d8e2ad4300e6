"""The Python interface: training, planning and evaluation as functions, and an estimator."""

from __future__ import annotations

import inspect
import json
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from transduce import autoconfig
from transduce.autoconfig import Plan
from transduce.data.batching import DataPosition
from transduce.data.prepare import PreparedData, prepare_data, train_tokenizers
from transduce.data.tokenizers.tokenizer import Tokenizer
from transduce.errors import InputError, check_path, nearest
from transduce.evaluation.evaluate import Evaluation
from transduce.evaluation.held_out import evaluate_output, load_held_out, predict
from transduce.flow import Batch
from transduce.inference import Model, load
from transduce.inference.generation import check_pairs, check_texts
from transduce.model import Transducer
from transduce.recipe import Recipe, override, parse
from transduce.recipe.build import build_model
from transduce.run import Run, new_run
from transduce.storage import make_folder, replace_file
from transduce.training import experiment
from transduce.training.distributed import seed_everything
from transduce.training.experiment import TrainingResult
from transduce.training.report import Callback, Reports
from transduce.training.resolve import resolve

if TYPE_CHECKING:
    from rich.console import Console

BATCH_TOKENS = 4096  # of `build`, where the recipe leaves the choice to training
Data = str | Path | Recipe | Mapping[str, Any] | Iterable[tuple[str, str]]


def train(
    data: Data,
    folder: str | Path = "runs/latest",
    *,
    task: str = "generate",
    minutes: float | None = None,
    settings: Mapping[str, Any] | None = None,
    resume: bool = False,
    allow_changes: Sequence[str] = (),
    console: Console | None = None,
    callbacks: Sequence[Callback] = (),
) -> TrainingResult:
    """Trains a model on pairs, a data file, or a recipe (a file, a mapping, a `Recipe`), into a run directory.

    Without a recipe the settings are chosen from the data. `settings` changes keys: `{"training.steps": 1000}`. Pairs
    in memory are stored beside the run directory. With a console the progress is shown. A resumed run has the recipe
    and the data that it began with, except for the recipe keys in `allow_changes`. `callbacks` are told every update,
    log entry and validation.
    """
    folder = Path(check_path("train", folder))
    watcher = Reports(*_check_callbacks(callbacks)) if callbacks else None
    source = _stored(data, folder)
    recipe = None
    if resume and isinstance(source, (str, Path)):
        recipe = autoconfig.continued_recipe(Run(folder), str(source), _overrides(settings or {}), minutes)
    recipe = recipe or _recipe(source, task, minutes, settings or {})
    return experiment.train(
        recipe, folder, resume=resume, allow_changes=allow_changes, console=console, watcher=watcher
    )


@dataclass(frozen=True)
class Built:
    """The network, tokenizers and data that a recipe describes, for a training loop of your own.

    `model` is an `nn.Module` with random weights. `model(batch)` is teacher forcing: it returns a `Step` whose `logits`
    (B T V) predict `batch.labels.values` (B T) where `batch.labels.mask` is True. With `with_attention=True` the step
    has attention weights too. An embedding model returns the vectors of both sides of the pairs instead.
    """

    recipe: Recipe
    model: Transducer
    source: Tokenizer
    target: Tokenizer
    data: PreparedData

    def batches(self, epoch: int = 0) -> Iterator[Batch]:
        """The training batches of an epoch, shuffled by `training.seed` and the epoch."""
        batches = self.data.batches(self.recipe, (self.source, self.target))
        return (batches.at(DataPosition(epoch, number)) for number in range(batches.batches_in(epoch)))

    def dev_batches(self) -> Iterator[Batch]:
        """The development data, once."""
        return self.data.dev_batches(self.recipe)

    def save(self, folder: str | Path) -> Run:
        """Writes a run directory with the weights as they are now, which `load` and all commands read."""
        with new_run(check_path("save", folder)) as run:
            run.save_model(self.recipe, (self.source, self.target), self.model.state_dict())
        return Run(Path(folder))


def build(data: Data, *, task: str = "generate", settings: Mapping[str, Any] | None = None) -> Built:
    """Trains the tokenizers, prepares the data and builds the network of a recipe or a data file; trains nothing."""
    if not isinstance(data, (str, Path, Recipe, Mapping)):
        raise InputError("build takes a data file or a recipe", remedy="write the pairs to a file, or use train")
    recipe = resolve(_recipe(data, task, None, settings or {}))
    if recipe.training.batch_tokens == "auto":
        training = recipe.training.model_copy(update={"batch_tokens": BATCH_TOKENS})
        recipe = recipe.model_copy(update={"training": training})
    source, target = train_tokenizers(recipe)
    seed_everything(recipe.training.seed)
    model = build_model(recipe.model, source.size, target.size, source.word_starts)
    return Built(recipe, model, source, target, prepare_data(recipe, (source, target)))


def plan(
    data: str | Path, *, task: str = "generate", minutes: float | None = None, settings: Mapping[str, Any] | None = None
) -> Plan:
    """The recipe that `train` would choose for a data file, with its reasons. Nothing is trained or written."""
    return autoconfig.plan_for(str(check_path("plan", data)), _overrides(settings or {}), task, minutes)


def evaluate(model: Model | str | Path, data: str | Path | None = None, **settings: Any) -> Evaluation:
    """Scores of a model on a data file, by default on the test set of its run. `settings` are those of `generate`."""
    model = model if isinstance(model, Model) else load(check_path("evaluate", model))
    data = None if data is None else str(check_path("evaluate", data))
    _, examples = load_held_out(model, data)
    output = predict(model, examples, model.recipe.evaluation.metrics, **settings)
    return evaluate_output(model, examples, output)


def _check_callbacks(callbacks: Sequence[Callback]) -> Sequence[Callback]:
    for one in callbacks if isinstance(callbacks, Sequence) else [callbacks]:
        if not isinstance(one, Callback):
            remedy = "write callbacks=[MyCallback()], with `class MyCallback(transduce.Callback)`"
            raise InputError(f"not a callback: {one!r}", where="train", remedy=remedy)
    if not isinstance(callbacks, Sequence):
        raise InputError("callbacks are a list", where="train", remedy="write callbacks=[...]")
    return callbacks


def _stored(data: Data, folder: Path) -> str | Path | Recipe | Mapping[str, Any]:
    """The data as `train` reads it: pairs in memory become a file beside the run directory."""
    if isinstance(data, (str, Path, Recipe, Mapping)):
        return data
    pairs = check_pairs("train", data)
    if not pairs:
        raise InputError("no pairs", remedy='write transduce.train([("source", "target"), ...])')
    path = make_folder(folder.parent) / f"{folder.name}.jsonl"
    lines = (json.dumps({"source": source, "target": target}, ensure_ascii=False) for source, target in pairs)
    replace_file(path, "".join(f"{line}\n" for line in lines))
    return path


def _recipe(
    source: str | Path | Recipe | Mapping[str, Any], task: str, minutes: float | None, settings: Mapping[str, Any]
) -> Recipe:
    overrides = _overrides(settings)
    if isinstance(source, (str, Path)):
        return autoconfig.recipe_for(str(source), overrides, task, minutes)
    if isinstance(source, Recipe) and not overrides and minutes is None:
        return source
    content = source.model_dump(mode="json", exclude_unset=True) if isinstance(source, Recipe) else source
    limits = [] if minutes is None else [f"training.minutes={minutes}"]
    return parse(override(content, [*limits, *overrides]))


def _overrides(settings: Mapping[str, Any]) -> list[str]:
    """Settings in the form of the command line."""
    if not isinstance(settings, Mapping):
        raise InputError(f"settings are a mapping, not {settings!r}", remedy='write settings={"training.steps": 1000}')
    return [f"{key}={json.dumps(value)}" for key, value in settings.items()]


class TransduceEstimator:
    """An estimator in the manner of scikit-learn: `TransduceEstimator().fit(sources, targets).predict(sources)`.

    The parameters are those of `train`. Without a `folder` the run is in a temporary directory, which goes with the
    estimator; with one, a second `fit` needs another. `beam` and the like of `predict` are in `settings`, as
    `generation.beam`. After `fit`, `result_` is the training result and `model_` the model. Pipelines, `clone` and
    cross-validation of scikit-learn work; it need not be installed.
    """

    def __init__(
        self,
        *,
        task: str = "generate",
        minutes: float | None = None,
        settings: Mapping[str, Any] | None = None,
        folder: str | Path | None = None,
    ) -> None:
        self.task, self.minutes, self.settings, self.folder = task, minutes, settings, folder

    def fit(self, X: Iterable[str], y: Iterable[str]) -> Self:  # noqa: N803
        """Trains on sources and targets; both are texts, and labels where the task is `classify`."""
        sources, targets = check_texts("fit", X), check_texts("fit", y)
        if len(sources) != len(targets):
            raise InputError(f"{len(sources)} sources but {len(targets)} targets", remedy="give one target per source")
        self._temporary = tempfile.TemporaryDirectory(prefix="transduce-") if self.folder is None else None
        folder = Path(self._temporary.name) / "run" if self._temporary is not None else Path(str(self.folder))
        pairs = list(zip(sources, targets, strict=True))
        self.result_ = train(pairs, folder, task=self.task, minutes=self.minutes, settings=self.settings)
        self.model_ = load(self.result_.run.folder)
        return self

    def predict(self, X: Iterable[str]) -> np.ndarray:  # noqa: N803
        """The output of each source: an array of strings."""
        return np.array([one.text for one in self._fitted().generate(check_texts("predict", X))], dtype=object)

    def score(self, X: Iterable[str], y: Iterable[str]) -> float:  # noqa: N803
        """The share of outputs that equal their target."""
        outputs, targets = self.predict(X), check_texts("score", y)
        if len(outputs) != len(targets):
            raise InputError(f"{len(outputs)} sources but {len(targets)} targets", remedy="give one target per source")
        return float(np.mean([output == target for output, target in zip(outputs, targets, strict=True)]))

    def _fitted(self) -> Model:
        if not hasattr(self, "model_"):
            raise InputError("this estimator is not fitted", remedy="call fit(sources, targets) first")
        return self.model_

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """The parameters of the constructor."""
        return {name: getattr(self, name) for name in inspect.signature(type(self)).parameters}

    def set_params(self, **params: Any) -> Self:
        """Changes parameters of the constructor."""
        known = self.get_params()
        for name, value in params.items():
            if name not in known:
                raise InputError(f"unknown parameter {name!r}", where="set_params", remedy=nearest(name, known))
            setattr(self, name, value)
        return self

    def __repr__(self) -> str:
        given = ", ".join(f"{name}={value!r}" for name, value in self.get_params().items() if value is not None)
        return f"{type(self).__name__}({given})"

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "model_")

    def __sklearn_tags__(self) -> Any:
        """What scikit-learn asks an estimator, where it is installed."""
        from sklearn.utils import InputTags, Tags, TargetTags

        kind = "classifier" if self.task.startswith("classify") else None
        inputs = InputTags(one_d_array=True, two_d_array=False, string=True)
        return Tags(estimator_type=kind, target_tags=TargetTags(required=True), input_tags=inputs)
