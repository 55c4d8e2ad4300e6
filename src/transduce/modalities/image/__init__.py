"""Images: files, augmentation, front ends, frozen features, image tokenizers."""
