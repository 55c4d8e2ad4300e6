"""Whisper compared with the transformers library."""

from __future__ import annotations

import json
import warnings

import numpy as np
import pytest
import torch
from huggingface_fixtures import record, search_name
from whisper_fixtures import END, FIRST_TIME, PIECES, PROMPT, START, TIMES, WORDS, make_whisper, write_recordings

import transduce
from transduce import interop
from transduce.autoconfig import recipe_for
from transduce.decoding.logits_processors import TimestampRules
from transduce.errors import InputError
from transduce.flow import Batch, Padded
from transduce.interop import Languages
from transduce.interop.export import export
from transduce.interop.huggingface.exporter import write_folder
from transduce.recipe.build import complete_recipe
from transduce.run import Run

library = pytest.importorskip("transformers")


WHISPER = ("Whisper", "WhisperForConditionalGeneration")
sounds = pytest.importorskip("soundfile")


@pytest.fixture(scope="module")
def recordings(tmp_path_factory):
    return write_recordings(tmp_path_factory.mktemp("recordings"))


def features(names):
    extractor = library.WhisperFeatureExtractor(chunk_length=1)
    waveforms = [sounds.read(name, dtype="float32")[0] for name in names]
    return extractor(waveforms, sampling_rate=16_000, return_tensors="pt").input_features  # B F S


def converted(folder, run, languages="de"):
    interop.convert(folder, run, Languages(source=languages))
    return transduce.load(run, device="cpu")


def test_features_equal_those_of_the_feature_extractor(tmp_path, recordings):
    make_whisper(tmp_path / "given")
    model = converted(tmp_path / "given", tmp_path / "run")
    source = model.source_encoding.batch(model.source_encoding.encode(recordings)).source
    assert source.mask.all()
    assert torch.allclose(source.values.transpose(1, 2), features(recordings), atol=1e-4)


def test_logits_and_cross_attention_equal_transformers(tmp_path, recordings):
    hf_model = make_whisper(tmp_path / "given")
    model, given = converted(tmp_path / "given", tmp_path / "run"), features(recordings)
    rows = torch.randint(0, len(WORDS), (3, 7))
    read = torch.cat((torch.full((3, 1), START), rows), 1)
    native = {number: place for place, number in enumerate(model.target.vocabulary.backend_ids)}
    tokens = torch.tensor([[1, *(native[number] for number in row)] for row in rows.tolist()])
    mask = torch.ones(given.shape[0], given.shape[2], dtype=torch.bool)
    with torch.no_grad():
        wanted = hf_model(given, decoder_input_ids=read, output_attentions=True)
        state = model.network.start(Batch(Padded(given.transpose(1, 2), mask)))
        step = model.network.advance(tokens, state, with_attention=True)
    order = [native[number] for number in range(FIRST_TIME + 2) if number not in (END, START)]
    kept = [number for number in range(FIRST_TIME + 2) if number not in (END, START)]
    record(*WHISPER, logits=step.logits[..., order] - wanted.logits[..., kept])
    assert torch.allclose(step.logits[..., order], wanted.logits[..., kept], atol=1e-4)
    assert torch.allclose(step.attention.cross, torch.stack(wanted.cross_attentions, 1), atol=1e-5)


SEARCHES = [
    {},
    {"num_beams": 3},
    {"num_beams": 4, "early_stopping": True, "length_penalty": 0.5},
    {"num_beams": 3, "length_penalty": 2.0, "no_repeat_ngram_size": 2},
]


