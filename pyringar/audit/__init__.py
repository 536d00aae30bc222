"""Find out by experiment what an allreduce computes."""
