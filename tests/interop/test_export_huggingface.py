"""What is exported loads in the transformers library: equal logits, equal outputs; and comes back the same."""

from __future__ import annotations

import pytest
import torch
from export_fixtures import TEXTS, make_run, pair, transformer
from interop_fixtures import make
from torch.testing import assert_close

import transduce
from transduce.errors import InputError
from transduce.flow import BOS, EOS, PAD, Batch, Padded
from transduce.interop import read
from transduce.interop.export import export
from transduce.interop.huggingface import t5

library = pytest.importorskip("transformers")

T5 = {
    "norm_kind": "rms",
    "bias": False,
    "score": "dot",
    "head_width": 6,
    "position": {"kind": "relative", "buckets": 8, "distance": 16},
}
BART = {"norm": "post", "embedding_norm": True, "position": {"kind": "learned", "longest": 40}, "activation": "gelu"}
OWN = {  # models of ours and the architecture that carries them
    "post-norm": (pair(norm="post"), "MarianMTModel"),
    "pre-norm": (pair(activation="silu"), "PegasusForConditionalGeneration"),
    "halves": (pair(position={"kind": "sinusoidal", "halves": True}), "PegasusForConditionalGeneration"),
    "unscaled": ({**pair(norm="post"), "scale_embedding": False}, "MarianMTModel"),
    "bart": (pair(**BART), "BartForConditionalGeneration"),
    "mbart": (pair(**{**BART, "norm": "pre"}), "MBartForConditionalGeneration"),
    "t5": (pair(**T5), "T5ForConditionalGeneration"),
    "t5 gated": (pair(**{**T5, "gated": True, "activation": "gelu_tanh"}), "T5ForConditionalGeneration"),
    "gpt2": (
        {
            "decoder": transformer(position={"kind": "learned", "longest": 80}, activation="gelu_tanh"),
            "tie": "target",
            "scale_embedding": False,
        },
        "GPT2LMHeadModel",
    ),
}


def quiet(run) -> None:
    """Without an output bias, as training leaves it where that is frozen at its start."""
    checkpoint = run.checkpoints.final()
    weights = checkpoint.weights
    weights["decoder.output.projection.bias"].zero_()
    run.checkpoints.save_final(0, weights, {})


def sources(model: transduce.Model) -> Padded:
    return Padded.from_rows([[*ids, EOS] for ids in model.source.encode_sources(TEXTS)])


@pytest.mark.parametrize(
    ("name", "kind"),
    [*((name, "words") for name in OWN), ("post-norm", "bpe"), ("post-norm", "chars"), ("gpt2", "unigram")],
)
def test_ours_there(name, kind, tmp_path):
    recipe, architecture = OWN[name]
    settings = {"strategy": "greedy", "max_length": 12}
    run = make_run(tmp_path / "run", recipe, kind=kind, generation=settings)
    if name.startswith(("t5", "gpt2")):
        quiet(run)
    export(run.folder, tmp_path / "there", "huggingface")
    model = transduce.load(run.folder, device="cpu")
    known = library.AutoModelForCausalLM if name == "gpt2" else library.AutoModelForSeq2SeqLM
    there, report = known.from_pretrained(tmp_path / "there", local_files_only=True, output_loading_info=True)
    assert type(there).__name__ == architecture
    assert all(name.endswith("embed_positions.weight") for name in report["missing_keys"])  # waves, which it computes
    assert not report["unexpected_keys"]
    tokens = library.AutoTokenizer.from_pretrained(tmp_path / "there", local_files_only=True)
    if name == "gpt2":
        return compare_language_models(model, there.eval(), tokens)
    read_there = tokens(TEXTS, padding=True, return_tensors="pt")
    padded = sources(model)
    assert torch.equal(read_there["input_ids"], padded.values)
    assert torch.equal(read_there["attention_mask"].bool(), padded.mask)
    said = torch.tensor([[BOS, 5, 9, 7]] * len(TEXTS))
    batch = {name: read_there[name] for name in ("input_ids", "attention_mask")}
    with torch.no_grad():
        wanted = model.network.advance(said, model.network.start(Batch(padded))).logits
        assert_close(there.eval()(**batch, decoder_input_ids=said).logits, wanted, rtol=1e-4, atol=1e-4)
        made = there.generate(**batch)
    assert [said_by(model, row) for row in made] == [one.text for one in model.generate(TEXTS)]
    return None


def said_by(model, row) -> str:
    """What the library found, in our words: special tokens say nothing, but <unk> does."""
    return model.target.decode([number for number in row.tolist() if number not in (PAD, BOS, EOS)])


@pytest.mark.parametrize("kind", ["bpe", "unigram", "chars", "bytes"])
def test_tokenizers_there(kind, tmp_path):
    """Texts become the same tokens and come back to the letter, spaces, marks and other scripts too."""
    run = make_run(tmp_path / "run", pair(norm="post"), kind=kind)
    export(run.folder, tmp_path / "there", "huggingface")
    ours = run.tokenizers()[0]
    theirs = library.AutoTokenizer.from_pretrained(tmp_path / "there", local_files_only=True)
    texts = [*TEXTS, "", "  w1   w2 ", "Grüße, w1!"] if kind != "chars" else [*TEXTS, " w1  w2"]
    for text in texts:
        ids = theirs(text)["input_ids"]
        assert ids == [*ours.encode(text).ids, EOS]
        assert theirs.decode(ids, skip_special_tokens=True) == text


