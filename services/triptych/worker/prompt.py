"""Dialogues to token ids: the checkpoint's chat template and tokenizer, with images as spans of positions.

Text of users is text: what looks like a special token in it is encoded as the characters it is made of.
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from triptych.errors import InvalidRequest
from triptych.worker.engine.request import TokenizedPrompt
from triptych.worker.kv.identity import VisualSpan


@dataclass(frozen=True, slots=True)
class ImageSlot:
    """An image as the prompt needs it.

    Attributes:
        identity: Its 256-bit identity.
        token_count: Positions it takes.
    """

    identity: bytes
    token_count: int


@dataclass(frozen=True, slots=True)
class Turn:
    """One message: `user`, `assistant` or `system`, and its text and images in order."""

    role: str
    parts: tuple[str | ImageSlot, ...]


@dataclass(frozen=True, slots=True)
class _SpecialToken:
    """A string of the rendered prompt that is one token; `trims_*`: it swallows white space on that side."""

    token_id: int
    trims_left: bool
    trims_right: bool


class PromptEncoder:
    """Encodes dialogues for one checkpoint. Thread-safe.

    Attributes:
        text_decoder: The tokenizer that turns output tokens back into text.
    """

    def __init__(self, model_dir: Path, image_token_id: int | None) -> None:
        """Loads tokenizer and chat template. Raises ValueError when the checkpoint has no usable ones."""
        self._template = AutoTokenizer.from_pretrained(model_dir)
        if self._template.chat_template is None:
            self._template.chat_template = _processor_template(model_dir)
        self._image_token_id = image_token_id
        self._image_text = "" if image_token_id is None else str(self._template.convert_ids_to_tokens(image_token_id))
        self._takes_parts = self._template_takes_parts()
        description = json.loads(self._template.backend_tokenizer.to_str())
        description["truncation"] = description["padding"] = None
        self.text_decoder = Tokenizer.from_str(json.dumps(description))
        added = description["added_tokens"]
        self._specials = {
            token["content"]: _SpecialToken(token["id"], token["lstrip"], token["rstrip"])
            for token in added
            if token["special"] or token["id"] == image_token_id
        }
        for token in added:
            token["special"] = token["content"] in self._specials
        self._first = _plain_tokenizer(description)
        _drop_first_space(description)
        self._later = _plain_tokenizer(description)
        longest_first = sorted(self._specials, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._special_start = re.compile(f"(?={self._special.pattern})")

    def encode(self, turns: Sequence[Turn]) -> TokenizedPrompt:
        """Renders the chat template with a prompt for the next answer, and encodes it.

        Where no text holds a special token, ids are exactly those of Hugging Face's `apply_chat_template`. Each image
        placeholder of the template becomes as many positions as its image has tokens.

        Raises InvalidRequest: CHAT_TEMPLATE when the template refuses the dialogue, PLACEHOLDER_MISMATCH when it does
        not mention each image exactly once, IMAGES_UNSUPPORTED when the model takes none.
        """
        images = [part for turn in turns for part in turn.parts if isinstance(part, ImageSlot)]
        if images and self._image_token_id is None:
            raise InvalidRequest("this model takes no images", reason="IMAGES_UNSUPPORTED")
        rendered = self._render(turns)
        if any(self._special.search(run) for turn in turns for run in _text_runs(turn)):
            token_ids = self._encode_guarded(turns, rendered)
        else:
            token_ids = self.text_decoder.encode(rendered, add_special_tokens=False).ids
        if not token_ids:
            raise InvalidRequest("the prompt is empty")
        return self._expand(token_ids, images)

    def encode_raw(self, text: str) -> TokenizedPrompt:
        """Encodes a text to be continued as it is: what the tokenizer puts around every text, and no chat template.

        Raises InvalidRequest when that leaves no token.
        """
        token_ids = self._first.encode(text, add_special_tokens=True).ids
        if not token_ids:
            raise InvalidRequest("the prompt is empty")
        return TokenizedPrompt(tuple(token_ids))

    def _render(self, turns: Sequence[Turn]) -> str:
        messages = [{"role": turn.role, "content": self._content(turn)} for turn in turns]
        try:
            rendered: str = self._template.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except (TemplateError, TypeError) as error:
            raise InvalidRequest(f"the model's chat template: {error}", reason="CHAT_TEMPLATE") from None
        return rendered

    def _content(self, turn: Turn) -> str | list[dict[str, str]]:
        """Returns a turn's content as the template takes it; a plain string holds the image token where images are."""
        if self._takes_parts:
            return [
                {"type": "text", "text": part} if isinstance(part, str) else {"type": "image"} for part in turn.parts
            ]
        return "".join(part if isinstance(part, str) else self._image_text for part in turn.parts)

    def _template_takes_parts(self) -> bool:
        """Tells whether the template takes lists of parts; those of language models mostly want plain strings."""
        parts = [{"type": "text", "text": "probe"}]
        try:
            rendered = str(self._template.apply_chat_template([{"role": "user", "content": parts}], tokenize=False))
        except (TemplateError, TypeError):
            return False
        return "probe" in rendered and str(parts) not in rendered

    def _encode_guarded(self, turns: Sequence[Turn], rendered: str) -> list[int]:
        """Encodes a dialogue whose text holds special tokens.

        Their first characters are replaced by noncharacters that occur in no text, so that in the rendered prompt
        only the template's own special tokens are left; between these, the characters are put back.
        """
        guards = self._guards(turns)
        guarded = self._render([_guard(turn, self._special_start, guards) for turn in turns])
        originals = str.maketrans({guard: original for original, guard in guards.items()})
        if guarded.translate(originals) != rendered:
            raise InvalidRequest(
                "the model's chat template changes text that holds special tokens; leave them out",
                reason="CHAT_TEMPLATE",
            )
        token_ids: list[int] = []
        for piece in self._split(guarded):
            if isinstance(piece, str):
                tokenizer = self._later if token_ids else self._first
                token_ids += tokenizer.encode(piece.translate(originals), add_special_tokens=False).ids
            else:
                token_ids.append(piece.token_id)
        return token_ids

    def _guards(self, turns: Sequence[Turn]) -> dict[str, str]:
        """Returns a noncharacter, used in no text, for each first character of a special token."""
        used = {character for turn in turns for run in _text_runs(turn) for character in run}
        unused = (character for character in _noncharacters() if character not in used)
        return dict(zip(sorted({content[0] for content in self._specials}), unused, strict=False))

    def _split(self, guarded: str) -> Iterator[str | _SpecialToken]:
        """Splits a prompt at its special tokens, as the tokenizer would."""
        position = 0
        trim = False
        for match in self._special.finditer(guarded):
            token = self._specials[match.group()]
            text = guarded[position : match.start()]
            text = text.lstrip() if trim else text
            text = text.rstrip() if token.trims_left else text
            if text:
                yield text
            yield token
            position, trim = match.end(), token.trims_right
        rest = guarded[position:].lstrip() if trim else guarded[position:]
        if rest:
            yield rest

    def _expand(self, token_ids: Sequence[int], images: Sequence[ImageSlot]) -> TokenizedPrompt:
        placeholders = token_ids.count(self._image_token_id) if self._image_token_id is not None else 0
        if placeholders != len(images):
            raise InvalidRequest(
                f"the rendered prompt has {placeholders} image placeholders for {len(images)} images",
                reason="PLACEHOLDER_MISMATCH",
            )
        expanded: list[int] = []
        spans: list[VisualSpan] = []
        remaining = iter(images)
        for token_id in token_ids:
            if token_id == self._image_token_id:
                image = next(remaining)
                spans.append(VisualSpan(len(expanded), image.token_count, image.identity))
                expanded += [token_id] * image.token_count
            else:
                expanded.append(token_id)
        return TokenizedPrompt(tuple(expanded), tuple(spans))


