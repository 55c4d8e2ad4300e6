"""What a model made of its sources in, lines of pairs out: the data that a student is trained on (Kim & Rush 2016)."""

from __future__ import annotations

from transduce.errors import InputError


def pair_line(source: str, output: str, inputs: int, where: str) -> str:
    """`source TAB output`. A tab that would be read as the end of a column is refused: escaped, it would be learned.

    `inputs` is how many columns make a source of the teacher; the student reads them with the same `inputs`.
    """
    if source.count("\t") != inputs - 1 and source.strip():
        raise InputError(
            f"{source.count(chr(9))} tabs in a source of {inputs} columns",
            where=where,
            remedy="a tab ends a column: take it out of the text, or generate with --json",
        )
    if "\t" in output:
        raise InputError("the output holds a tab, which would end a column", where=where, remedy="generate with --json")
    return f"{source}\t{output}"
