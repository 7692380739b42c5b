"""What enters and leaves checkpoints: owners' tensors as shards, state dicts of model and optimizer."""
