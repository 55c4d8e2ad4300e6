"""Laws 1 to 4, for every model of the registries: whole = stepwise, causality, padding and batch, attention."""

from __future__ import annotations

import torch
from contract_fixtures import CASES, example_batch, make
from torch.testing import assert_close

from transduce.decoders.copy import PointerGeneratorDecoder
from transduce.decoders.ctc import JointCTCDecoder
from transduce.decoders.latent_alignment import EditTransducerDecoder, HardAttentionDecoder
from transduce.flow import PAD, Batch, Padded
from transduce.objectives import Objective
from transduce.recipe.build import complete_objective
from transduce.recipe.registry import factory

CLOSE = {"rtol": 1e-4, "atol": 1e-5}


def pad_more(part: Padded, extra: int, filling: int) -> Padded:
    rows = part.values.size(0)
    values = torch.cat((part.values, torch.full((rows, extra), filling)), 1)
    return Padded(values, torch.cat((part.mask, torch.zeros(rows, extra, dtype=torch.bool)), 1))


def test_whole_sequence_equals_stepwise(model, batch, reading):
    tokens, whole = batch.decoder_inputs.values, reading.whole
    state, logits, cross = reading.start, [], []
    for step in range(tokens.size(1)):
        one = model.advance(tokens[:, step : step + 1], state, with_attention=True)
        state = one.state
        logits.append(one.logits)
        cross.append(one.attention.cross)
    assert_close(torch.cat(logits, 1), whole.logits, **CLOSE)
    if whole.attention.cross is not None:
        assert_close(torch.cat(cross, 3), whole.attention.cross, **CLOSE)


def test_advance_in_pieces_equals_whole_sequence(model, batch, reading):
    tokens = batch.decoder_inputs.values
    first = model.advance(tokens[:, :2], model.start(batch))
    second = model.advance(tokens[:, 2:], first.state)
    assert_close(torch.cat((first.logits, second.logits), 1), reading.whole.logits, **CLOSE)


def test_padded_prefix_does_not_change_the_state(model):
    """Rows read prefixes of different lengths in one call, then go on together."""
    batch = example_batch([(5, 6), (3, 6), (4, 6)])
    tokens, lengths = batch.decoder_inputs.values, [3, 1, 4]
    prefix = Padded.from_rows([tokens[row, :length].tolist() for row, length in enumerate(lengths)])
    start = model.start(batch)
    whole, step = model.advance(tokens, start).logits, model.advance(prefix.values, start, prefix.mask)
    follow = torch.stack([tokens[row, length : length + 2] for row, length in enumerate(lengths)])
    logits = model.advance(follow, step.state).logits
    for row, length in enumerate(lengths):
        assert_close(step.logits[row, :length], whole[row, :length], **CLOSE)
        assert_close(logits[row], whole[row, length : length + 2], **CLOSE)


def test_logits_do_not_depend_on_later_tokens(model, batch, reading):
    """Every source is read once for each place, with another token there."""
    tokens, before = batch.decoder_inputs.values, reading.whole.logits
    places = range(1, tokens.size(1))
    changed = tokens[:, None].repeat(1, len(places), 1)  # B, place, T
    for row, place in enumerate(places):
        changed[:, row, place] = (changed[:, row, place] + 1) % 7 + 4
    after = model.advance(changed.flatten(0, 1), reading.start.repeat(len(places))).logits
    for row, place in enumerate(places):
        one = after[row :: len(places)]
        assert_close(one[:, :place], before[:, :place], **CLOSE)
        assert not torch.allclose(one[:, place], before[:, place], **CLOSE)


def test_logits_do_not_depend_on_padding(model, batch, reading):
    expected = reading.forward.logits
    for filling in (PAD, 5):
        longer = Batch(pad_more(batch.source, 3, filling) if batch.source else None, pad_more(batch.target, 2, filling))
        got = model(longer).logits
        real = batch.labels.mask
        assert_close(got[:, : expected.size(1)][real], expected[real], **CLOSE)


