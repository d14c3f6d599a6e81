"""Text to token ids and back, with the files of a Hugging Face directory.

Built on `tokenizers` and `jinja2` alone: importing transformers' tokenizers imports torch where torch is installed, and
nothing on a JAX path may do that.
"""

import functools
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, overload

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import tokenizers

from kvsparse_jax.errors import InputError

_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
)
_TEMPLATE_DIRECTORY = "additional_chat_templates"
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_REPLACEMENT = "\ufffd"

_log = logging.getLogger(__name__)


class Tokenizer:
    """The tokenizer and chat template of a model directory.

    Attributes:
        directory: where the files came from.
        bos_token_id: id of the beginning-of-sequence token, or None. A model may have one for its chat template only.
        uses_bos: whether plain text starts with that token.
        eos_token_ids: every id that ends a generation, from the tokenizer's, the generation's and the model's config.
        pad_token_id: id of the padding token, or None.
        special_ids: ids that `decode` leaves out.
        vocab_size: largest id plus one. The model's embedding may have more rows.

    Example:
        >>> tokenizer = Tokenizer.load(directory)  # doctest: +SKIP
        >>> tokenizer.decode(tokenizer.encode("Hello"))  # doctest: +SKIP
        'Hello'
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        directory: Path,
        *,
        tokens: Mapping[str, str],
        bos_token_id: int | None,
        uses_bos: bool,
        eos_token_ids: frozenset[int],
        pad_token_id: int | None,
        templates: Mapping[str, str],
    ) -> None:
        """Use `Tokenizer.load`.

        Args:
            backend: the encoder, without truncation and padding.
            directory: where the files came from.
            tokens: text of the named special tokens ("bos_token", ...), as the chat template sees them.
            bos_token_id: see the class.
            uses_bos: see the class.
            eos_token_ids: see the class.
            pad_token_id: see the class.
            templates: chat templates by name; the usual one is "default".
        """
        self._backend = backend
        self._tokens = dict(tokens)
        self._templates = dict(templates)
        self.directory = directory
        self.bos_token_id = bos_token_id
        self.uses_bos = uses_bos
        self.eos_token_ids = eos_token_ids
        self.pad_token_id = pad_token_id
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.vocab_size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @classmethod
    def load(cls, directory: str | os.PathLike[str]) -> "Tokenizer | None":
        """Reads the tokenizer of a model directory.

        Args:
            directory: a Hugging Face directory.

        Returns:
            The tokenizer, or None when the directory has no tokenizer.json.

        Raises:
            InputError: a file of the tokenizer is damaged.
        """
        root = Path(directory)
        file = root / "tokenizer.json"
        if not file.is_file():
            if (root / "tokenizer.model").is_file() or (root / "vocab.json").is_file():
                _log.warning("%s has tokenizer files but no tokenizer.json: loaded without a tokenizer", root)
            return None
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # tokenizers raises a bare Exception for any damaged file
            raise InputError(f"{file} is not a readable tokenizer: {_one_line(error)}") from error
        backend.no_truncation()
        backend.no_padding()

        config = _read_json(root / "tokenizer_config.json")
        tokens = _named_tokens(config, _read_json(root / "special_tokens_map.json"))
        _add_tokens(backend, config, tokens, file)
        ids = {name: token_id for name, text in tokens.items() if (token_id := backend.token_to_id(text)) is not None}
        generation, model = _read_json(root / "generation_config.json"), _read_json(root / "config.json")

        bos, added_bos = ids.get("bos_token"), _prepended(backend)
        if bos is None and "bos_token" not in config:  # tokenizer_config has the last word, also when it says null
            bos = _first_id(generation, model, key="bos_token_id") if added_bos is None else added_bos
        explicit = config.get("add_bos_token")
        uses_bos = bos is not None and (explicit if isinstance(explicit, bool) else added_bos == bos)
        eos = {ids["eos_token"]} if "eos_token" in ids else set()
        for source in (generation, model):
            eos |= _ids(source.get("eos_token_id"))
        pad = ids.get("pad_token", _first_id(generation, model, key="pad_token_id"))
        return cls(
            backend,
            root,
            tokens=tokens,
            bos_token_id=bos,
            uses_bos=uses_bos,
            eos_token_ids=frozenset(eos),
            pad_token_id=pad,
            templates=_templates(root, config),
        )

    def encode(self, text: str, add_bos: bool = True) -> list[int]:
        """Token ids of a text.

        Special tokens written out in the text become their ids. Text that a chat template rendered has all the special
        tokens it needs: encode it with ``add_bos=False`` (as `apply_chat_template` does).

        Args:
            text: any text.
            add_bos: start with the BOS token if the model's text does, unless the text already does.

        Returns:
            The ids; never two BOS tokens at the start because of `add_bos`.

        Raises:
            InputError: the text is not a string of valid Unicode.
        """
        return self.encode_batch([text], add_bos=add_bos)[0]

    def encode_batch(self, texts: Sequence[str], add_bos: bool = True) -> list[list[int]]:
        """`encode` for several texts, in parallel; lengths stay ragged.

        Args:
            texts: any number of texts.
            add_bos: as for `encode`.

        Returns:
            One list of ids for each text.

        Raises:
            InputError: a text is not a string of valid Unicode.
        """
        if isinstance(texts, str):
            raise InputError("encode_batch takes a list of texts, not one text")
        for text in texts:
            if not isinstance(text, str):
                raise InputError(f"a text must be str, not {type(text).__name__}")
            if not _is_unicode(text):
                raise InputError(f"the text {text[:40]!r} holds half of a surrogate pair, which has no UTF-8 form")
        encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        bos = self.bos_token_id
        if not add_bos or not self.uses_bos or bos is None:
            return [encoding.ids for encoding in encodings]
        return [ids if ids[:1] == [bos] else [bos, *ids] for ids in (encoding.ids for encoding in encodings)]

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """The text of token ids; ids that the tokenizer does not know (padding of the embedding) give nothing.

        Args:
            ids: token ids, Python or numpy integers.
            skip_special: leave special tokens out.

        Returns:
            The text; incomplete UTF-8 shows as U+FFFD.

        Raises:
            InputError: an id is negative.
        """
        numbers = [int(token_id) for token_id in ids]
        if any(number < 0 for number in numbers):
            raise InputError(f"token id {min(numbers)} is negative")
        return self._backend.decode(numbers, skip_special_tokens=skip_special)

    def stream_decoder(self, skip_special: bool = True) -> "StreamDecoder":
        """A decoder for ids that arrive one at a time.

        Args:
            skip_special: leave special tokens out.

        Returns:
            A fresh decoder.
        """
        return StreamDecoder(self, skip_special)

    @property
    def has_chat_template(self) -> bool:
        """Whether `apply_chat_template` works."""
        return bool(self._templates)

    @overload
    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tokenize: Literal[True] = True,
        **kwargs: Any,
    ) -> list[int]: ...

    @overload
    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        *,
        tokenize: Literal[False],
        **kwargs: Any,
    ) -> str: ...

    @overload
    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tokenize: bool = True,
        **kwargs: Any,
    ) -> list[int] | str: ...

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tokenize: bool = True,
        **kwargs: Any,
    ) -> list[int] | str:
        """Renders a conversation the way the model was trained to read it.

        The template alone decides about the BOS token: none is added, so none is doubled.

        Args:
            messages: {"role": ..., "content": ...} in order; at least one.
            add_generation_prompt: end with what starts the assistant's next turn.
            tokenize: return ids rather than text.
            **kwargs: variables of the template, such as ``tools`` (a list of JSON schemas) or ``enable_thinking``.

        Returns:
            Token ids, or the rendered text.

        Raises:
            InputError: there is no template, the messages are not of that form, or the template refuses them.
        """
        if not self._templates:
            raise InputError(f"{self.directory} has no chat template: pass plain text or token ids")
        _check_chat(messages, kwargs)
        name = "tool_use" if kwargs.get("tools") and "tool_use" in self._templates else "default"
        if name not in self._templates:
            raise InputError(f"{self.directory} has no default chat template, only {sorted(self._templates)}")
        try:
            # Templates are code from a hub: they see plain data only. Keys without a value would print as "None".
            plain = json.loads(json.dumps([{k: v for k, v in m.items() if v is not None} for m in messages]))
            extra = json.loads(json.dumps(kwargs))
        except (TypeError, ValueError) as error:
            raise InputError(f"chat messages and template variables must be plain data: {_one_line(error)}") from error
        try:
            text = _compile(self._templates[name]).render(
                {**self._tokens, "messages": plain, "add_generation_prompt": add_generation_prompt, **extra}
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            raise InputError(f"the chat template refuses these messages: {_one_line(error)}") from error
        return self.encode(text, add_bos=False) if tokenize else text

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Copies the tokenizer's files along, unchanged.

        Args:
            directory: where to put them; made if needed.
        """
        target = Path(directory)
        target.mkdir(parents=True, exist_ok=True)
        names = [name for name in _FILES if (self.directory / name).is_file()]
        extra = sorted((self.directory / _TEMPLATE_DIRECTORY).glob("*.jinja"))
        if extra:
            (target / _TEMPLATE_DIRECTORY).mkdir(exist_ok=True)
            names += [f"{_TEMPLATE_DIRECTORY}/{path.name}" for path in extra]
        for name in names:
            destination = target / name
            if not (destination.exists() and destination.samefile(self.directory / name)):
                shutil.copyfile(self.directory / name, destination)


