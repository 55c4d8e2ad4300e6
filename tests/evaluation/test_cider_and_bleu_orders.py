"""CIDEr-D against its equation, and BLEU of lower order against sacrebleu."""

import math

import numpy as np
import pytest
import sacrebleu
from hypothesis import given, settings
from hypothesis import strategies as st

from transduce.evaluation.evaluate import find_metric

WORDS = st.lists(
    st.sampled_from(["a", "cat", "dog", "sits", "runs", "on", "the", "mat", "red"]), min_size=1, max_size=8
).map(" ".join)
SETS = st.lists(st.tuples(WORDS, st.lists(WORDS, min_size=1, max_size=3)), min_size=1, max_size=5)


def grams(text: str, order: int) -> list[tuple[str, ...]]:
    words = text.split()
    return [tuple(words[i : i + order]) for i in range(len(words) - order + 1)]


def cider_d(pairs) -> float:
    """Vedantam 2015, equations 1 to 3 and 6, computed directly, n-gram by n-gram."""
    scores = []
    for candidate, references in pairs:
        total = 0.0
        for order in (1, 2, 3, 4):
            for reference in references:
                top = own = other = 0.0
                for gram in {*grams(candidate, order), *grams(reference, order)}:
                    with_it = sum(any(gram in grams(line, order) for line in lines) for _, lines in pairs)
                    idf = math.log(len(pairs) / max(1, with_it))
                    c, r = (grams(text, order).count(gram) * idf for text in (candidate, reference))
                    top, own, other = top + min(c, r) * r, own + c * c, other + r * r
                apart = len(candidate.split()) - len(reference.split())
                if own and other:
                    total += math.exp(-(apart**2) / 72) * top / math.sqrt(own * other)
        scores.append(10 * total / 4 / len(references))
    return 100 * sum(scores) / len(scores)


@given(SETS)
def test_cider_equals_its_equation(pairs):
    metric = find_metric("cider")
    rows = metric.statistics([candidate for candidate, _ in pairs], [references for _, references in pairs])
    assert metric.value(rows.sum(0)) == pytest.approx(cider_d(pairs), abs=1e-6)


def test_cider_ignores_ubiquitous_ngrams_and_clips_repetitions():
    metric = find_metric("cider")

    def score(*candidate: str) -> float:
        rows = metric.statistics(candidate, [["a red cat"], ["a dog"], ["a blue bird sings"]])
        return metric.value(rows.sum(0))

    assert score("a", "a", "a") == 0
    assert score("a red cat", "a dog", "a blue bird sings") > score("a red dog", "a dog", "a blue bird sings")
    assert score("a red cat cat cat", "a dog", "a blue bird sings") < score("a red cat", "a dog", "a blue bird sings")


@pytest.mark.parametrize("order", [1, 2, 3])
@given(SETS)
def test_bleu_of_lower_order_equals_that_of_sacrebleu(order, pairs):
    metric = find_metric(f"bleu{order}")
    candidate, references = [one for one, _ in pairs], [lines for _, lines in pairs]
    most = max(map(len, references))
    streams = [[lines[i] if i < len(lines) else None for lines in references] for i in range(most)]
    wanted = sacrebleu.BLEU(force=True, max_ngram_order=order).corpus_score(candidate, streams).score
    rows = metric.statistics(candidate, references)
    assert metric.value(rows.sum(0)) == pytest.approx(wanted)
    assert metric.statistics([], []).shape == (0, 2 + 2 * order)
    assert np.isfinite(rows).all()
    assert f"n:{order}" in metric.signature


def caption_bleu(pairs, order: int) -> float:
    """Papineni 2002 over lower-cased words without punctuation, counted n-gram by n-gram, not smoothed."""
    plain = [(clean(candidate), [clean(line) for line in lines]) for candidate, lines in pairs]
    logarithms = 0.0
    for n in range(1, order + 1):
        correct = total = 0
        for candidate, references in plain:
            for gram in set(grams(candidate, n)):
                count = grams(candidate, n).count(gram)
                correct += min(count, max(grams(line, n).count(gram) for line in references))
                total += count
        if not correct:
            return 0.0
        logarithms += math.log(correct / total) / order
    length = sum(len(candidate.split()) for candidate, _ in plain)
    closest = 0
    for candidate, references in plain:
        sizes = [len(line.split()) for line in references]
        closest += min(sizes, key=lambda size: (abs(size - len(candidate.split())), size))
    return 100 * math.exp(min(0.0, 1 - closest / length) + logarithms)


def clean(text: str) -> str:
    return " ".join("".join(letter for letter in word.lower() if letter.isalpha()) for word in text.split()).strip()


CAPTIONS = st.lists(st.sampled_from(["A", "cat", "Dog,", "sits", "on", "the", "mat."]), min_size=1, max_size=8)
CAPTION_SETS = st.lists(
    st.tuples(CAPTIONS.map(" ".join), st.lists(CAPTIONS.map(" ".join), min_size=1, max_size=3)), min_size=1, max_size=4
)


@pytest.mark.parametrize("order", [1, 2, 3, 4])
@settings(max_examples=20)
@given(CAPTION_SETS)
def test_caption_bleu_equals_its_equation(order, pairs):
    metric = find_metric(f"caption_bleu{order}")
    rows = metric.statistics([candidate for candidate, _ in pairs], [lines for _, lines in pairs])
    assert metric.value(rows.sum(0)) == pytest.approx(caption_bleu(pairs, order))


def test_bleu_of_tokenised_text_joins_subwords_and_splits_nothing():
    candidate, gold = ["ein hau@@ s steht , da@@"], ["ein haus steht , dann noch eins"]
    metric = find_metric("bleu_tokenised")
    rows = metric.statistics(candidate, [[line] for line in gold])
    wanted = sacrebleu.BLEU(tokenize="none", force=True).corpus_score(["ein haus steht , da"], [gold]).score
    assert metric.value(rows.sum(0)) == pytest.approx(wanted)
    assert "tok:none" in metric.signature


@settings(max_examples=20)
@given(SETS)
def test_sequence_errors_and_exact_matches_are_all_lines(pairs):
    candidate, references = [one for one, _ in pairs], [lines for _, lines in pairs]
    exact, errors = (find_metric(name) for name in ("exact", "ser"))
    total = exact.value(exact.statistics(candidate, references).sum(0)) + errors.value(
        errors.statistics(candidate, references).sum(0)
    )
    assert total == pytest.approx(100)


def test_nats_per_character_are_the_logarithm_of_the_perplexity():
    totals = np.array([-123.4, 88.0])
    perplexity, nats = find_metric("character_perplexity"), find_metric("nats_per_character")
    assert nats.value(totals) == pytest.approx(math.log(perplexity.value(totals)))