def test_logits_do_not_depend_on_the_batch(model, batch, reading):
    """The source that is not padded, and the one that is padded most."""
    together = reading.forward.logits
    for row in (2, 3):
        alone = batch.select(torch.tensor([row]))
        real = int(alone.labels.mask.sum())
        assert_close(model(alone).logits[0, :real], together[row, :real], **CLOSE)


def test_attention_rows_sum_to_one_and_respect_the_mask(model, batch, reading):
    step = model(batch, with_attention=True)
    assert_close(step.logits, reading.forward.logits, **CLOSE)  # asking changes nothing
    assert step.attention is not None
    cross, past = step.attention.cross, step.attention.past
    if cross is not None:
        assert cross.shape[0] == batch.size
        assert_close(cross.sum(-1), torch.ones(cross.shape[:-1]), **CLOSE)
        hidden = ~model.encoder(batch).mask[:, None, None, None].expand_as(cross)
        assert (cross[hidden] == 0).all()
    if past is not None:
        assert_close(past.sum(-1), torch.ones(past.shape[:-1]), **CLOSE)
        before = past.size(-1) - past.size(-2)  # a decoder alone has the source in its past
        future = torch.ones(past.shape[-2:], dtype=torch.bool).triu(1 + before).expand_as(past)
        assert (past[future] == 0).all()


def test_beams_share_the_fixed_state(model, batch, reading):
    """Repeated and reordered rows go on as their originals would, and the memory side is the very same tensors."""
    tokens = batch.decoder_inputs.values
    state = model.advance(tokens[:, :2], reading.start).state
    beams = state.repeat(3)
    assert beams.fixed is state.fixed
    rows = torch.tensor([source * 3 + beam for source in range(batch.size) for beam in (2, 0, 1)])
    moved = beams.reorder(rows)
    assert moved.fixed is state.fixed
    follow = tokens[:, 2:3].repeat_interleave(3, 0)
    expected = model.advance(tokens[:, 2:3], state).logits.repeat_interleave(3, 0)
    assert_close(model.advance(follow, moved).logits, expected, **CLOSE)
    kept = moved.select_sources(torch.tensor([1, 3]))
    rows = torch.tensor([3, 4, 5, 9, 10, 11])
    assert_close(model.advance(follow[rows], kept).logits, expected[rows], **CLOSE)


def test_step_hidden_is_the_input_of_the_output_layer(model, batch, reading):
    step, decoder = reading.forward, model.decoder
    inner = decoder.decoder if isinstance(decoder, (PointerGeneratorDecoder, JointCTCDecoder)) else decoder
    if not isinstance(inner, (HardAttentionDecoder, EditTransducerDecoder)):  # mixtures: see tests/oracles
        logits = inner.advance(batch.decoder_inputs.values, reading.start).logits
        assert_close(inner.output(step.hidden), logits, **CLOSE)
    cross = reading.whole.attention.cross
    assert decoder.attention_shape == ((0, 0) if cross is None else cross.shape[1:3])


def test_memory_tokens_are_the_source_tokens(model, batch):
    if (encoder := getattr(model, "encoder", None)) is not None:
        memory, readers = encoder(batch), len(getattr(encoder, "encoders", "1"))
        for tokens, real, source, mask in zip(
            memory.tokens, memory.mask, batch.source.values, batch.source.mask, strict=True
        ):
            read = source[mask].tolist()[
                : None if getattr(getattr(encoder, "embedding", None), "source_eos", True) else -1
            ]
            assert tokens[real].tolist() == readers * read


def test_every_parameter_gets_a_gradient(case, batch):
    """A part that the loss does not reach is not a part."""
    model = make(case)
    objective = factory(Objective, complete_objective(CASES[case]["training"]["objective"], case))()
    objective(model.train(), batch).total.backward()
    dead = [name for name, parameter in model.named_parameters() if parameter.grad is None]
    assert not dead