class StreamDecoder:
    """Turns ids into text as they arrive; what it gave so far never changes.

    The pieces add up to what `Tokenizer.decode` gives for all ids together. Bytes of an incomplete character are held
    back until the character is complete or `finish` is called.
    """

    # A character has at most 4 bytes and a token at least one, so text that is still incomplete
    # after this many more tokens is invalid for good.
    _HELD_TOKENS = 4

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True) -> None:
        """Use `Tokenizer.stream_decoder`.

        Args:
            tokenizer: whose ids they are.
            skip_special: leave special tokens out.
        """
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        # Decoders strip a space at the start of the text, so the last piece given stays in the window as context.
        self._ids: list[int] = []
        self._context = 0  # ids of the window that are given out already
        self._given = 0  # characters of the window that are given out already
        self._held = 0  # ids pushed since the text began to end in an incomplete character

    def push(self, token_id: int) -> str:
        """Takes the next id.

        Args:
            token_id: the id.

        Returns:
            The text that became certain, often empty.

        Raises:
            InputError: the id is negative.
        """
        text = self._tokenizer.decode([*self._ids, token_id], self._skip_special)
        self._ids.append(int(token_id))
        certain = len(text.rstrip(_REPLACEMENT))
        self._held = self._held + 1 if certain < len(text) else 0
        if self._held > self._HELD_TOKENS:
            certain = max(certain, len(text) - 1)  # only the last character can still be an incomplete one
        if certain <= self._given:
            return ""
        piece = text[self._given : certain]
        self._held = 0
        self._given = certain
        if certain == len(text):  # nothing is held back: move the window
            self._ids = self._ids[self._context :]
            self._context = len(self._ids)
            self._given = len(self._tokenizer.decode(self._ids, self._skip_special))
        return piece

    def finish(self) -> str:
        """Gives what was held back and starts afresh.

        Returns:
            The rest of the text; an incomplete character shows as U+FFFD.
        """
        piece = self._tokenizer.decode(self._ids, self._skip_special)[self._given :]
        self._ids, self._context, self._given, self._held = [], 0, 0, 0
        return piece


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"{path} is not readable JSON: {_one_line(error)}") from error
    if not isinstance(content, dict):
        raise InputError(f"{path} should hold a JSON object, not {type(content).__name__}")
    return content


