"""Measure an allreduce: order of addition, rounding, repeatability, special values."""
