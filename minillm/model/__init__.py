"""The one transformer of the course: config, layers, tokenizer, sampling, checkpoints, training."""
