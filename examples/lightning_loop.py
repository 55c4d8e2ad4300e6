"""The network of a recipe in a LightningModule (pip install lightning).

python examples/lightning_loop.py pairs.tsv runs/lightning
"""

import sys

import lightning
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset

import transduce
from transduce.api import Built, build


class Epochs(IterableDataset):
    """The batches of a recipe, shuffled anew in every epoch."""

    def __init__(self, built: Built) -> None:
        self.built, self.epoch = built, -1

    def __iter__(self):
        self.epoch += 1
        return self.built.batches(self.epoch)


class Module(lightning.LightningModule):
    def __init__(self, built: Built) -> None:
        super().__init__()
        self.model = built.model

    def loss(self, batch: transduce.flow.Batch) -> torch.Tensor:
        labels = batch.labels
        return F.cross_entropy(self.model(batch).logits[labels.mask], labels.values[labels.mask])

    def training_step(self, batch, number):
        return self.loss(batch)

    def validation_step(self, batch, number):
        self.log("development loss", self.loss(batch), batch_size=batch.size)

    def transfer_batch_to_device(self, batch, device, dataloader):
        return batch.to(device)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


def main(data: str, folder: str, epochs: int = 3, settings: dict | None = None, **options) -> None:
    built = build(data, settings=settings)
    loader = DataLoader(Epochs(built), batch_size=None)  # the batches are made already
    held_out = DataLoader(list(built.dev_batches()), batch_size=None, collate_fn=lambda batch: batch)
    trainer = lightning.Trainer(max_epochs=epochs, logger=False, enable_checkpointing=False, **options)
    trainer.fit(Module(built), loader, held_out)
    built.save(folder)
    source = built.data.dev_examples(1)[0].source
    print(source, "->", transduce.load(folder).generate([source])[0])


if __name__ == "__main__":
    main(*sys.argv[1:])
