"""Attention that keys receive: what queries' probabilities for each key come to, without a queries x keys array."""
