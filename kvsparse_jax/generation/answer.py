"""What a generation hands back, and how a row's answer is put together on the host."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from kvsparse_jax.cache.report import CacheReport
from kvsparse_jax.tokenizer import Tokenizer

FinishReason = Literal["stop", "length", "context"]
"""A stop token or string; max_new_tokens; the model's context is full."""


@dataclass(frozen=True)
class GenerateOutput:
    """What :func:`generate` and :meth:`Session.generate` give, one entry per row.

    Attributes:
        tokens: generated token ids, without the stop token.
        text: their text, cut before a stop string; None without a tokenizer.
        finish_reason: "stop" (stop token or string), "length" (max_new_tokens) or "context" (no room in the context).
        cache: the cache at the end.
    """

    tokens: list[list[int]]
    text: list[str] | None
    finish_reason: list[FinishReason]
    cache: CacheReport


@dataclass(frozen=True)
class Piece:
    """What :meth:`Session.stream` yields.

    Attributes:
        row: which row it belongs to.
        token: the new token; None when the row only ends.
        text: text that became certain, often empty: incomplete characters and what may become a stop string are held
            back.
        finish_reason: not None in a row's last piece.
    """

    row: int
    token: int | None
    text: str
    finish_reason: FinishReason | None = None


class Answer:
    """Collects a row's tokens and text, and sees the stop strings in it."""

    def __init__(self, tokenizer: Tokenizer | None, strings: Sequence[str], limit: int, at_limit: FinishReason):
        self.tokens: list[int] = []
        self.text = ""
        self.reason: FinishReason | None = None
        self._decoder = None if tokenizer is None else tokenizer.stream_decoder()
        self._held = ""  # may turn out to be the start of a stop string
        self._strings = strings
        self.at_limit = at_limit
        self._limit = limit

    @property
    def left(self) -> int:
        """Tokens that may still come."""
        return 0 if self.reason is not None else self._limit - len(self.tokens)

    def push(self, token: int) -> str:
        """Takes a token; gives the text that became certain, and sets ``reason`` when it was the last."""
        self.tokens.append(token)
        new = "" if self._decoder is None else self._decoder.push(token)
        return self.end(self.at_limit, new) if len(self.tokens) >= self._limit else self._give(new)

    def end(self, reason: FinishReason, new: str = "") -> str:
        """Ends the answer; gives the text that was held back."""
        text = self._give(new + ("" if self._decoder is None else self._decoder.finish()))
        if self.reason is None:  # else a stop string was complete at the last moment
            self.reason = reason
            text += self._held
            self.text += self._held
        self._held = ""
        return text

    def _give(self, new: str) -> str:
        text = self._held + new
        found = [at for at in (text.find(string) for string in self._strings) if at >= 0]
        if found:
            text, self._held, self.reason = text[: min(found)], "", "stop"
        else:
            # What is held back is the longest end of the text that begins a stop string, so no match can start earlier.
            longest = min(len(text), max((len(string) - 1 for string in self._strings), default=0))
            sizes = range(longest, 0, -1)
            kept = next((n for n in sizes if any(string.startswith(text[-n:]) for string in self._strings)), 0)
            text, self._held = text[: len(text) - kept], text[len(text) - kept :]
        self.text += text
        return text
