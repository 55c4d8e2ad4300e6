"""Captured training passes: padded shapes, gradients, capture and replay."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from transduce.attention.positions import max_positions
from transduce.flow import BOS, EOS, Batch, Padded
from transduce.kernels.cuda_graph import COLUMN_MULTIPLE, ROW_FRACTION, Pass, TrainingGraphs, pad_to_bucket
from transduce.layers.transformer import TransformerLayer
from transduce.objectives import CrossEntropy
from transduce.recipe import parse
from transduce.recipe.build import build_model, complete_recipe
from transduce.training.distributed import Processes, local_part

if TYPE_CHECKING:
    from transduce.model import EncoderDecoder
    from transduce.training.fsdp import ShardedModel


def batch_of(lengths: list[tuple[int, int]]) -> Batch:
    sources = Padded.from_rows([[*range(4, 4 + source), EOS] for source, _ in lengths])
    targets = Padded.from_rows([[BOS, *range(5, 5 + target), EOS] for _, target in lengths])
    return Batch(sources, targets, rows=tuple(range(len(lengths))))


@given(st.lists(st.tuples(st.integers(1, 20), st.integers(1, 20)), min_size=1, max_size=30), st.integers(16, 2000))
def test_padding_to_buckets_gives_few_shapes(lengths: list[tuple[int, int]], budget: int) -> None:
    batch = batch_of(lengths)
    made = pad_to_bucket(batch, budget)
    assert made.source is not None
    assert made.target is not None
    assert made.source.values.size(1) % COLUMN_MULTIPLE == made.decoder_inputs.values.size(1) % COLUMN_MULTIPLE == 0
    columns = made.source.values.size(1) + made.target.values.size(1)
    assert made.size % max(1, budget // columns // ROW_FRACTION) == 0
    assert made.size < len(lengths) + max(1, budget // columns // ROW_FRACTION)
    assert CrossEntropy().count(made) == CrossEntropy().count(batch)
    assert made.rows[: batch.size] == batch.rows


@given(st.lists(st.tuples(st.integers(1, 20), st.integers(1, 20)), min_size=1, max_size=9), st.integers(1, 30))
def test_padding_does_not_exceed_the_maximum_length(lengths: list[tuple[int, int]], most: int) -> None:
    batch = batch_of(lengths)
    made = pad_to_bucket(batch, 100, most)
    assert batch.source is not None
    assert made.source is not None
    for before, after in ((batch.source, made.source), (batch.decoder_inputs, made.decoder_inputs)):
        assert after.values.size(1) <= max(before.values.size(1), most)
        assert after.values.size(1) % COLUMN_MULTIPLE == 0 or after.values.size(1) >= most


def test_maximum_length_of_positions() -> None:
    part = {"kind": "transformer", "width": 8, "heads": 2, "ff_width": 8}
    found = []
    for position in ({"kind": "learned", "max_positions": 600}, "sinusoidal"):
        recipe = complete_recipe(parse({"model": {"encoder": {**part, "position": position}, "decoder": part}}))
        found.append(max_positions(build_model(recipe.model, 40, 40)))
    assert found == [600, None]


@pytest.mark.parametrize("kind", ["transformer", "convolutional", "recurrent"])
def test_padded_batches_have_the_same_gradient(kind: str) -> None:
    torch.manual_seed(1)
    part = {"kind": kind, "width": 8, "dropout": 0.0, **({"heads": 2, "ff_width": 8} if kind == "transformer" else {})}
    recipe = complete_recipe(parse({"model": {"encoder": part, "decoder": part}}))
    model, objective = build_model(recipe.model, 40, 40).double(), CrossEntropy(label_smoothing=0.1)
    batch = batch_of([(3, 5), (9, 2), (1, 11)])
    found = []
    for one in (batch, pad_to_bucket(batch, 1280)):
        model.zero_grad()
        loss = objective(model, one).total
        loss.backward()
        found.append((loss.item(), [parameter.grad.clone() for parameter in model.parameters()]))  # type: ignore[union-attr]
    assert pad_to_bucket(batch, 1280).size > batch.size
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-9)
    for one, other in zip(found[0][1], found[1][1], strict=True):
        torch.testing.assert_close(one, other)


class Pretended:
    """What a recording does on a GPU, without one."""

    made = 0

    def __init__(self, run: Pass, batch: Batch, factor: torch.Tensor, other: Any) -> None:
        assert other is None or isinstance(other, Pretended)
        Pretended.made += 1
        self.run = run
        run(batch, factor)  # recording adds to the gradients: they must be put back

    def replay(self, batch: Batch, factor: torch.Tensor) -> torch.Tensor:
        graphs: TrainingGraphs = getattr(self.run, "func", self.run).__self__  # type: ignore[attr-defined]
        places = [parameter.grad for parameter in graphs.parameters]
        sums = self.run(batch, factor)
        for parameter, place in zip(graphs.parameters, places, strict=True):
            if place is not None and parameter.grad is not place:  # a graph writes to the same memory every time
                assert parameter.grad is not None
                parameter.grad = place.copy_(parameter.grad)
        return sums


def small_model() -> EncoderDecoder:
    torch.manual_seed(1)
    part = {"kind": "transformer", "width": 8, "dropout": 0.0, "heads": 2, "ff_width": 8}
    return build_model(complete_recipe(parse({"model": {"encoder": part, "decoder": part}})).model, 40, 40)


def repeated(graphs: TrainingGraphs, batches: list[Batch], updates: int) -> list[torch.Tensor]:
    """The gradients after all of these batches, so many times; only the last time counts."""
    for _ in range(updates):
        graphs.stale = True
        for batch in batches:
            graphs(batch, torch.tensor(0.5))
        graphs.clear_stale()
    return [local_part(parameter.grad) for parameter in graphs.parameters if parameter.grad is not None]


def gradients(batches: list[Batch], updates: int = 1) -> tuple[list[torch.Tensor], TrainingGraphs]:
    """Of a small model."""
    model = small_model()

    def run(batch: Batch, factor: torch.Tensor) -> torch.Tensor:
        loss = CrossEntropy()(model, batch).total
        (loss * factor).backward()
        return loss.detach()[None]

    graphs = TrainingGraphs(run, list(model.parameters()))
    return repeated(graphs, batches, updates), graphs


def test_a_repeated_shape_is_captured_and_accumulates_the_same_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    often, rare = batch_of([(3, 5), (9, 2)]), batch_of([(2, 2)])
    batches = [often, rare, often, often, often, rare]
    monkeypatch.setattr("transduce.kernels.cuda_graph.PassGraph", Pretended)
    monkeypatch.setattr(Pretended, "made", 0)
    found, graphs = gradients(batches)
    assert Pretended.made == len(graphs.captured) == 1
    monkeypatch.setattr("transduce.kernels.cuda_graph.MIN_OCCURRENCES", 99)
    plain, _ = gradients(batches)
    for one, other in zip(found, plain, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_every_update_starts_from_zero_gradients(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """The first pass writes over what is there, the others add to it; an update without any has none."""
    monkeypatch.setattr("transduce.kernels.cuda_graph.PassGraph", Pretended)
    batches = [batch_of([(3, 5), (9, 2)])] * count
    found, graphs = gradients(batches, updates=5)
    assert {key[0] for key in graphs.captured} == {1: {True}, 3: {True, False}}.get(count, set())
    monkeypatch.setattr("transduce.kernels.cuda_graph.MIN_OCCURRENCES", 99)
    plain, _ = gradients(batches)
    for one, other in zip(found, plain, strict=True):
        torch.testing.assert_close(one, other)


def test_the_first_capture_keeps_its_gradient_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """And all others write theirs to the same places, so that whoever moves the weights finds them there."""
    monkeypatch.setattr("transduce.kernels.cuda_graph.PassGraph", Pretended)
    copies = Counter[str]()
    for name in ("_foreach_copy_", "_foreach_add_"):
        monkeypatch.setattr(torch, name, counted(getattr(torch, name), copies, name))
    batches = [batch_of([(3, 5), (9, 2)])]
    for _ in range(2):
        _, graphs = gradients(batches, updates=6)
        assert len(graphs.captured) == 1
    assert not copies
    gradients(batches * 2, updates=4)
    assert copies["_foreach_add_"]


def counted(work: Any, calls: Counter[str], name: str) -> Any:
    def run(*given: Any) -> Any:
        calls[name] += 1
        return work(*given)

    return run


def test_a_failed_capture_is_reported_and_training_continues(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(run: Pass, batch: Batch, factor: torch.Tensor, other: Any) -> None:
        run(batch, factor)  # half of it was added already
        raise RuntimeError("operation not permitted when stream is capturing")

    batches = [batch_of([(3, 5), (9, 2)])] * 5
    with monkeypatch.context() as never:
        never.setattr("transduce.kernels.cuda_graph.MIN_OCCURRENCES", 99)
        plain, _ = gradients(batches)
    monkeypatch.setattr("transduce.kernels.cuda_graph.PassGraph", refuse)
    with pytest.warns(UserWarning, match="cannot be captured"):
        found, graphs = gradients(batches)
    assert graphs.failed
    for one, other in zip(found, plain, strict=True):
        torch.testing.assert_close(one, other)


@pytest.fixture(scope="module", params=[False, True], ids=["at once", "by layer"])
def wrapped(request: pytest.FixtureRequest) -> Iterator[ShardedModel]:
    from transduce.training.fsdp import ShardedModel

    cpu = torch.device("cpu")
    with Processes.start(cpu, "fsdp"):
        yield ShardedModel(small_model(), cpu, 1, by_layer_from=0 if request.param else 2**27)


def wrapped_graphs(wrapped: ShardedModel) -> TrainingGraphs:
    """Of a model that is wrapped by FSDP, in its only process."""

    def run(batch: Batch, factor: torch.Tensor) -> torch.Tensor:
        scaled, sums = wrapped.root(CrossEntropy(), batch, factor)
        scaled.backward()
        return sums

    wrapped.root.zero_grad()
    return TrainingGraphs(run, list(wrapped.model.parameters()), local_part, wrapped.discard_pass)


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 3])
def test_captured_passes_of_a_wrapped_model_have_the_gradients_of_an_ordinary_one(
    monkeypatch: pytest.MonkeyPatch, wrapped: ShardedModel, count: int
) -> None:
    batches = [batch_of([(3, 5), (9, 2)])] * count
    plain, _ = gradients(batches, updates=5)
    monkeypatch.setattr("transduce.kernels.cuda_graph.PassGraph", Pretended)
    graphs = wrapped_graphs(wrapped)
    found = repeated(graphs, batches, 5)
    assert {key[0] for key in graphs.captured} == {1: {True}, 3: {True, False}}[count]
    assert len(found) == len(plain)
    for one, other in zip(found, plain, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.slow
def test_a_wrapped_model_of_one_process_computes_with_its_weights_and_not_with_copies(wrapped: ShardedModel) -> None:
    inside = next(module for module in wrapped.model.modules() if isinstance(module, TransformerLayer)).feed_forward
    own = {name: local_part(one).data_ptr() for name, one in inside.named_parameters()}
    read: list[dict[str, int]] = []
    hook = inside.register_forward_hook(
        lambda module, given, output: read.append({name: one.data_ptr() for name, one in module.named_parameters()})
    )
    try:
        found = [repeated(wrapped_graphs(wrapped), [batch_of([(3, 5), (9, 2)])], 1)]
        before = {name: one.clone() for name, one in wrapped.model.state_dict().items()}
        wrapped.model.load_state_dict({name: 2 * one for name, one in before.items()})
        found.append(repeated(wrapped_graphs(wrapped), [batch_of([(3, 5), (9, 2)])], 1))
        wrapped.model.load_state_dict(before)
    finally:
        hook.remove()
    assert read == [own, own]
    assert not torch.equal(found[0][0], found[1][0]), "changed weights, changed gradients"


@pytest.mark.slow
@pytest.mark.parametrize("where", ["forward", "backward", "end"])
def test_a_wrapped_model_whose_capture_failed_trains_on(
    monkeypatch: pytest.MonkeyPatch, wrapped: ShardedModel, where: str
) -> None:
    """Within the pass, after the weights were gathered and some gradients computed."""
    layers = [module for module in wrapped.model.modules() if isinstance(module, TransformerLayer)]
    inside = layers[-1 if where == "forward" else 0].feed_forward

    def fail(*given: Any) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    def refuse(run: Pass, batch: Batch, factor: torch.Tensor, other: Any) -> None:
        hooks = [inside.register_forward_hook(fail)] if where == "forward" else []
        if where == "backward":
            hooks = [inside.register_forward_hook(lambda module, given, output: output.register_hook(fail) and None)]
        with pytest.raises(RuntimeError, match="capturing") if hooks else nullcontext():
            run(batch, factor)
        for hook in hooks:
            hook.remove()
        fail()

    batches = [batch_of([(3, 5), (9, 2)])] * 3
    plain, _ = gradients(batches, updates=2)
    monkeypatch.setattr("transduce.kernels.cuda_graph.PassGraph", refuse)
    graphs = wrapped_graphs(wrapped)
    with pytest.warns(UserWarning, match="cannot be captured"):
        found = repeated(graphs, batches, 2)
    assert graphs.failed
    for one, other in zip(found, plain, strict=True):
        torch.testing.assert_close(one, other)
