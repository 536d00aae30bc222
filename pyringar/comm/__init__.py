"""Communicators for ranks in one process or in several."""
