"""Communicators: of ranks in one process, in processes, and what they share."""
