"""A name in, what makes vectors of such sources out: the shelf of everything but the embedding of texts."""

from transduce.contracts import Front
from transduce.images.features import Cells
from transduce.images.fronts import Grid, Patches
from transduce.sound.fronts import Stacked, Strided
from transduce.video.fronts import Frames, Tubelets

FRONTS: dict[str, type[Front]] = {
    "patches": Patches,
    "grid": Grid,
    "cells": Cells,
    "strided": Strided,
    "stacked": Stacked,
    "frames": Frames,
    "tubelets": Tubelets,
}
