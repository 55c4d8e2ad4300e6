"""Export to CTranslate2 and import from it: equal log-probabilities, outputs and weights."""

from __future__ import annotations

import pytest
import torch
from export_fixtures import TEXTS, make_run, pair, transformer
from huggingface_fixtures import make

import transduce
from transduce.errors import InputError
from transduce.flow import BOS, EOS, PAD, SPECIALS, Batch, Padded
from transduce.interop.ctranslate2 import piece_names, specification
from transduce.interop.export import export

library = pytest.importorskip("ctranslate2")


PAIRS = {
    "pre-norm": pair(),
    "post-norm, untied": {**pair(norm="post", activation="gelu"), "tie": "none"},
    "unscaled": {**pair(activation="gelu_tanh"), "scale_embedding": False},
    "learned": pair(position={"kind": "learned", "max_positions": 64}, embedding_norm=True, activation="silu"),
    "no position": pair(position="none"),
    "relative": pair(position={"kind": "relative", "buckets": 8, "max_distance": 16}),
    "rotary": pair(position="rotary"),
    "rotary-part": pair(position={"kind": "rotary", "base": 500.0, "share": 0.5}),
    "t5": pair(
        position={"kind": "relative", "buckets": 8, "max_distance": 16},
        norm_kind="rms", bias=False, score="dot", head_width=6, gated=True, activation="gelu_tanh",
    ),
    "fewer key heads": pair(kv_heads=2),
    "no bias": pair(bias=False),
    "norm_eps": pair(norm_eps=1e-2),
    "different depths": {
        "encoder": transformer(layers=3, ff_width=32), "decoder": transformer(layers=1, activation="gelu"),
        "tie": "all",
    },
}  # fmt: skip


def translate(folder, model: transduce.Model, texts: list[str], **options) -> list[str]:
    names = piece_names(model.target)
    numbers = {name: number for number, name in enumerate(names)}
    translator = library.Translator(str(folder), compute_type=options.pop("compute_type", "float32"), intra_threads=1)
    sources = [[piece_names(model.source)[one] for one in ids] for ids in model.source.encode_sources(texts)]
    found = translator.translate_batch(sources, max_decoding_length=12, min_decoding_length=0, **options)
    return [model.target.decode([numbers[name] for name in one.hypotheses[0]]) for one in found]