def _text_runs(turn: Turn) -> Iterator[str]:
    """Yields the texts of a turn, neighbours joined: a special token may be spread over them."""
    run = ""
    for part in turn.parts:
        if isinstance(part, str):
            run += part
        else:
            yield run
            run = ""
    yield run


def _guard(turn: Turn, special_start: re.Pattern[str], guards: dict[str, str]) -> Turn:
    """Returns a turn in which the first character of every special token in its text is replaced."""
    marks = iter([{match.start() for match in special_start.finditer(run)} for run in _text_runs(turn)])
    marked, offset = next(marks), 0
    parts: list[str | ImageSlot] = []
    for part in turn.parts:
        if isinstance(part, str):
            characters = enumerate(part, offset)
            parts.append("".join(guards[c] if index in marked else c for index, c in characters))
            offset += len(part)
        else:
            parts.append(part)
            marked, offset = next(marks), 0
    return Turn(turn.role, tuple(parts))


def _noncharacters() -> Iterator[str]:
    """Returns code points that no text should hold: noncharacters first, then a private plane."""
    return map(chr, (*range(0xFDD0, 0xFDF0), *range(0x100000, 0x10FFFE)))


def _plain_tokenizer(description: dict[str, Any]) -> Tokenizer:
    """Returns a tokenizer to which every special token is plain text."""
    tokenizer = Tokenizer.from_str(json.dumps(description))
    tokenizer.encode_special_tokens = True
    return tokenizer


def _drop_first_space(description: Any) -> None:
    """Changes SentencePiece-style pre-tokenizers that put a space before the first text of a prompt, and only there."""
    if isinstance(description, dict):
        if description.get("prepend_scheme") == "first":
            description["prepend_scheme"] = "never"
        for key in ("pre_tokenizer", "pretokenizers"):
            _drop_first_space(description.get(key))
    elif isinstance(description, list):
        for item in description:
            _drop_first_space(item)


def _processor_template(model_dir: Path) -> str:
    """Reads the chat template where older LLaVA checkpoints keep it."""
    path = model_dir / "chat_template.json"
    if not path.is_file():
        raise ValueError(f"{model_dir} has no chat template (chat_template.jinja or tokenizer_config.json)")
    template: str = json.loads(path.read_text("utf-8"))["chat_template"]
    return template
