"""The grader: tests whether a function is a correct allreduce."""
