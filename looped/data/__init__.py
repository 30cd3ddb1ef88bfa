"""Text to token rows to batches: sources, tokenizers, the packer, the TFDS data set and the Grain loader."""