def compare_scores(folder, model: transduce.Model) -> None:
    """The log-probability of every token of given outputs."""
    names = piece_names(model.target)
    outputs = [model.target.encode(text).ids for text in reversed(TEXTS)]
    sources = [[piece_names(model.source)[one] for one in ids] for ids in model.source.encode_sources(TEXTS)]
    translator = library.Translator(str(folder), compute_type="float32", intra_threads=1)
    found = translator.score_batch(sources, [[names[one] for one in ids] for ids in outputs])
    rows = Padded.from_rows([[*ids, EOS] for ids in model.source.encode_sources(TEXTS)])
    target = Padded.from_rows([[BOS, *ids, EOS] for ids in outputs])
    with torch.no_grad():
        logits = model.network(Batch(rows, target)).logits
    logits[..., [PAD, BOS]] = -torch.inf
    expected = logits.log_softmax(-1).gather(-1, target.values[:, 1:, None]).squeeze(-1)
    for scored, row, real in zip(found, expected, target.mask[:, 1:], strict=True):
        torch.testing.assert_close(torch.tensor(scored.log_probs), row[real], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", PAIRS)
def test_scores_and_outputs_equal_the_native_model(name, tmp_path):
    run = make_run(tmp_path / "run", PAIRS[name], seed=5)
    export(run.folder, tmp_path / "there", "ctranslate2")
    model = transduce.load(run.folder, device="cpu")
    compare_scores(tmp_path / "there", model)
    greedy = [one.text for one in model.generate(TEXTS, strategy="greedy")]
    assert translate(tmp_path / "there", model, TEXTS, beam_size=1) == greedy
    settings = {"strategy": "huggingface_beam", "beam": 4, "stop": "full"}
    assert translate(tmp_path / "there", model, TEXTS, beam_size=4) == [
        one.text for one in model.generate(TEXTS, **settings)
    ]


@pytest.mark.parametrize("family", ["marian", "bart", "pegasus", "t5"])
def test_imported_models_are_exported(family, tmp_path):
    make(family, tmp_path / "given", generation={"max_length": 13})
    export(tmp_path / "given", tmp_path / "there", "ctranslate2")
    model = transduce.load(tmp_path / "given", device="cpu")
    greedy = [one.text for one in model.generate(TEXTS, strategy="greedy", max_length=12, forced_eos=False)]
    assert translate(tmp_path / "there", model, TEXTS, beam_size=1) == greedy


def test_language_model_is_exported(tmp_path):
    decoder = transformer(position={"kind": "learned", "max_positions": 80})
    run = make_run(tmp_path / "run", {"decoder": decoder, "tie": "target"})
    export(run.folder, tmp_path / "there", "ctranslate2")
    model = transduce.load(run.folder, device="cpu")
    names = piece_names(model.target)
    numbers = {name: number for number, name in enumerate(names)}
    generator = library.Generator(str(tmp_path / "there"), compute_type="float32", intra_threads=1)
    begun = [[SPECIALS[BOS], *(names[one] for one in model.target.encode(text).ids)] for text in TEXTS]
    found = generator.generate_batch(begun, max_length=12, min_length=0, beam_size=1, include_prompt_in_result=False)
    added = [[numbers[name] for name in one.sequences[0]] for one in found]
    texts = [
        model.target.decode([*model.target.encode(text).ids, *more]) for text, more in zip(TEXTS, added, strict=True)
    ]
    assert texts == [one.text for one in model.generate(TEXTS, strategy="greedy")]


def test_int8_export_is_smaller_and_close(tmp_path):
    run = make_run(tmp_path / "run", {**pair(norm="post", width=64, ff_width=128)})
    for precision in ("fp32", "int8"):
        export(run.folder, tmp_path / precision, "ctranslate2", precision=precision)
    sizes = [(tmp_path / precision / "model.bin").stat().st_size for precision in ("int8", "fp32")]
    assert sizes[0] < 0.6 * sizes[1]
    model = transduce.load(run.folder, device="cpu")
    outputs = [[piece_names(model.target)[one] for one in model.target.encode(text).ids] for text in reversed(TEXTS)]
    sources = [[piece_names(model.source)[one] for one in ids] for ids in model.source.encode_sources(TEXTS)]
    scores = []
    for precision in ("float32", "int8"):
        folder = tmp_path / precision.replace("float32", "fp32")
        translator = library.Translator(str(folder), compute_type=precision, intra_threads=1)
        found = translator.score_batch(sources, outputs)
        scores.append(torch.tensor([score for one in found for score in one.log_probs]))
    # Without VNNI the library's int8 sums saturate: with random weights the scores are close only by rank.
    assert torch.corrcoef(torch.stack(scores))[0, 1] > 0.9


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"token_mixer": "ssru"}, "decoder.token_mixer|encoder.token_mixer"),
        ({"window": 3}, "window"),
        ({"position": "alibi"}, "position"),
        ({"position": {"kind": "sinusoidal", "join": "concatenate"}}, "position"),
        ({"normaliser": "sparsemax"}, "normaliser"),
        ({"norm_kind": "batch"}, "norm_kind"),
    ],
)
def test_unsupported_option_is_named(changes, named, tmp_path):
    run = make_run(tmp_path / "run", pair(**changes))
    with pytest.raises(InputError, match=named):
        export(run.folder, tmp_path / "there", "ctranslate2")
    assert not (tmp_path / "there").exists()


IMAGE = {"front": {"kind": "patches", "patch_size": 4}}, {"picture": {"kind": "image", "size": 8, "channels": 1}}
SOUND = {"front": {"kind": "conv_subsampling", "strides": (2,)}}, {"sound": {"kind": "audio_features", "size": 6}}


@pytest.mark.parametrize(
    ("changes", "sources", "model", "named"),
    [
        (*IMAGE, {}, "encoder.front"),
        (*SOUND, {}, "encoder.front"),
        ({"causal": True}, {}, {}, "encoder.causal"),
        ({}, {}, {"ctc": {}}, "ctc"),
    ],
    ids=["images", "sound", "causal", "ctc"],
)
def test_unsupported_encoder_is_named(changes, sources, model, named, tmp_path):
    parts = {"encoder": transformer(layers=1, **changes), "decoder": transformer(layers=1), **model}
    sections = {"data": {"format": "pairs", "max_length": 20, "sources": sources}}
    sections |= {"training": {"objective": {"kind": "joint_ctc"}}} if model else {}
    run = make_run(tmp_path / "run", parts, **sections)
    with pytest.raises(InputError, match=named):
        export(run.folder, tmp_path / "there", "ctranslate2")


PRECISIONS = {"fp32": 0.0, "fp16": 2e-3, "bf16": 2e-2, "int16": 5e-3, "int8": 2e-2}  # errors of weights that are shown