def _ids(value: Any) -> set[int]:
    values = value if isinstance(value, list) else [value]
    return {token_id for token_id in values if isinstance(token_id, int)}


def _first_id(*sources: dict[str, Any], key: str) -> int | None:
    return next((value for source in sources if isinstance(value := source.get(key), int)), None)


def _token_text(value: Any) -> str | None:
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def _named_tokens(config: dict[str, Any], token_map: dict[str, Any]) -> dict[str, str]:
    """Texts of the named special tokens; the older special_tokens_map.json fills what the config does not mention."""
    merged = {name: config.get(name, token_map.get(name)) for name in _NAMED_TOKENS}
    return {name: text for name, value in merged.items() if (text := _token_text(value)) is not None}


def _add_tokens(backend: tokenizers.Tokenizer, config: dict[str, Any], tokens: dict[str, str], file: Path) -> None:
    """Adds what tokenizer_config.json declares on top of tokenizer.json, and marks special tokens as special."""
    known = backend.get_added_tokens_decoder()
    declared = config.get("added_tokens_decoder") or {}
    for token_id, spec in sorted(((int(key), value) for key, value in declared.items()), key=lambda item: item[0]):
        if not isinstance(spec, dict) or not isinstance(spec.get("content"), str):
            raise InputError(f"{file.parent}: added token {token_id} of tokenizer_config.json has no content")
        if token_id in known and known[token_id].content == spec["content"]:
            continue
        flags = {name: bool(spec.get(name, False)) for name in ("single_word", "lstrip", "rstrip", "special")}
        token = tokenizers.AddedToken(spec["content"], normalized=bool(spec.get("normalized", True)), **flags)
        backend.add_tokens([token])
        got = backend.token_to_id(spec["content"])
        if got != token_id:
            raise InputError(f"{file.parent}: tokenizer_config.json gives {spec['content']!r} id {token_id}, got {got}")
    special = [*tokens.values(), *_additional_tokens(config)]
    known_special = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    # A name that is in no vocabulary would get an id that the model has no embedding for: it stays unknown.
    missing = [text for text in special if text not in known_special and backend.token_to_id(text) is not None]
    if missing:
        backend.add_special_tokens([tokenizers.AddedToken(text, normalized=False, special=True) for text in missing])


