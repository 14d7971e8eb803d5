"""WebDataset shards: index, manifest, reader, writer."""
