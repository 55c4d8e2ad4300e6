"""Log-mel spectrograms against kaldi-native-fbank and Whisper's extractor; augmentation and visualisation."""

from __future__ import annotations

import kaldi_native_fbank as knf
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as trials
from hypothesis import strategies as st

from transduce.modalities.audio import Audio, AudioFeatures
from transduce.modalities.audio_files import LogMelSpectrogram


def noise(samples: int, seed: int = 1) -> np.ndarray:
    """A sweep in noise, 16 bits."""
    place = np.arange(samples) / 16000
    sweep = np.sin(2 * np.pi * (200 + 900 * place) * place)
    return (6000 * sweep + 800 * np.random.default_rng(seed).normal(size=samples)).astype(np.int16)


@pytest.mark.parametrize(
    ("rate", "bands", "window", "hop"), [(16000, 80, 25, 10), (8000, 40, 25, 10), (16000, 23, 32, 8)]
)
def test_kaldi_scale_agrees_with_kaldi(rate: int, bands: int, window: float, hop: float) -> None:
    samples = noise(9000)
    options = knf.FbankOptions()
    options.frame_opts.samp_freq, options.frame_opts.dither = rate, 0
    options.frame_opts.frame_length_ms, options.frame_opts.frame_shift_ms = window, hop
    options.mel_opts.num_bins = bands
    kaldi = knf.OnlineFbank(options)
    kaldi.accept_waveform(rate, samples.astype(np.float32).tolist())
    kaldi.input_finished()
    wanted = np.stack([kaldi.get_frame(number) for number in range(kaldi.num_frames_ready)])
    spectrum = LogMelSpectrogram(rate, bands, window, hop, "kaldi")
    found = spectrum([torch.tensor(samples)])[0].numpy()
    assert found.shape == wanted.shape == (spectrum.frames(len(samples)), bands)
    np.testing.assert_allclose(found, wanted, atol=2e-3)


def test_whisper_scale_agrees_with_whisper() -> None:
    transformers = pytest.importorskip("transformers")
    samples = noise(16000 * 2)
    extractor = transformers.WhisperFeatureExtractor()
    wanted = extractor(samples / 32768, sampling_rate=16000, return_tensors="np").input_features[0].T
    part = Audio(scale="whisper", pad_to_max=True, normalise=False)
    found = part.collate([samples]).values[0].numpy()
    assert found.shape == wanted.shape == (3000, 80)
    np.testing.assert_allclose(found, wanted, atol=1e-3)


@trials(deadline=None, max_examples=20)
@given(st.integers(400, 4000), st.integers(400, 4000), st.sampled_from(["kaldi", "whisper"]))
def test_length_agrees_with_the_batch_and_rows_are_independent(one: int, other: int, scale: str) -> None:
    part = Audio(scale=scale, mels=20)
    kept = [noise(one), noise(other, 2)]
    both = part.collate(kept)
    assert both.mask.sum(1).tolist() == [part.length(row) for row in kept]
    alone = part.collate(kept[1:])
    torch.testing.assert_close(both.values[1][both.mask[1]], alone.values[0])


@pytest.mark.parametrize("scale", ["kaldi", "whisper"])
def test_augmentation_of_a_recording_does_not_depend_on_its_batch(scale: str) -> None:
    part = Audio(scale=scale, mels=20, speed=0.1, time_masks=2, frequency_masks=1)
    kept = [noise(length, length) for length in (1600, 9000, 4000, 5000, 4000, 7000)]
    together = part.collate(kept, [np.random.default_rng(seed) for seed in range(6)])
    for number, one in enumerate(kept):
        alone = part.collate([one], [np.random.default_rng(number)])
        assert together.mask[number].sum() == alone.values.size(1)
        torch.testing.assert_close(
            together.values[number, : alone.values.size(1)], alone.values[0], atol=1e-4, rtol=1e-4
        )
        assert not together.values[number, alone.values.size(1) :].any()


def test_augmentation_applies_only_in_training_and_is_deterministic() -> None:
    part = Audio(speed=0.1, time_masks=2, frequency_masks=2, mels=20)
    kept = [noise(16000)]
    plain = part.collate(kept)
    torch.testing.assert_close(part.collate(kept).values, plain.values)
    changed = [part.collate(kept, [np.random.default_rng(seed)]).values for seed in (1, 1, 2, 3, 4, 5, 6, 7)]
    torch.testing.assert_close(changed[0], changed[1])
    lengths = {one.size(1) for one in changed}
    assert len(lengths) > 2
    assert min(lengths) >= 0.9 * plain.values.size(1) - 2
    assert max(lengths) <= 1.12 * plain.values.size(1) + 2


@trials(deadline=None, max_examples=40)
@given(st.integers(1, 60), st.integers(0, 3), st.integers(0, 3), st.integers(0, 999))
def test_specaugment_masks_complete_frames_and_bands_within_limits(
    length: int, time: int, bands: int, seed: int
) -> None:
    part = AudioFeatures(
        size=8, normalise=False, time_masks=time, time_width=5, frequency_masks=bands, frequency_width=2
    )
    kept = np.random.default_rng(seed).normal(size=(length, 8)).astype(np.float32)
    found = part.collate([kept], [np.random.default_rng(seed)]).values[0].numpy()
    hidden = found != kept
    whole = hidden.all(1)[:, None] | hidden.all(0)
    assert (hidden == whole).all()
    assert hidden.all(1).sum() <= time * min(5, length // 5) or bands * 2 >= 8
    assert (hidden.all(0).sum() <= bands * 2) or length <= 5 * time


def test_normalisation_is_per_utterance() -> None:
    kept = (5 + 3 * np.random.default_rng(1).normal(size=(50, 4))).astype(np.float32)
    values = AudioFeatures(size=4).collate([kept]).values[0]
    torch.testing.assert_close(values.mean(0), torch.zeros(4), atol=1e-5, rtol=0)
    torch.testing.assert_close(values.std(0, correction=0), torch.ones(4))
    torch.testing.assert_close(AudioFeatures(size=4).collate([2 * kept + 1]).values[0], values, atol=1e-4, rtol=0)


def test_visualisation_has_low_frequencies_at_the_bottom() -> None:
    part = Audio(rate=16000, mels=30)
    place = np.arange(16000) / 16000
    samples = np.where(place < 0.5, np.sin(2 * np.pi * 300 * place), np.sin(2 * np.pi * 5000 * place))
    kept = (20000 * samples).astype(np.int16)
    scene = part.visualise(kept, (25,))
    assert scene.pixels.shape == (30, part.length(kept), 3)
    assert scene.grid == (1, 25)
    assert scene.across == "seconds"
    assert scene.extent == pytest.approx(0.98)
    first, second = scene.pixels[:, :40, 0].mean(1), scene.pixels[:, 60:, 0].mean(1)
    assert first.argmin() > 20  # dark is loud: the low tone lies at the bottom
    assert second.argmin() < 10
    assert part.position_labels(kept, (25,))[0] == "0.00s"
    assert len(part.position_labels(kept, (25,))) == 25
