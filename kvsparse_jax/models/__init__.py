"""One decoder for all families: configuration, rotary embedding, parameters, forward pass."""
