"""Language codes of multilingual models (M2M100, mBART-25, mBART-50)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from huggingface_fixtures import (
    ARCHITECTURES,
    ENDS,
    MORE_TEXTS,
    generate_with_both,
    hf_ids,
    make,
    record,
    search_name,
    write_tokenizer,
)
from torch.testing import assert_close
from typer.testing import CliRunner

import transduce
from transduce.cli import app
from transduce.data.annotations import token_alignment
from transduce.errors import InputError
from transduce.flow import BOS, EOS, Batch, Padded
from transduce.interop import Languages, convert

TEXTS = ["w1 w2 w3 w4 w5 w6 w7", "w9", "w3 w3 nothing w12 w0", "w2 w1 w0 w5 w6 w7 w8 w11"]


ENGLISH, GERMAN = 22, 23
MBART50, M2M100 = ARCHITECTURES["mbart"], ("M2M100, NLLB", "M2M100ForConditionalGeneration")
MBART25 = ("mBART-25", "MBartForConditionalGeneration")


def change_template(folder, template: list[str]) -> None:
    """As a tokenizer was saved that had another language in mind, or an older habit."""
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    made = [
        {"Sequence": {"id": "A", "type_id": 0}} if one == "$A" else {"SpecialToken": {"id": one, "type_id": 0}}
        for one in template
    ]
    content["post_processor"]["single"] = made
    known = {"<eng>": ENGLISH, "<deu>": GERMAN, "</s>": 2}
    content["post_processor"]["special_tokens"] = {
        one: {"id": one, "ids": [known[one]], "tokens": [one]} for one in template if one != "$A"
    }
    path.write_text(json.dumps(content))


@pytest.mark.parametrize("scaled", [True, False])
def test_m2m100_logits_and_cross_attention_equal_transformers(scaled, tmp_path):
    library = make("m2m", tmp_path / "given", scale_embedding=scaled)
    model = transduce.load(convert(tmp_path / "given", tmp_path / "run", Languages("<deu>", "<eng>")).folder)
    rows = [[*ids, EOS] for ids in model.source.encode_sources(TEXTS)]
    source = Padded.from_rows(rows)
    numbers = torch.tensor([hf_ids(model, row) for row in source.values.tolist()])
    assert {row[0] for row in numbers.tolist()} == {GERMAN}
    decoder_ids = torch.tensor([[BOS, *model.target.prefix, 9, 7]] * len(TEXTS))
    read = torch.tensor([hf_ids(model, row) for row in decoder_ids.tolist()])
    assert read[0, :2].tolist() == [2, ENGLISH]
    with torch.no_grad():
        answer = library(
            input_ids=numbers, attention_mask=source.mask.long(), decoder_input_ids=read, output_attentions=True
        )
        step = model.network.advance(decoder_ids, model.network.start(Batch(source)), with_attention=True)
    known = torch.tensor(model.source.vocabulary.backend_ids)
    plain = torch.tensor([number for number, row in enumerate(known.tolist()) if row >= 0 and number != BOS])
    found, expected = step.logits.log_softmax(-1), answer.logits.log_softmax(-1)
    record(*M2M100, logits=found[..., plain] - expected[..., known[plain]])
    assert_close(found[..., plain], expected[..., known[plain]], rtol=1e-4, atol=1e-4)
    assert_close(step.attention.cross, torch.stack(answer.cross_attentions, 1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("search", [{}, {"num_beams": 4}, {"num_beams": 4, "early_stopping": True}])
@pytest.mark.parametrize("family", ["m2m", "mbart"])
def test_generation_with_codes_of_the_folder_equals_transformers(family, search, tmp_path):
    """The folder itself says both languages, as one saved for a pair does; the output begins with the second."""
    forced = {"forced_bos_token_id": GERMAN} if family == "m2m" else {}
    library = make(family, tmp_path, generation={**search, **forced})
    model = transduce.load(tmp_path, device="cpu")
    for longest in (12, 25):
        expected, found = generate_with_both(library, model, max_length=longest)
        record(*(M2M100 if family == "m2m" else MBART50), searches={search_name(search): (found, expected)})
        assert found == expected
        assert family != "m2m" or {row[0] for row in found} == {GERMAN}
    assert len(expected) == len(MORE_TEXTS)
    assert not any("<" in one.text.replace("<unk>", "") for one in model.generate(MORE_TEXTS, max_length=12))


@pytest.mark.parametrize("search", [{}, {"num_beams": 4}])
def test_mbart50_generation_equals_transformers(search, tmp_path):
    """As mBART-50 has them: before the text on either side."""
    library = make("mbart", tmp_path / "given", generation={**search, "forced_bos_token_id": ENGLISH})
    write_tokenizer(tmp_path / "given", "m2m")
    model = transduce.load(convert(tmp_path / "given", tmp_path / "run", Languages("<deu>")).folder, device="cpu")
    assert hf_ids(model, model.source.encode_sources(["w1"])[0]) == [GERMAN, 5]
    expected, found = generate_with_both(library, model, max_length=12)
    assert found == expected
    assert {row[0] for row in found} == {ENGLISH}


def converted_english_to_german(folder: Path) -> transduce.Model:
    """The model in folder/given, converted by the command."""
    languages = ("--source-language", "<eng>", "--target-language", "<deu>")
    result = CliRunner().invoke(app, ["convert", str(folder / "given"), str(folder / "run"), *languages])
    assert result.exit_code == 0, result.output
    return transduce.load(folder / "run", device="cpu")


def test_convert_command_sets_both_languages(tmp_path):
    """An older habit of the tokenizer, the code after </s>, does not matter where the family puts it first."""
    make("m2m", tmp_path / "given")
    change_template(tmp_path / "given", ["$A", "</s>", "<deu>"])
    model = converted_english_to_german(tmp_path)
    sides = [hf_ids(model, list(side.prefix)) for side in (model.source, model.target)]
    assert sides == [[ENGLISH], [GERMAN]]
    assert model.recipe.generation.forced_bos == model.target.prefix[0]
    scored = model.score([("w1", "w2 w3")])[0]
    assert len(scored.tokens) == 4  # the code, two words, </s>


def test_unknown_and_missing_languages_are_refused(tmp_path):
    folder = tmp_path / "given"
    make("m2m", folder)
    for languages, problem in (
        (None, "the language of the target is not given"),
        (Languages("<eng>", "<dau>"), "no token is the language '<dau>'"),
        (Languages("w1", "<deu>"), "no token is the language 'w1'"),
    ):
        with pytest.raises(InputError) as caught:
            convert(folder, tmp_path / "run", languages)
        assert problem in caught.value.problem
    change_template(folder, ["$A", "</s>"])
    with pytest.raises(InputError, match="the language of the source is not given"):
        convert(folder, tmp_path / "run")
    make("marian", tmp_path / "other")
    with pytest.raises(InputError, match="no language codes"):
        convert(tmp_path / "other", tmp_path / "run", Languages("<eng>", "<deu>"))


def make_mbart25(folder, **settings):
    """As mBART-25 has the codes: after the </s> of a source, and as what an output starts with."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ENDS, "mbart", 0.5)  # else all end at once
        library = make("mbart", folder, decoder_start_token_id=GERMAN, **settings)
    write_tokenizer(folder, "m2m")
    change_template(folder, ["$A", "</s>", "<eng>"])
    return library


