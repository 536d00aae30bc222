"""Training over ranks: buckets, shards, replicas."""