@pytest.mark.parametrize("task", ["transcribe", "translate"])
@pytest.mark.parametrize("number", range(len(SEARCHES)))
def test_generation_equals_transformers_token_for_token(tmp_path, recordings, number, task):
    hf_model = make_whisper(tmp_path / "given", **SEARCHES[number])
    target = "en" if task == "translate" else None
    interop.convert(tmp_path / "given", tmp_path / "run", Languages("de", target))
    model = transduce.load(tmp_path / "run", device="cpu")
    found = model.generate(recordings)
    with torch.no_grad():
        wanted = hf_model.generate(features(recordings), language="de", task=task).tolist()
    prompt = ["<|de|>", f"<|{task}|>", "<|notimestamps|>"]
    assert len({one.text for one in found}) > 1  # else equal outputs would say little
    for one, row in zip(found, wanted, strict=True):
        decoder_ids = [PIECES[token] for token in row if token not in (END, START)]
        decoder_ids = decoder_ids[len(prompt) :] if decoder_ids[: len(prompt)] == prompt else decoder_ids
        pieces = [piece for piece in one.tokens if piece != "</s>"]
        record(*WHISPER, searches={search_name(SEARCHES[number]): ([pieces], [[*prompt, *decoder_ids]])})
        assert pieces == [*prompt, *decoder_ids]
        assert one.text == " ".join(piece for piece in decoder_ids if not piece.startswith("<|"))


@pytest.mark.parametrize("number", [0, 1])
def test_the_language_of_each_recording_is_detected_as_in_transformers(tmp_path, recordings, number):
    hf_model = make_whisper(tmp_path / "given", **SEARCHES[number])
    model = transduce.load(tmp_path / "given", device="cpu")
    heard = [english_or_german(hf_model, name) for name in recordings]
    assert "<|de|>" in heard  # not what is expected without detection
    with torch.no_grad():
        rows = [hf_model.generate(features([name]), task="transcribe")[0] for name in recordings]  # it detects them too
    for one, tag, row in zip(model.generate(recordings), heard, rows, strict=True):
        prompt = [tag, "<|transcribe|>", "<|notimestamps|>"]
        assert list(one.tokens[:3]) == prompt
        decoder_ids = [PIECES[token] for token in row.tolist() if token not in (END, START)]
        decoder_ids = decoder_ids[len(prompt) :] if decoder_ids[: len(prompt)] == prompt else decoder_ids
        assert [piece for piece in one.tokens[3:] if piece != "</s>"] == decoder_ids
    assert list(model.generate(recordings[:1], prefixes=["w7"])[0].tokens[:4]) == [heard[0], *PROMPT[1:], "w7"]


def english_or_german(hf_model, name):
    with torch.no_grad():
        found = hf_model.detect_language(features([name]))
    return PIECES[int(found)]


def test_a_given_language_is_not_detected(tmp_path):
    make_whisper(tmp_path / "given")
    assert converted(tmp_path / "given", tmp_path / "run").recipe.generation.detected_first == ()
    assert interop.read(tmp_path / "given").recipe.generation.detected_first


def test_forced_decoder_ids_of_older_folders_are_the_prompt(tmp_path, recordings):
    make_whisper(tmp_path / "given")
    path = tmp_path / "given" / "generation_config.json"
    forced = [[place, PIECES.index(name)] for place, name in enumerate(PROMPT, 1)]
    path.write_text(json.dumps({**json.loads(path.read_text()), "forced_decoder_ids": forced}))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = transduce.load(tmp_path / "given", device="cpu").generate(recordings[:1])[0]
    assert list(found.tokens[:3]) == PROMPT


def test_prefix_follows_the_prompt(tmp_path, recordings):
    make_whisper(tmp_path / "given")
    model = converted(tmp_path / "given", tmp_path / "run")
    assert list(model.generate(recordings[:1], prefixes=["w7 w9"])[0].tokens[:5]) == [*PROMPT, "w7", "w9"]


def test_training_takes_features_tokens_and_prompt_from_the_imported_run(tmp_path, recordings):
    """Sources, tokens, model and prompt of the recipe are those of the imported run."""
    make_whisper(tmp_path / "given")
    interop.convert(tmp_path / "given", tmp_path / "run", Languages("de"))
    (tmp_path / "pairs.tsv").write_text("".join(f"{name}\tw10 w7\n" for name in recordings))
    chosen = recipe_for(str(tmp_path / "pairs.tsv"), [f"init.model={tmp_path / 'run'}"], "transcribe")
    begun, given = complete_recipe(chosen), complete_recipe(Run(tmp_path / "run").recipe())
    assert begun.data.sources == given.data.sources
    assert (begun.model, begun.tokens, begun.generation) == (given.model, given.tokens, given.generation)
    assert begun.training.objective["kind"] == "cross_entropy"


