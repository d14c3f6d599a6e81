"""Attention shapes of released models, for tests, benchmarks and tuning to share."""

from typing import NamedTuple


class ModelShape(NamedTuple):
    """What attention sees of a model (its config.json).

    Attributes:
        heads: query heads.
        kv_heads: key/value heads.
        head_dim: channels of a head.
        layers: decoder layers.
        hidden: width of the residual stream.
    """

    heads: int
    kv_heads: int
    head_dim: int
    layers: int
    hidden: int

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.heads // self.kv_heads


MODELS: dict[str, ModelShape] = {
    "qwen3-8b": ModelShape(32, 8, 128, 36, 4096),
    "qwen3-32b": ModelShape(64, 8, 128, 64, 5120),
    "llama-3.2-1b": ModelShape(32, 8, 64, 16, 2048),
    "llama-3.1-8b": ModelShape(32, 8, 128, 32, 4096),
    "r1-distill-1.5b": ModelShape(12, 2, 128, 28, 1536),
    "r1-distill-7b": ModelShape(28, 4, 128, 28, 3584),
    "r1-distill-32b": ModelShape(40, 8, 128, 64, 5120),
    "smollm2-135m": ModelShape(9, 3, 64, 30, 576),
    "smollm2-360m": ModelShape(15, 5, 64, 32, 960),
    "smollm2-1.7b": ModelShape(32, 32, 64, 24, 2048),
}
"""By name: the models that the papers and this project retrofit (R1-distill: DeepSeek's distillations of Qwen2.5)."""

OTHER_DIMS: dict[str, ModelShape] = {
    "phi-3-mini": ModelShape(32, 32, 96, 32, 3072),
    "deepseek-v3-keys": ModelShape(128, 128, 192, 61, 7168),
    "gemma-3-12b": ModelShape(16, 8, 256, 48, 3840),
}
"""Models with the remaining head dimensions that the kernels serve: 96, 192, 256."""

LATENT = ModelShape(128, 1, 576, 61, 7168)
"""DeepSeek-V3 with latent attention in the absorbed form: an entry of 512 + 64 channels is key and value."""
