"""Exported models in the transformers library: equal logits and outputs, and refusals."""

from __future__ import annotations

import pytest
import torch
from export_fixtures import TEXTS, make_run, pair, transformer
from huggingface_fixtures import make
from torch.testing import assert_close

import transduce
from transduce.errors import InputError
from transduce.flow import BOS, EOS, PAD, Batch, Padded
from transduce.interop.export import export

library = pytest.importorskip("transformers")


T5 = {
    "norm_kind": "rms",
    "bias": False,
    "score": "dot",
    "head_width": 6,
    "position": {"kind": "relative", "buckets": 8, "max_distance": 16},
}


BART = {
    "norm": "post",
    "embedding_norm": True,
    "position": {"kind": "learned", "max_positions": 40},
    "activation": "gelu",
}


MODELS = {  # native models and the architecture they are exported to
    "post-norm": (pair(norm="post"), "MarianMTModel"),
    "pre-norm": (pair(activation="silu"), "PegasusForConditionalGeneration"),
    "halves": (pair(position={"kind": "sinusoidal", "halves": True}), "PegasusForConditionalGeneration"),
    "unscaled": ({**pair(norm="post"), "scale_embedding": False}, "MarianMTModel"),
    "untied": (
        {**pair(norm="post", norm_eps=0.1, position={"kind": "sinusoidal", "offset": 3}), "tie": "none"},
        "MarianMTModel",
    ),
    "other epsilon": (pair(norm_eps=0.1), "PegasusForConditionalGeneration"),
    "bart": (pair(**BART), "BartForConditionalGeneration"),
    "mbart": (pair(**{**BART, "norm": "pre"}), "MBartForConditionalGeneration"),
    "t5": (pair(**T5), "T5ForConditionalGeneration"),
    "t5 gated": (pair(**{**T5, "gated": True, "activation": "gelu_tanh"}), "T5ForConditionalGeneration"),
    "gpt2": (
        {
            "decoder": transformer(position={"kind": "learned", "max_positions": 80}, activation="gelu_tanh"),
            "tie": "target",
            "scale_embedding": False,
        },
        "GPT2LMHeadModel",
    ),
}


def zero_output_bias(run) -> None:
    """Without an output bias, as training leaves it where that is frozen at its start."""
    checkpoint = run.checkpoints.final()
    weights = checkpoint.weights
    weights["decoder.output.projection.bias"].zero_()
    run.checkpoints.save_final(0, weights, {})


def sources(model: transduce.Model) -> Padded:
    return Padded.from_rows([[*ids, EOS] for ids in model.source.encode_sources(TEXTS)])


@pytest.mark.parametrize(
    ("name", "kind"),
    [*((name, "words") for name in MODELS), ("post-norm", "bpe"), ("post-norm", "chars"), ("gpt2", "unigram")],
)
def test_exported_model_equals_native_model(name, kind, tmp_path):
    recipe, architecture = MODELS[name]
    settings = {"strategy": "greedy", "max_length": 12}
    run = make_run(tmp_path / "run", recipe, kind=kind, generation=settings)
    if name.startswith(("t5", "gpt2")):
        zero_output_bias(run)
    export(run.folder, tmp_path / "there", "huggingface")
    model = transduce.load(run.folder, device="cpu")
    known = library.AutoModelForCausalLM if name == "gpt2" else library.AutoModelForSeq2SeqLM
    there, report = known.from_pretrained(tmp_path / "there", local_files_only=True, output_loading_info=True)
    assert type(there).__name__ == architecture
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    tokens = library.AutoTokenizer.from_pretrained(tmp_path / "there", local_files_only=True)
    if name == "gpt2":
        return check_language_model(model, there.eval(), tokens)
    read_there = tokens(TEXTS, padding=True, return_tensors="pt")
    padded = sources(model)
    assert torch.equal(read_there["input_ids"], padded.values)
    assert torch.equal(read_there["attention_mask"].bool(), padded.mask)
    decoder_ids = torch.tensor([[BOS, 5, 9, 7]] * len(TEXTS))
    batch = {name: read_there[name] for name in ("input_ids", "attention_mask")}
    with torch.no_grad():
        expected = model.network.advance(decoder_ids, model.network.start(Batch(padded))).logits
        assert_close(there.eval()(**batch, decoder_input_ids=decoder_ids).logits, expected, rtol=1e-4, atol=1e-4)
        made = there.generate(**batch)
    assert [decode_without_specials(model, row) for row in made] == [one.text for one in model.generate(TEXTS)]
    return None


def decode_without_specials(model, row) -> str:
    """What the library found, in our words: special tokens say nothing, but <unk> does."""
    return model.target.decode([number for number in row.tolist() if number not in (PAD, BOS, EOS)])


