"""What owners hold as checkpoints have it: tensors as shards, groups and state of the optimizer, views."""
