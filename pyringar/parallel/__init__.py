"""Data parallel training: gradient buckets, shards of a batch, replicas of a module."""
