"""The loaded model in Python: outputs, scores, attention and embeddings agree with each other."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as profile
from hypothesis import strategies as st
from run_fixtures import RECURRENT, colour_pairs, settings

import transduce
from transduce.errors import InputError
from transduce.flow import BOS, EOS, PAD

WORDS = st.lists(st.sampled_from(["red", "green", "blue", "black", "white", "unheard"]), min_size=1, max_size=7)


@pytest.fixture(scope="session")
def transformer(transformer_run: Path) -> transduce.Model:
    return transduce.load(transformer_run)


@pytest.fixture(scope="session")
def alone(bench: Path, pairs: Path) -> transduce.Model:
    """A decoder alone, whose few learned positions source and target share."""
    part = {"kind": "transformer", "width": 16, "layers": 2, "heads": 2, "ff_width": 16}
    content = settings(
        pairs, {"decoder": {**part, "position": {"kind": "learned", "max_positions": 48}}}, "words", steps=5
    )
    content["tokens"]["shared"] = True
    return transduce.train(content, bench / "alone").model


class TestGenerate:
    def test_one_prediction_per_text(self, model: transduce.Model) -> None:
        out = model.generate(["red green", "", "blue red white"], beam=5)
        assert [one.text for one in out] == ["GREEN RED", "", "WHITE RED BLUE"]
        first = out[0]
        assert first.source == "red green"
        assert first.tokens == ("GREEN", "RED", "</s>")
        assert first.score == pytest.approx(sum(first.token_scores))
        assert first.complete
        assert not first.source_cut
        assert first.nbest[0].text == first.text
        assert (out[1].tokens, out[1].score, out[1].attention, out[1].alignment) == ((), 0, None, [])

    @profile(deadline=None, max_examples=15)
    @given(texts=st.lists(WORDS, min_size=1, max_size=4), beam=st.sampled_from([1, 3]))
    def test_scores_are_those_of_score(self, model: transduce.Model, texts: list[list[str]], beam: int) -> None:
        out = model.generate([" ".join(words) for words in texts], beam=beam, max_length=12)
        whole = [one for one in out if one.complete]
        scored = model.score([(one.source, one.text) for one in whole])
        for one, pair in zip(whole, scored, strict=True):
            if "<unk>" not in one.tokens:
                assert pair.tokens == one.tokens
                assert pair.token_scores == pytest.approx(one.token_scores, abs=1e-4)
                assert pair.perplexity == pytest.approx(math.exp(-one.score / len(one.tokens)), rel=1e-3)

    def test_rivals_come_best_first(self, model: transduce.Model) -> None:
        (one,) = model.generate(["red green"], beam=4, nbest=4, length_penalty=0)
        assert len(one.nbest) == 4
        assert [rival.score for rival in one.nbest] == sorted((rival.score for rival in one.nbest), reverse=True)

    def test_more_rivals_than_beams_widen_the_search(self, model: transduce.Model) -> None:
        assert len(model.generate(["red green"], beam=1, nbest=3)[0].nbest) == 3
        assert len(model.generate(["red green"], strategy="sample", nbest=3, temperature=3)[0].nbest) == 3

    def test_a_sample_is_one_draw(self, model: transduce.Model) -> None:
        """Not the likeliest of several: how often a text comes is its probability."""
        text = "red green"
        best = model.generate([text], beam=5)[0]
        hot = {"strategy": "sample", "temperature": 1.0}
        drawn = [one.text for one in model.generate([text] * 3000, **hot, max_length=12)]
        share, expected = drawn.count(best.text) / 3000, math.exp(best.score)
        assert share == pytest.approx(expected, abs=4 * math.sqrt(expected * (1 - expected) / 3000) + 1e-3)
        assert model.settings(strategy="sample").beam == 1
        assert model.settings(strategy="sample", beam=4).beam == 4

    def test_a_sample_does_not_depend_on_its_neighbours(self, model: transduce.Model) -> None:
        drawn = [model.generate(["red"] * 8, strategy="sample", temperature=4, batch_tokens=n) for n in (1, 4096)]
        assert [one.text for one in drawn[0]] == [one.text for one in drawn[1]]

    def test_outputs_begin_with_their_prefixes(self, model: transduce.Model) -> None:
        out = model.generate(["red green", "red green", "red green"], prefixes=["BLUE", "", "WHITE WHITE"])
        assert out[0].text.startswith("BLUE")
        assert out[1].text == "GREEN RED"
        assert out[2].text.startswith("WHITE WHITE")
        assert out[0].score == pytest.approx(model.score([("red green", out[0].text)])[0].score, abs=1e-4)

    def test_outputs_keep_minimal_and_maximal_lengths(self, model: transduce.Model) -> None:
        (short,) = model.generate(["red green blue white"], max_length=2)
        assert not short.complete
        assert len(short.tokens) == 2
        assert "</s>" not in short.tokens
        assert short.attention is not None
        assert short.attention.shape[2] == 2
        (long,) = model.generate(["red green"], min_length=7)
        assert len(long.tokens) >= 8

    def test_wrong_arguments_are_refused(self, model: transduce.Model) -> None:
        for texts in ("red green", ["red", None], ["r\ud800d"]):
            with pytest.raises(transduce.InputError):
                model.generate(texts)  # type: ignore[arg-type]
        with pytest.raises(transduce.InputError, match="list of texts"):
            model.generate("red")
        with pytest.raises(transduce.InputError, match=r"did you mean 'beam'"):
            model.generate(["red"], beem=3)
        with pytest.raises(transduce.InputError, match="2 lines but 1 prefixes"):
            model.generate(["red", "blue"], prefixes=["RED"])
        with pytest.raises(transduce.InputError, match="wide"):
            model.generate(["red"], beam="wide")
        with pytest.raises(transduce.InputError, match="empty"):
            model.explain("  ")
        assert model.generate([]) == []
        assert model.score([]) == []

    def test_a_greedy_recipe_searches_when_a_beam_is_asked_for(self, model: transduce.Model) -> None:
        greedy = model.recipe.model_copy(update={"generation": model.settings(strategy="greedy", beam=1)})
        other = transduce.Model(model.network, model.source, model.target, greedy)
        assert other.settings().strategy == "greedy"
        assert other.settings(beam=4).strategy == "beam"
        assert other.settings(nbest=4).strategy == "beam"
        assert other.settings(beam=4, strategy="greedy").strategy == "greedy"


class TestAttention:
    @pytest.mark.parametrize(("name", "layers", "heads"), [("model", 1, 1), ("transformer", 1, 2), ("alone", 2, 2)])
    def test_attention_shapes_and_row_sums(
        self, request: pytest.FixtureRequest, name: str, layers: int, heads: int
    ) -> None:
        for one in request.getfixturevalue(name).generate(["red green", "blue", "white red black x"], max_length=9):
            explained, weights = one.explanation, one.attention
            assert explained is not None
            assert weights is not None
            assert weights.shape == (layers, heads, len(one.tokens), len(explained.source_tokens))
            assert explained.source_tokens[-1] == "</s>"
            assert "".join(explained.source_tokens[:-1]).replace(" ", "") == one.source.replace(" ", "")
            np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-4)

    def test_words_are_aligned(self, model: transduce.Model) -> None:
        right = total = 0
        for one in model.generate([source for source, _ in colour_pairs(30, seed=4)]):
            count = len(one.source.split())
            right += len(set(one.alignment) & {(count - 1 - word, word) for word in range(count)})
            total += count
        assert right / total > 0.8

    def test_none_without_attention(self, bottleneck_run: Path) -> None:
        one = transduce.load(bottleneck_run).generate(["red green"])[0]
        assert one.attention is None
        assert one.alignment == []
        assert one.explanation is not None
        assert one.explanation.output == one.text

    def test_scores_are_those_of_the_best_hypothesis(self, model: transduce.Model) -> None:
        """The same numbers as a fresh reading of the very ids that came out."""
        (one,) = model.generate(["red green blue"], beam=5)
        source = torch.tensor([[*model.source.encode("red green blue").ids, EOS]])
        target = torch.tensor([[BOS, *model.target.encode(one.text).ids]])
        logits = model.logits(source=source, target=target)[0].log_softmax(-1)
        gold = torch.tensor([*model.target.encode(one.text).ids, EOS])
        assert logits.gather(1, gold[:, None])[:, 0].tolist() == pytest.approx(one.token_scores, abs=1e-4)


class TestLogits:
    @pytest.mark.parametrize("name", ["model", "transformer"])
    @profile(deadline=None, max_examples=10)
    @given(lengths=st.lists(st.integers(1, 6), min_size=2, max_size=4), seed=st.integers(0, 99))
    def test_padding_changes_nothing(self, request, name: str, lengths: list[int], seed: int) -> None:
        model = request.getfixturevalue(name)
        draw = torch.Generator().manual_seed(seed)
        rows = [torch.randint(4, model.source.size, (length,), generator=draw) for length in lengths]
        source = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD)
        mask = torch.arange(source.size(1)) < torch.tensor(lengths)[:, None]
        target = torch.tensor([[BOS, 4, 5, 6]]).expand(len(rows), -1)
        together = model.logits(source=source, source_mask=mask, target=target)
        assert together.shape == (len(rows), 4, model.target.size)
        for number, row in enumerate(rows):
            torch.testing.assert_close(
                together[number], model.logits(source=row[None], target=target[:1])[0], atol=1e-4, rtol=1e-4
            )

    def test_a_decoder_only_model_needs_no_source(self, alone: transduce.Model) -> None:
        assert alone.logits(target=torch.tensor([[BOS, 4]])).shape == (1, 2, alone.target.size)


class TestEnds:
    """Learned positions end somewhere: sources are cut and flagged there, outputs stop there."""

    @pytest.mark.parametrize("name", ["transformer", "alone"])
    def test_long_lines_are_truncated_at_the_last_position(self, request: pytest.FixtureRequest, name: str) -> None:
        long = "red green blue " * 60
        options = {
            "max_source_length": 2000,
            "max_length": 2000,
            "max_ratio": 100.0,
            "min_length": 2000,
            "long_sources": "truncate",
        }
        out = request.getfixturevalue(name).generate([long, "red"], beam=1, **options)
        assert [one.source_cut for one in out] == [True, False]
        assert not out[0].complete
        assert out[0].attention is not None

    def test_lines_that_just_fit_are_not_cut(self, transformer: transduce.Model) -> None:
        assert not transformer.generate(["x" * 40], max_length=4)[0].source_cut
        assert transformer.generate(["x" * 41], max_length=4)[0].source_cut  # the recipe's max_source_length


class TestLoad:
    def test_the_same_numbers_as_after_training(self, bench: Path, pairs: Path, tmp_path: Path) -> None:
        parts = {"encoder": {**RECURRENT, "cell": "lstm", "layers": 2}, "decoder": {**RECURRENT, "cell": "lstm"}}
        trained = transduce.train(settings(pairs, {**parts, "tie": "target"}, "bpe", steps=6), tmp_path / "run")
        loaded = transduce.load(tmp_path / "run", device="cpu")
        given = {"source": torch.tensor([[5, 6, EOS]]), "target": torch.tensor([[BOS, 7, 8]])}
        assert torch.equal(loaded.logits(**given), trained.model.logits(**given))
        assert loaded.recipe == trained.model.recipe
        assert loaded.parameters == trained.model.parameters


class TestReread:
    def test_batched_explanations_equal_single_ones(
        self, model: transduce.Model, transformer: transduce.Model, alone: transduce.Model
    ) -> None:
        texts = ["red green blue", "", "blue", "white red red green black"]
        for one in (model, transformer, alone):
            singly = [prediction.explanation for prediction in one.generate(texts)]
            found = one.generate(texts)
            together = one.explain_predictions(found)
            assert together[1] is None
            for single, batched, prediction in zip(singly, together, found, strict=True):
                assert (single is None) == (batched is None)
                if single is not None:
                    assert prediction.explanation is batched
                    assert np.allclose(single.attention, batched.attention, atol=1e-5)


def test_alternatives_are_the_outputs_after_each_probable_token(model: transduce.Model) -> None:
    """The tokens are those of the highest probability; the first alternative of a greedy search is its output."""
    text, prefix = "red blue green", "GREEN"
    found = model.alternatives(text, prefix, k=3, strategy="greedy")
    begin = len(model.target.encode(prefix).ids)
    assert [one.tokens[:begin] for one in found] == [found[0].tokens[:begin]] * 3
    tokens = [one.tokens[begin] for one in found]
    scores = [one.token_scores[begin] for one in found]
    assert len(set(tokens)) == 3
    assert scores == sorted(scores, reverse=True)
    assert found[0].text == model.generate([text], prefixes=[prefix], strategy="greedy")[0].text
    rest = 1 - sum(math.exp(score) for score in scores)
    assert rest <= (model.target.size - 3) * math.exp(scores[-1])  # no other token is more probable
    with pytest.raises(InputError, match="need a source"):
        model.alternatives(" ")
