"""A name in, an invented set of files out: the table of all that are written as a folder."""

from __future__ import annotations

from transduce.synthetic import moving_shapes as moving
from transduce.synthetic import shapes
from transduce.synthetic import sung_digits as tones
from transduce.synthetic import visual_questions as questions
from transduce.synthetic.files import FiledSet

FILED: dict[str, FiledSet] = {
    "shapes": FiledSet("pictures of shapes -> what stands where", shapes.draw_captions, "caption"),
    "icons": FiledSet("pictures of one shape -> what it is, to be drawn: see `pixels`", shapes.draw_icons, "draw"),
    "looks": FiledSet(
        "pictures of three shapes TAB which colour is where ? -> the answer", questions.draw_looks, "vqa"
    ),
    "scenes": FiledSet("pictures of shapes TAB which, how many, where ? -> the answer", questions.draw_scenes, "vqa"),
    "tones": FiledSet("recordings of sung digits -> the digits", tones.draw_digits, "transcribe"),
    "films": FiledSet("films of a moving shape -> what it does", moving.draw_films, "caption-videos"),
    "actions": FiledSet("films of a moving shape -> how it moves", moving.draw_actions, "classify-videos"),
}