def _additional_tokens(config: dict[str, Any]) -> list[str]:
    found: list[str] = []
    for key in ("additional_special_tokens", "extra_special_tokens"):
        value = config.get(key) or []
        values = value.values() if isinstance(value, dict) else value
        found += [text for item in values if (text := _token_text(item)) is not None]
    return found


def _prepended(backend: tokenizers.Tokenizer) -> int | None:
    """The id that the post-processor puts before a text, if it does."""
    encoding = backend.encode("a")
    return encoding.ids[0] if encoding.special_tokens_mask[:1] == [1] else None


def _templates(root: Path, config: dict[str, Any]) -> dict[str, str]:
    """Chat templates by name; files of their own win over tokenizer_config.json, as in transformers."""
    found: dict[str, str] = {}
    inline = config.get("chat_template")
    if isinstance(inline, str):
        found["default"] = inline
    elif isinstance(inline, list):
        found.update({item["name"]: item["template"] for item in inline})
    older = _read_json(root / "chat_template.json").get("chat_template")
    if isinstance(older, str):
        found["default"] = older
    for name, path in [
        ("default", root / "chat_template.jinja"),
        *((path.stem, path) for path in sorted((root / _TEMPLATE_DIRECTORY).glob("*.jinja"))),
    ]:
        if path.is_file():
            found[name] = path.read_text(encoding="utf-8")
    return found


_NOT_TAKEN = {"continue_final_message", "return_tensors", "return_dict", "padding", "truncation", "max_length"}


def _check_chat(messages: Any, variables: Mapping[str, Any]) -> None:
    if isinstance(messages, str) or not isinstance(messages, Sequence) or not messages:
        raise InputError('a chat is a list of at least one message, {"role": ..., "content": ...}')
    for message in messages:
        if not isinstance(message, Mapping) or "role" not in message:
            raise InputError(f'a chat message is {{"role": ..., "content": ...}}, not {message!r}')
        # Templates print what is missing as nothing: an assistant's call of tools is the one message without content.
        if message.get("content") is None and not message.get("tool_calls"):
            raise InputError(f"the chat message {message!r} has no content")
    # A template ignores variables that it does not know, so these would be dropped without a word.
    if unknown := sorted(_NOT_TAKEN & set(variables)):
        raise InputError(f"apply_chat_template does not take {', '.join(unknown)}")


class _Generation(jinja2.ext.Extension):
    """Reads ``{% generation %}...{% endgeneration %}``, which marks assistant text for training, as its content."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@functools.lru_cache(maxsize=16)
def _compile(template: str) -> jinja2.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    helpers: dict[str, Callable[..., Any]] = {"raise_exception": _refuse, "strftime_now": _now}
    environment.globals.update(helpers)
    try:
        return environment.from_string(template)
    except jinja2.TemplateSyntaxError as error:
        raise InputError(f"the chat template is not valid jinja: {_one_line(error)}") from error


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes HTML characters, which the models were not trained on
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> str:
    raise jinja2.TemplateError(message)


def _now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _is_unicode(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