@pytest.mark.parametrize("name", PAIRS)
def test_exported_model_is_imported_with_the_same_bits(name, tmp_path):
    run = make_run(tmp_path / "run", PAIRS[name], seed=5)
    export(run.folder, tmp_path / "there", "ctranslate2")
    first, second = transduce.load(run.folder, device="cpu"), transduce.load(tmp_path / "there", device="cpu")
    expected, found = first.network.state_dict(), second.network.state_dict()
    for key, tensor in expected.items():
        if not key.endswith("output.projection.bias"):  # <pad> and <s> are excluded by it
            assert torch.equal(found[key], tensor), key
    assert all(not found[key].any() for key in found.keys() - expected.keys())
    outputs = [one.text for one in first.generate(TEXTS, strategy="greedy", max_length=12)]
    assert [one.text for one in second.generate(TEXTS, strategy="greedy", max_length=12)] == outputs


@pytest.mark.parametrize("precision", PRECISIONS)
def test_quantised_weights_become_fp32(precision, tmp_path):
    run = make_run(tmp_path / "run", PAIRS["pre-norm"], seed=5)
    export(run.folder, tmp_path / "there", "ctranslate2", precision=precision)
    expected = transduce.load(run.folder, device="cpu").network.state_dict()
    found = transduce.load(tmp_path / "there", device="cpu").network.state_dict()
    for key, tensor in expected.items():
        if not key.endswith("output.projection.bias"):
            assert (found[key] - tensor).abs().max() <= PRECISIONS[precision] * tensor.abs().max(), key


VARIANTS = {
    "OpenNMT": {},
    "Marian": {"start_from_zero_embedding": True, "add_source_eos": True, "decoder_start_token": "</s>"},
    "no table": {"add_source_eos": True, "no_table": True},
}


def foreign_model(folder, *, add_source_eos=False, decoder_start_token="<s>", no_table=False, **options):
    """A folder as converters of the library write it: its own vocabularies, of different sizes on the two sides."""
    run = make_run(folder / "run", {**pair(norm="post", activation="gelu"), "tie": "none"}, seed=5)
    model = transduce.load(run.folder, device="cpu")
    words = [f"x{number}" for number in range(model.source.size - 4)]
    vocabulary = ["<unk>", "<s>", "</s>", *words, "<blank>"]
    spec = specification(model.network, model.recipe.model, vocabulary, vocabulary, str(folder))
    spec.config.decoder_start_token, spec.config.add_source_eos = decoder_start_token, add_source_eos
    bias = spec.decoder.projection.bias.clone()
    bias[bias < -50] = -3.0
    spec.decoder.projection.bias = bias
    spec.decoder.start_from_zero_embedding = options.get("start_from_zero_embedding", False)
    if no_table:
        for side in (spec.encoder, spec.decoder):
            side.position_encodings.encodings = "__optional"
    (folder / "made").mkdir()
    spec.validate()
    spec.optimize()
    spec.save(str(folder / "made"))
    return folder / "made", words


@pytest.mark.parametrize("variant", VARIANTS)
def test_foreign_model_equals_the_library(variant, tmp_path):
    folder, words = foreign_model(tmp_path, **VARIANTS[variant])
    sources = [words[1:8], words[9:10], [words[3], words[3], words[12]], words[20:5:-2]]
    translator = library.Translator(str(folder), compute_type="float32", intra_threads=1)
    model = transduce.load(folder, device="cpu")
    for beam, settings in ((1, {"strategy": "greedy"}), (4, {"strategy": "huggingface_beam", "beam": 4})):
        found = translator.translate_batch(
            sources, beam_size=beam, max_decoding_length=12, suppress_sequences=[["<s>"], ["<blank>"], ["<unk>"]]
        )
        settings |= {"suppress": [3], "max_length": 12, "stop": "full"}
        texts = [one.text for one in model.generate([" ".join(one) for one in sources], **settings)]
        assert texts == [" ".join(one.hypotheses[0]) for one in found]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda data: data[:2000], "ends before"),
        (lambda data: b"\x63" + data[1:], "version 99"),
        (lambda data: data.replace(b"TransformerSpec", b"TransformerSpex"), "TransformerSpex"),
        (lambda data: data[:8], "too short"),
        (lambda data: data.replace(b"decoder/projection/weight\0", b"decoder/projection/weighd\0"), "is missing"),
    ],
)
def test_damaged_file_is_refused(change, problem, tmp_path):
    folder, _ = foreign_model(tmp_path)
    path = folder / "model.bin"
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(InputError, match=problem):
        transduce.load(folder)