@pytest.mark.parametrize("kind", ["bpe", "unigram", "chars", "bytes"])
def test_exported_tokenizer_encodes_and_decodes_alike(kind, tmp_path):
    """Texts become the same tokens and come back to the letter, spaces, marks and other scripts too."""
    run = make_run(tmp_path / "run", pair(norm="post"), kind=kind)
    export(run.folder, tmp_path / "there", "huggingface")
    native = run.tokenizers()[0]
    hf_tokenizer = library.AutoTokenizer.from_pretrained(tmp_path / "there", local_files_only=True)
    texts = [*TEXTS, "", "  w1   w2 ", "Grüße, w1!"] if kind != "chars" else [*TEXTS, " w1  w2"]
    for text in texts:
        ids = hf_tokenizer(text)["input_ids"]
        assert ids == [*native.encode(text).ids, EOS]
        assert hf_tokenizer.decode(ids, skip_special_tokens=True) == text


def check_language_model(model, there, tokens):
    for text in TEXTS:
        ids = torch.tensor([[BOS, *model.target.encode(text).ids]])
        assert tokens(text)["input_ids"] == ids[0, 1:].tolist()
        with torch.no_grad():
            expected = model.network.advance(ids, model.network.start(Batch(target=Padded.from_rows([[BOS]])))).logits
            assert_close(there(input_ids=ids).logits, expected, rtol=1e-4, atol=1e-4)
            made = there.generate(input_ids=ids, attention_mask=torch.ones_like(ids))
        assert decode_without_specials(model, made[0]) == model.generate([text])[0].text


def test_exported_embedder_equals_native_embedder(tmp_path):
    encoder = transformer(norm="post", embedding_norm=True, position={"kind": "learned", "max_positions": 40})
    recipe = {"encoder": encoder, "head": {"kind": "embedder", "pooling": "max"}, "scale_embedding": False}
    training = {"objective": {"kind": "contrastive"}}
    run = make_run(tmp_path / "run", recipe, training=training, evaluation={"metrics": ["recall@1"]})
    export(run.folder, tmp_path / "there", "huggingface")
    there = library.AutoModel.from_pretrained(tmp_path / "there", local_files_only=True).eval()
    tokens = library.AutoTokenizer.from_pretrained(tmp_path / "there", local_files_only=True)
    model, again = (transduce.load(folder, device="cpu") for folder in (run.folder, tmp_path / "there"))
    batch = tokens(TEXTS, padding=True, return_tensors="pt")
    with torch.no_grad():
        expected = model.network.encoder(Batch(sources(model)))
        found = there(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).last_hidden_state
    assert_close(found[expected.mask], expected.values[expected.mask], rtol=1e-4, atol=1e-5)
    assert_close(torch.tensor(again.embed(TEXTS)), torch.tensor(model.embed(TEXTS)))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"position": "rotary"}, "position"),
        ({"token_mixer": "ssru"}, "token_mixer"),
        ({"window": 3}, "window"),
        ({"kv_heads": 2}, "kv_heads"),
        ({"normaliser": "sparsemax"}, "normaliser"),
        ({"gated": True}, "gated"),
    ],
)
def test_unsupported_option_is_named(changes, named, tmp_path):
    run = make_run(tmp_path / "run", pair(**changes))
    with pytest.raises(InputError, match=named):
        export(run.folder, tmp_path / "there", "huggingface")
    assert not (tmp_path / "there").exists()


def test_unsupported_models_formats_and_paths_are_refused(tmp_path):
    recurrent = {"encoder": {"kind": "recurrent", "width": 16}, "decoder": {"kind": "recurrent", "width": 16}}
    with pytest.raises(InputError, match="recurrent"):
        export(make_run(tmp_path / "a", recurrent).folder, tmp_path / "there", "huggingface")
    with pytest.raises(InputError, match="tie: none does not fit, all would"):
        export(make_run(tmp_path / "b", {**pair(**BART), "tie": "none"}).folder, tmp_path / "there", "huggingface")
    with pytest.raises(InputError, match=r"freeze=\[decoder.output.projection.bias\]"):
        export(make_run(tmp_path / "c", pair(**T5)).folder, tmp_path / "there", "huggingface")
    with pytest.raises(InputError, match="no format"):
        export(tmp_path / "b", tmp_path / "there", "tensorflow")
    (tmp_path / "there").mkdir()
    with pytest.raises(InputError, match="already"):
        export(tmp_path / "a", tmp_path / "there", "huggingface")


@pytest.mark.parametrize("family", ["marian", "pegasus", "bart", "t5", "gpt2"])
def test_export_has_a_card_and_no_missing_weights(family, tmp_path):
    library = make(family, tmp_path / "given", generation={"num_beams": 3})
    export(tmp_path / "given", tmp_path / "back", "huggingface")
    again, report = type(library).from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not any(report.values()), report
    card = (tmp_path / "back" / "README.md").read_text()
    assert "same search" in card
    assert f"{transduce.load(tmp_path / 'given', device='cpu').parameters:,}" in card
    given = {"input_ids": torch.tensor([[5, 6, 7, 8]])}
    given |= {} if family == "gpt2" else {"decoder_input_ids": torch.tensor([[9, 10, 11]])}
    with torch.no_grad():
        assert_close(again.eval()(**given)[0], library(**given)[0], rtol=1e-4, atol=1e-4)
