"""The data pipeline: dataset, sampler, decoding, views, loader. It imports nothing from `train`."""
