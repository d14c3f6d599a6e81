"""Attention over a paged cache whose heads differ in length."""
