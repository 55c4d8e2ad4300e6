"""A training loop in plain PyTorch: the network of a recipe is an nn.Module.

python examples/pytorch_loop.py pairs.tsv runs/loop
"""

import sys

import torch
from torch.nn import functional as F

import transduce
from transduce.api import build


def main(data: str, folder: str, epochs: int = 3, settings: dict | None = None) -> None:
    built = build(data, settings=settings)
    optimiser = torch.optim.AdamW(built.model.parameters(), lr=2e-3)
    for epoch in range(epochs):
        built.model.train()
        for batch in built.batches(epoch):
            labels = batch.labels
            logits = built.model(batch).logits  # B T V
            loss = F.cross_entropy(logits[labels.mask], labels.values[labels.mask])
            optimiser.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(built.model.parameters(), 1.0)
            optimiser.step()
        print(f"epoch {epoch}: loss {loss.item():.3f}")
    built.save(folder)  # a run directory: `transduce generate`, `evaluate`, `explain` and `export` read it
    source = built.data.dev_examples(1)[0].source
    print(source, "->", transduce.load(folder).generate([source])[0])


if __name__ == "__main__":
    main(*sys.argv[1:])