def test_unsupported_languages_positions_and_features_are_refused(tmp_path, recordings):
    make_whisper(tmp_path / "given")
    with pytest.raises(InputError, match="language"):
        interop.read(tmp_path / "given", Languages("fr"))
    with pytest.raises(InputError, match="into en"):
        interop.read(tmp_path / "given", Languages("en", "de"))
    from safetensors.torch import load_file, save_file

    weights = load_file(tmp_path / "given" / "model.safetensors")
    weights["model.encoder.embed_positions.weight"] += 0.5
    save_file(weights, tmp_path / "given" / "model.safetensors")
    with pytest.raises(InputError, match="no sinusoidal encoding"):
        interop.read(tmp_path / "given", Languages("de"))
    config = tmp_path / "given" / "preprocessor_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "chunk_length": 2}))
    with pytest.raises(InputError, match="frames"):
        interop.read(tmp_path / "given", Languages("de"))


@pytest.fixture(scope="module")
def long_recordings(tmp_path_factory):
    """Noise whose loudness changes, of 2.4 and 0.7 seconds: longer than a window, and shorter."""
    chance, folder, names = np.random.default_rng(4), tmp_path_factory.mktemp("long"), []
    for number, length in enumerate((38_400, 11_200)):
        loud = 0.02 + 0.1 * (np.sin(np.arange(length) / 1500) > 0)
        names.append(str(folder / f"{number}.wav"))
        sounds.write(names[-1], (chance.normal(0, 1, length) * loud).clip(-0.4, 0.4), 16_000)
    return names


def long_features(name):
    extractor = library.WhisperFeatureExtractor(chunk_length=1)
    samples = sounds.read(name, dtype="float32")[0]
    padding = "longest" if len(samples) > 16_000 else "max_length"
    options = {"truncation": False, "padding": padding, "return_tensors": "pt"}
    return extractor(samples, sampling_rate=16_000, **options).input_features


TIMED = [{}, {"num_beams": 3, "length_penalty": 0.5, "max_initial_timestamp_index": 3}]


@pytest.mark.parametrize("number", range(len(TIMED)))
def test_segments_of_long_recordings_equal_transformers(tmp_path, long_recordings, number):
    hf_model = make_whisper(tmp_path / "given", len(TIMES), max_length=24, **TIMED[number])
    model = converted(tmp_path / "given", tmp_path / "run")
    lengths = []
    for name, found in zip(long_recordings, model.generate(long_recordings, timestamps=True), strict=True):
        with torch.no_grad():
            expected = hf_model.generate(
                long_features(name), language="de", task="transcribe", return_timestamps=True, return_segments=True
            )
        segments = expected["segments"][0]
        tokens = [PIECES[token] for one in segments for token in one["tokens"].tolist()]
        assert list(found.tokens) == tokens
        times = [(round(float(one["start"]), 3), round(float(one["end"]), 3)) for one in segments]
        assert [(one.start, one.end) for one in found.segments] == times
        assert " ".join(one.text for one in found.segments if one.text) == found.text
        lengths.append(len(segments))
    assert max(lengths) > 3


def test_language_of_a_long_recording_is_detected_in_its_first_window(tmp_path, long_recordings, command):
    hf_model = make_whisper(tmp_path / "given", len(TIMES), max_length=24)
    model = transduce.load(tmp_path / "given", device="cpu")
    (found,) = model.generate(long_recordings[:1])  # no timestamps are asked for, but it is long
    with torch.no_grad():
        row = hf_model.generate(long_features(long_recordings[0]), task="transcribe", return_timestamps=True)[0]
    assert list(found.tokens) == [PIECES[token] for token in row.tolist() if token != END]
    short = model.generate(long_recordings)[1]
    assert not short.segments
    assert list(short.tokens[1:3]) == PROMPT[1:]
    with pytest.raises(InputError, match="windows"):
        model.generate(long_recordings, prefixes=["w7", "w7"])
    lines = command("generate", tmp_path / "given", long_recordings[0], "--timestamps", "--json").out.splitlines()
    assert json.loads(lines[0])["segments"] == [vars(one) for one in found.segments]
    shown = command("generate", tmp_path / "given", long_recordings[0], "--timestamps").out
    assert shown.startswith(f"[{found.segments[0].start:.2f}-{found.segments[0].end:.2f}] {found.segments[0].text}")