def encode_mbart25(model, texts: list[str]) -> tuple[Padded, torch.Tensor, torch.Tensor]:
    """Native sources with the final </s>, Hugging Face ids without it."""
    rows = model.source.encode_sources(texts)
    plain = Padded.from_rows(rows)
    numbers = torch.tensor([hf_ids(model, row) for row in plain.values.tolist()])
    return Padded.from_rows([[*row, EOS] for row in rows]), numbers, plain.mask.long()


@pytest.mark.parametrize("languages", [None, Languages("<deu>", "<eng>"), Languages("<eng>", "<eng>")])
def test_mbart25_logits_equal_transformers(languages, tmp_path):
    library = make_mbart25(tmp_path / "given")
    model = transduce.load(convert(tmp_path / "given", tmp_path / "run", languages).folder, device="cpu")
    source, start = (ENGLISH, GERMAN) if languages is None else ({"<eng>": 22, "<deu>": 23}[languages.source], ENGLISH)
    native, numbers, mask = encode_mbart25(model, TEXTS)
    assert numbers[1, :3].tolist() == [13, 2, source]  # w9 </s> code
    decoder_ids = torch.tensor([[BOS, 9, 7, 5]] * len(TEXTS))
    read = torch.tensor([hf_ids(model, row) for row in decoder_ids.tolist()])
    assert read[0, 0] == start
    with torch.no_grad():
        answer = library(input_ids=numbers, attention_mask=mask, decoder_input_ids=read, output_attentions=True)
        step = model.network.advance(decoder_ids, model.network.start(Batch(native)), with_attention=True)
    known = torch.tensor(model.target.vocabulary.backend_ids)
    found, expected = step.logits.log_softmax(-1), answer.logits.log_softmax(-1)[..., known]
    record(*MBART25, logits=found - expected)
    assert_close(found, expected, rtol=1e-4, atol=1e-4)
    cross = step.attention.cross
    assert not cross[..., -1].any()
    assert_close(cross[..., :-1], torch.stack(answer.cross_attentions, 1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("search", [{}, {"num_beams": 4}, {"num_beams": 4, "early_stopping": True}])
def test_mbart25_generation_equals_transformers(search, tmp_path):
    library = make_mbart25(tmp_path / "given", generation=search)
    model = converted_english_to_german(tmp_path)
    _, numbers, mask = encode_mbart25(model, MORE_TEXTS)
    never = [[library.config.pad_token_id], [GERMAN]]  # native never says what outputs start with
    rows = library.generate(input_ids=numbers, attention_mask=mask, max_new_tokens=12, bad_words_ids=never).tolist()
    expected = [row[1 : row.index(2, 1) + 1] if 2 in row[1:] else row[1:] for row in rows]
    assert {row[0] for row in rows} == {GERMAN}
    found = [hf_ids(model, list(one.decoded.hypothesis.ids)) for one in model.generate(MORE_TEXTS, max_length=12)]
    record(*MBART25, searches={search_name(search): (found, expected)})
    assert found == expected
    assert len({len(row) for row in found}) > 2


def test_tokens_words_and_attention_of_a_source_include_the_code_after_it(tmp_path):
    make_mbart25(tmp_path / "given")
    model = transduce.load(tmp_path / "given", device="cpu")
    text = "w1 w2 w3"
    encoded, (row,) = model.source.encode_source(text), model.source.encode_sources([text])
    assert encoded.ids == row
    assert encoded.pieces == ["w1", "w2", "w3", "</s>", "<eng>"]
    assert encoded.offsets[-2:] == [(8, 8)] * 2
    described = model.source_encoding.describe(text, row, None)
    assert list(described.tokens) == ["w1", "w2", "w3", "</s>", "<eng>", "</s>"]
    assert list(described.words) == [0, 1, 2, -1, -1, -1]
    short = model.source_encoding.truncate(row, 4)
    assert short == [*row[:2], *row[-2:]]  # cut before the code, not behind it
    described = model.source_encoding.describe(text, short, None)
    assert (list(described.tokens), list(described.words)) == (
        ["w1", "w2", "</s>", "<eng>", "</s>"],
        [0, 1, -1, -1, -1],
    )
    assert token_alignment("1-0 2-1", text, "w5 w6", (model.source, model.target)) == [(1, 0), (2, 1)]
    assert len(model.score([("w1", "w2 w3")])[0].tokens) == 3  # two words and </s>, no code
    explained = model.generate(["w4 w5 w6"], max_length=5)[0].explanation
    assert list(explained.source_tokens)[3:] == ["</s>", "<eng>", "</s>"]
    assert explained.attention.shape[-1] == 6
    assert not explained.attention[..., -1].any()  # the one that is not read


def test_codes_after_the_source_without_a_language_are_refused(tmp_path):
    make("mbart", tmp_path / "plain")
    change_template(tmp_path / "plain", ["$A", "</s>", "<eng>"])  # in this vocabulary a word
    with pytest.raises(InputError, match="the language of the source is not given"):
        transduce.load(tmp_path / "plain")
    make("mbart", tmp_path / "startless")  # outputs start with </s>
    write_tokenizer(tmp_path / "startless", "m2m")
    change_template(tmp_path / "startless", ["$A", "</s>", "<eng>"])
    with pytest.raises(InputError, match="the language of the target is not given"):
        transduce.load(tmp_path / "startless")
    make("bart", tmp_path / "bart")
    change_template(tmp_path / "bart", ["$A", "</s>", "<eng>"])
    with pytest.raises(InputError, match="does not end a text"):
        transduce.load(tmp_path / "bart")
