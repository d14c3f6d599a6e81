"""Serving: text generation from the command line."""
