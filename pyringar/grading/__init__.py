"""The grader: what a correct allreduce does, tried out."""
