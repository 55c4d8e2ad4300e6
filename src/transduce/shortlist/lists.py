"""A file in, the lists of a shortlist out, and back; the tokens of sources in, what each may be answered with out."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from transduce.data.text import Tokenizer
from transduce.disk import replace_file
from transduce.errors import InputError
from transduce.flow import PAD, SPECIALS, Padded

FORMAT = "transduce shortlist 1"


@dataclass(frozen=True, eq=False)
class Shortlist:
    """For each source token its likeliest target tokens, and those that every line may use."""

    likeliest: Tensor  # Vs K, int32: <pad> where there are fewer
    always: Tensor  # N, int32: special tokens and frequent ones
    size: int  # V: all target tokens
    prints: tuple[str, str]  # fingerprints of both tokenizers

    def allowed(self, source: Padded) -> Tensor:
        """B V: what each line may be answered with. It follows from the line alone, whatever stands beside it."""
        lists = self.likeliest[source.values.masked_fill(~source.mask, PAD)].flatten(1).long()  # B S*K
        allowed = torch.zeros(len(source), self.size, dtype=torch.bool)
        allowed[:, self.always.long()] = True
        allowed.scatter_(1, lists, True)
        if self.prints[0] == self.prints[1]:  # one vocabulary: what stands in the source may be said as it is
            allowed.scatter_(1, source.values, True)
        return allowed

    def check(self, tokenizers: tuple[Tokenizer, Tokenizer], where: str = "shortlist") -> None:
        """It serves the vocabularies it was made for, and no others."""
        if self.prints != tuple(one.fingerprint for one in tokenizers):
            raise InputError(
                "the shortlist was made for other tokens",
                where=where,
                remedy="make one for this run: transduce shortlist RUN FILE",
            )

    def save(self, path: str | Path) -> None:
        """One safetensors file, complete or not there at all."""
        told = {"format": FORMAT, "size": str(self.size), "source": self.prints[0], "target": self.prints[1]}
        tensors = {"likeliest": self.likeliest.contiguous(), "always": self.always.contiguous()}
        replace_file(Path(path), save(tensors, told))

    @classmethod
    def load(cls, path: str | Path) -> Self:
        try:
            with safe_open(str(path), "pt") as file:
                told = file.metadata() or {}
                if told.get("format") != FORMAT:
                    raise ValueError(f"format {told.get('format')!r}, expected {FORMAT!r}")
                found = cls(
                    file.get_tensor("likeliest"),
                    file.get_tensor("always"),
                    int(told["size"]),
                    (told["source"], told["target"]),
                )
            found._check_numbers()
        except FileNotFoundError:
            raise InputError(
                "no such shortlist", where=str(path), remedy="make one: transduce shortlist RUN FILE"
            ) from None
        except (SafetensorError, OSError, ValueError, KeyError) as error:
            raise InputError(f"not a shortlist: {error}", where=str(path), remedy="make it again") from None
        return found

    def _check_numbers(self) -> None:
        for name, tensor, axes in (("likeliest", self.likeliest, 2), ("always", self.always, 1)):
            if tensor.dtype != torch.int32 or tensor.dim() != axes:
                raise ValueError(f"{name} is {tensor.dtype} with {tensor.dim()} axes")
            if tensor.numel() and not 0 <= int(tensor.min()) <= int(tensor.max()) < self.size:
                raise ValueError(f"{name} names tokens beyond the {self.size:,} of the vocabulary")
        if set(range(len(SPECIALS))) - set(self.always.tolist()):
            raise ValueError("the special tokens are missing")
