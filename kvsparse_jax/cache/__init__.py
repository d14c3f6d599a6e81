"""KV caches: paged per (layer, sequence, KV head) and compressed, and dense, behind one interface."""
