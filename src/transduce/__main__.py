"""Entry point of `python -m transduce` and of torchrun."""

from transduce.cli import main

main()