def test_timestamps_of_a_model_without_them_are_refused(tmp_path, recordings):
    make_whisper(tmp_path / "given", 0)
    model = transduce.load(tmp_path / "given", device="cpu")
    with pytest.raises(InputError, match="no timestamps"):
        model.generate(recordings, timestamps=True)
    assert model.generate(recordings[:1])[0].text


def test_timestamp_rules_equal_the_logits_processor_of_transformers():
    """Over random outputs of every length, with and without a limit of the first timestamp."""
    config = library.GenerationConfig(no_timestamps_token_id=13, eos_token_id=10, max_initial_timestamp_index=4)
    rng, size = torch.Generator().manual_seed(1), 30
    for case in range(60):
        config.max_initial_timestamp_index = 4 if case % 2 else None
        theirs = library.WhisperTimeStampLogitsProcessor(config, begin_index=2)
        ids = torch.randint(0, size, (5, 2 + case % 7), generator=rng)
        ids[:, 2:] = torch.where(ids[:, 2:] > 13, ids[:, 2:].sort(1).values, ids[:, 2:])
        ids[:, :2] = torch.tensor([11, 12])
        scores = torch.randn(5, size, generator=rng).log_softmax(-1)
        # Ids here: the four special ones first, </s> being 10 there.
        order = [10, *(number for number in range(size) if number != 10)]
        native = {number: place + (2 if place == 0 else 3) for place, number in enumerate(order)}
        ours = torch.full((5, size + 3), -torch.inf)
        places = torch.tensor([native[number] for number in range(size)])
        ours[:, places] = scores
        history = places[ids]
        rules = TimestampRules(
            first=native[14],
            text_end=native[9] + 1,
            none=native[13],
            after=2,
            max_initial=config.max_initial_timestamp_index,
        )
        assert torch.equal(rules.apply(ours, history)[:, places], theirs(ids, scores)), case


@pytest.mark.parametrize("language", ["de", None])
def test_import_export_import_gives_the_same_bits(tmp_path, recordings, language):
    """With a prompt, and with a language to be heard; the transformers library generates the same."""
    before = make_whisper(tmp_path / "given")
    given = None if language is None else Languages(source=language)
    interop.convert(tmp_path / "given", tmp_path / "run", given)
    export(tmp_path / "run", tmp_path / "back", "huggingface")
    first, second = interop.read(tmp_path / "given", given), interop.read(tmp_path / "back")
    assert first.recipe.model == second.recipe.model
    assert first.recipe.data.sources == second.recipe.data.sources
    for name in ("forced_prefix", "detected_first", "timestamps", "max_length"):
        assert getattr(first.recipe.generation, name) == getattr(second.recipe.generation, name)
    assert first.weights.keys() == second.weights.keys()
    assert all(torch.equal(tensor, second.weights[key]) for key, tensor in first.weights.items())
    after, report = library.WhisperForConditionalGeneration.from_pretrained(
        tmp_path / "back", local_files_only=True, output_loading_info=True
    )
    assert not any(report.values())
    asked = {"task": "transcribe", **({} if language is None else {"language": f"<|{language}|>"})}
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = before.generate(features(recordings), **asked)
        found = after.eval().generate(features(recordings))
    assert found.tolist() == expected.tolist()
    record(*WHISPER, export=True)


def test_key_biases_that_training_changed_change_no_export(tmp_path):
    """They change no softmax, and Whisper has none."""
    make_whisper(tmp_path / "given")
    model = converted(tmp_path / "given", tmp_path / "run")
    weights = {name: tensor.detach().clone() for name, tensor in model.network.state_dict().items()}
    changed = {name: tensor + 1 if name.endswith("k_proj.bias") else tensor for name, tensor in weights.items()}
    model.network.load_state_dict(changed)
    write_folder(model, tmp_path / "back", "here")
    again = interop.read(tmp_path / "back").weights
    assert all(torch.equal(again[name], tensor) for name, tensor in weights.items())
