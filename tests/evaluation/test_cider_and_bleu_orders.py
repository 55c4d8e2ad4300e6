"""CIDEr-D against its equation, and BLEU of lower order against sacrebleu."""

import math

import numpy as np
import pytest
import sacrebleu
from hypothesis import given
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
    for said, references in pairs:
        total = 0.0
        for order in (1, 2, 3, 4):
            for reference in references:
                top = own = other = 0.0
                for gram in {*grams(said, order), *grams(reference, order)}:
                    with_it = sum(any(gram in grams(line, order) for line in lines) for _, lines in pairs)
                    idf = math.log(len(pairs) / max(1, with_it))
                    c, r = (grams(text, order).count(gram) * idf for text in (said, reference))
                    top, own, other = top + min(c, r) * r, own + c * c, other + r * r
                apart = len(said.split()) - len(reference.split())
                if own and other:
                    total += math.exp(-(apart**2) / 72) * top / math.sqrt(own * other)
        scores.append(10 * total / 4 / len(references))
    return 100 * sum(scores) / len(scores)


@given(SETS)
def test_cider_equals_its_equation(pairs):
    metric = find_metric("cider")
    rows = metric.statistics([said for said, _ in pairs], [references for _, references in pairs])
    assert metric.value(rows.sum(0)) == pytest.approx(cider_d(pairs), abs=1e-6)


def test_cider_ignores_ubiquitous_ngrams_and_clips_repetitions():
    metric = find_metric("cider")

    def score(*said: str) -> float:
        rows = metric.statistics(said, [["a red cat"], ["a dog"], ["a blue bird sings"]])
        return metric.value(rows.sum(0))

    assert score("a", "a", "a") == 0
    assert score("a red cat", "a dog", "a blue bird sings") > score("a red dog", "a dog", "a blue bird sings")
    assert score("a red cat cat cat", "a dog", "a blue bird sings") < score("a red cat", "a dog", "a blue bird sings")


@pytest.mark.parametrize("order", [1, 2, 3])
@given(SETS)
def test_bleu_of_lower_order_equals_that_of_sacrebleu(order, pairs):
    metric = find_metric(f"bleu{order}")
    said, references = [one for one, _ in pairs], [lines for _, lines in pairs]
    most = max(map(len, references))
    streams = [[lines[i] if i < len(lines) else None for lines in references] for i in range(most)]
    wanted = sacrebleu.BLEU(force=True, max_ngram_order=order).corpus_score(said, streams).score
    rows = metric.statistics(said, references)
    assert metric.value(rows.sum(0)) == pytest.approx(wanted)
    assert metric.statistics([], []).shape == (0, 2 + 2 * order)
    assert np.isfinite(rows).all()
    assert f"n:{order}" in metric.signature