def compare_language_models(model, there, tokens):
    for text in TEXTS:
        ids = torch.tensor([[BOS, *model.target.encode(text).ids]])
        assert tokens(text)["input_ids"] == ids[0, 1:].tolist()
        with torch.no_grad():
            wanted = model.network.advance(ids, model.network.start(Batch(target=Padded.from_rows([[BOS]])))).logits
            assert_close(there(input_ids=ids).logits, wanted, rtol=1e-4, atol=1e-4)
            made = there.generate(input_ids=ids, attention_mask=torch.ones_like(ids))
        assert said_by(model, made[0]) == model.generate([text])[0].text


def test_vectors_there(tmp_path):
    encoder = transformer(norm="post", embedding_norm=True, position={"kind": "learned", "longest": 40})
    recipe = {"encoder": encoder, "head": {"kind": "embedder", "pooling": "max"}, "scale_embedding": False}
    training = {"objective": {"kind": "contrastive"}}
    run = make_run(tmp_path / "run", recipe, training=training, evaluation={"metrics": ["recall@1"]})
    export(run.folder, tmp_path / "there", "huggingface")
    there = library.AutoModel.from_pretrained(tmp_path / "there", local_files_only=True).eval()
    tokens = library.AutoTokenizer.from_pretrained(tmp_path / "there", local_files_only=True)
    model, again = (transduce.load(folder, device="cpu") for folder in (run.folder, tmp_path / "there"))
    batch = tokens(TEXTS, padding=True, return_tensors="pt")
    with torch.no_grad():
        wanted = model.network.encoder(Batch(sources(model)))
        found = there(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).last_hidden_state
    assert_close(found[wanted.mask], wanted.values[wanted.mask], rtol=1e-4, atol=1e-5)
    assert_close(torch.tensor(again.embed(TEXTS)), torch.tensor(model.embed(TEXTS)))


FAMILIES = ["marian", "bart", "mbart", "pegasus", "t5", "gpt2", "bert"]


@pytest.mark.parametrize("family", FAMILIES)
def test_there_and_back(family, tmp_path):
    """import, export, import: the same bits, recipe and tokens; and the library finds what it had written."""
    theirs = make(family, tmp_path / "given", generation={} if family == "bert" else {"num_beams": 3})
    export(tmp_path / "given", tmp_path / "back", "huggingface")
    first, second = read(tmp_path / "given"), read(tmp_path / "back")
    assert first.recipe.model == second.recipe.model
    assert first.tokenizers[0].encode_sources(TEXTS) == second.tokenizers[0].encode_sources(TEXTS)
    assert first.weights.keys() == second.weights.keys()
    for name, tensor in first.weights.items():
        assert torch.equal(tensor, second.weights[name]), name
    again = type(theirs).from_pretrained(tmp_path / "back", local_files_only=True)
    asked = {"input_ids": torch.tensor([[5, 6, 7, 8]])}
    asked |= {} if family in ("gpt2", "bert") else {"decoder_input_ids": torch.tensor([[9, 10, 11]])}
    with torch.no_grad():
        wanted, found = theirs(**asked)[0], again.eval()(**asked)[0]
    assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_t5_with_an_odd_root():
    """The root of 24 is no float: what is divided by it still comes back the same."""
    change, back = t5.divide_by(24**0.5)
    divided = change(torch.randn(1000))[0]
    assert torch.equal(change(back([divided]))[0], divided)


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
def test_what_does_not_fit_is_named(changes, named, tmp_path):
    run = make_run(tmp_path / "run", pair(**changes))
    with pytest.raises(InputError, match=named):
        export(run.folder, tmp_path / "there", "huggingface")
    assert not (tmp_path / "there").exists()


def test_other_refusals(tmp_path):
    recurrent = {"encoder": {"kind": "recurrent", "width": 16}, "decoder": {"kind": "recurrent", "width": 16}}
    with pytest.raises(InputError, match="recurrent"):
        export(make_run(tmp_path / "a", recurrent).folder, tmp_path / "there", "huggingface")
    with pytest.raises(InputError, match="tie: none does not fit, all would"):
        export(make_run(tmp_path / "b", {**pair(), "tie": "none"}).folder, tmp_path / "there", "huggingface")
    with pytest.raises(InputError, match=r"freeze=\[decoder.output.projection.bias\]"):
        export(make_run(tmp_path / "c", pair(**T5)).folder, tmp_path / "there", "huggingface")
    with pytest.raises(InputError, match="no format"):
        export(tmp_path / "b", tmp_path / "there", "tensorflow")
    (tmp_path / "there").mkdir()
    with pytest.raises(InputError, match="already"):
        export(tmp_path / "a", tmp_path / "there", "huggingface")
