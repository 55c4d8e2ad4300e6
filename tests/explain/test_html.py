"""HTML page: its data, its security policy, and hostile texts."""

import base64
import hashlib
import json
import math
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import transduce
from transduce.errors import InputError
from transduce.explain.attention import Explanation
from transduce.explain.html import json_for_script, notebook_frame, render_page, write_page

HOSTILE = "</script><img src=x onerror=alert(1)><!-- <script> ]]> & \u2028\u2029 %%DATA%% \" ' \\ </style></title>"


class PageParser(HTMLParser):
    """Elements in order, the text of each script and style, and whether everything opened was closed."""

    VOID = frozenset({"meta", "input", "br", "img", "link"})

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.open: list[str] = []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append((self.open[-1] if self.open else "", data))

    def data(self) -> dict:
        return json.loads(next(text for tag, text in self.texts if tag == "script"))


def explained(text: str = "a b", **changes: object) -> Explanation:
    attention = np.random.default_rng(0).dirichlet(np.ones(3), size=(2, 4, 3)).astype(np.float32)  # L H T S
    values = {
        "source": text,
        "output": text,
        "source_tokens": [text, "b", "</s>"],
        "target_tokens": [text, "y", "</s>"],
        "source_words": [0, 1, -1],
        "target_words": [0, 1, -1],
        "token_scores": [-0.125, -1.1, -0.3],
        "score": -1.525,
        "attention": attention,
        "nbest": [(text, -1.525), ("other", -2.5)],
        "model_info": {text: text, "parameters": 12},
    }
    return Explanation(**{**values, **changes})  # type: ignore[arg-type]


def test_page_data_equal_the_explanation(tmp_path: Path) -> None:
    item = explained()
    write_page([item, explained(attention=None)], tmp_path / "page.html", "A title")
    content = PageParser((tmp_path / "page.html").read_text(encoding="utf-8")).data()
    first, second = content["explanations"]
    assert np.array_equal(np.array(first["attention"]["cross"], dtype=np.float32), item.attention)
    shown = first["explanation"]
    assert shown["token_scores"] == item.token_scores
    assert math.isclose(sum(shown["token_scores"]), shown["nbest"][0]["score"])
    assert shown["nbest"] == [{"text": "a b", "score": -1.525}, {"text": "other", "score": -2.5}]
    assert shown["source_labels"] == ["a b", "b"]
    assert shown["kinds"] == {"cross": [2, 4, 3, 3]}
    assert content["run"]["parts"] == {"a b": "a b"}
    assert content["run"]["parameters"] == 12
    assert [one["source"] for one in content["run"]["examples"]] == ["a b", "a b"]
    assert second["attention"] == {}


def test_hostile_text_stays_text() -> None:
    pages = render_page([explained()], "title"), render_page([explained(HOSTILE)], HOSTILE)
    clean, hostile = map(PageParser, pages)
    assert [element for element in hostile.elements if element[0] != "meta"] == [
        element for element in clean.elements if element[0] != "meta"
    ]
    content = hostile.data()
    shown = content["explanations"][0]["explanation"]
    assert content["run"]["name"] == shown["source"] == shown["target_tokens"][0] == HOSTILE


@settings(max_examples=40)
@given(
    st.recursive(
        st.text() | st.integers() | st.none(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)
    )
)
def test_embedded_json_round_trips_and_cannot_end_its_element(content: object) -> None:
    text = json_for_script(content)
    assert json.loads(text) == content
    assert not set(text) & set("<>&\u2028\u2029")
    text.encode("utf-8")


def test_lone_surrogates_are_escaped() -> None:
    assert json.loads(json_for_script("a\ud800")) == "a\ud800"
    json_for_script("a\ud800").encode("utf-8")


def test_page_has_no_element_that_loads() -> None:
    """tests/studio/test_explanation_pages.py opens it in a browser and counts its requests: none."""
    for tag, attributes in PageParser(render_page([explained()], "title")).elements:
        assert tag not in {"img", "iframe", "object", "embed", "base", "video", "audio"}
        assert not {"src", "srcset", "action", "data"} & set(attributes), (tag, attributes)
        assert attributes.get("href", "data:,") == "data:,"  # no icon is asked for
        assert not any(name.startswith("on") for name in attributes)


def test_security_policy_allows_only_the_own_script_and_style() -> None:
    reader = PageParser(render_page([explained(HOSTILE)], HOSTILE))
    policy = next(a["content"] for tag, a in reader.elements if tag == "meta" and a.get("http-equiv"))
    assert policy is not None
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy
    scripts = [text for tag, text in reader.texts if tag == "script"]
    style = next(text for tag, text in reader.texts if tag == "style")
    for rule, text in (("script-src", scripts[-1]), ("style-src", style)):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{rule} 'sha256-{digest}'" in policy
    assert not re.search(r"document\.write|\beval\(|new Function", scripts[-1])


def test_infinite_scores_do_not_break_the_page() -> None:
    infinite = explained(token_scores=[-math.inf, -1.0, -1.0], score=-math.inf, nbest=[("a", -math.inf)])
    content = PageParser(render_page([infinite])).data()["explanations"][0]["explanation"]
    assert content["token_scores"] == [None, -1.0, -1.0]
    assert content["score"] is None


def test_inconsistent_explanations_are_rejected() -> None:
    with pytest.raises(ValueError, match="attention of shape"):
        explained(attention=np.ones((1, 1, 2, 3)))
    with pytest.raises(ValueError, match="2 token scores for 3"):
        explained(token_scores=[-1.0, -0.525])
    with pytest.raises(ValueError, match="sum to"):
        explained(score=-1.0)


def test_explanation_selects_layer_and_head() -> None:
    item = explained()
    assert item.attention is not None
    np.testing.assert_array_equal(item.map(1, 2).weights, item.attention[1, 2])
    np.testing.assert_allclose(item.map().weights.sum(1), 1, rtol=1e-6)
    with pytest.raises(InputError, match="no attention"):
        explained(attention=None).map()


def test_show_displays_inline_in_a_notebook_and_prints_elsewhere(
    model: transduce.Model, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A kernel has imported IPython; here a stand-in takes what it is given to display."""
    shown: list[Any] = []
    (out,), explained = model.generate(["red blue"]), model.explain("red blue", methods=["attention"])
    out.show()
    explained.show()
    printed = capsys.readouterr().out
    assert printed.count(out.text) >= 2
    assert explained.verdict.split()[0] in printed
    kernel = SimpleNamespace(get_ipython=lambda: object(), display=SimpleNamespace(display=shown.append))
    monkeypatch.setitem(sys.modules, "IPython", kernel)
    out.show()
    explained.show()
    assert shown == [out, explained]
    assert capsys.readouterr().out == ""
    assert notebook_frame(explained).endswith("</p>")
    assert "srcdoc" in out._repr_html_()
