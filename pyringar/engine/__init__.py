"""The engine: how it is compiled, cached and loaded."""
