"""`python -m transduce`, and what torchrun starts."""

from transduce.cli import main

main()
