"""The demo model's tokenizer and chat template, both made from the generated dialogues."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from triptych.demo.dialogues import NO_IMAGE_ANSWER, SYSTEM_PROMPTS, dialogue, without_image
from triptych.demo.drawing import COLOURS, FORMS, random_scene
from triptych.demo.scenes import training_rng

PAD: Final = "<|pad|>"
USER: Final = "<|user|>"
ASSISTANT: Final = "<|assistant|>"
SYSTEM: Final = "<|system|>"
END: Final = "<|end|>"
IMAGE: Final = "<image>"
SPECIALS: Final = (PAD, USER, ASSISTANT, SYSTEM, END, IMAGE)

VOCABULARY: Final = 512

CHAT_TEMPLATE: Final = """\
{%- for message in messages -%}
{{- '<|' + message['role'] + '|>' -}}
{%- if message['content'] is string -%}
{{- message['content'] -}}
{%- else -%}
{%- for part in message['content'] -%}
{%- if part['type'] in ('image', 'image_url') -%}
{{- '<image>' -}}
{%- elif part['type'] == 'text' -%}
{{- part['text'] -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- '<|end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|assistant|>' -}}
{%- endif -%}
"""
"""Renders messages whose content is a string or a list of image and text parts, in the order given."""

_CORPUS_SCENES: Final = 20_000


def train_tokenizer(seed: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer: all 256 bytes, and each word of the corpus as one token.

    Raises:
        ValueError: `VOCABULARY` is too small to give every word of the corpus a token.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    corpus = sorted(set(_corpus(seed)))
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIALS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_words(corpus), trainer)
    split = sorted({word for word in _words(corpus) if len(tokenizer.encode(word).ids) > 1})
    if split:
        raise ValueError(f"vocabulary of {VOCABULARY} leaves words in pieces: {split}")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[USER, ASSISTANT, SYSTEM, IMAGE],
        extra_special_tokens={"image_token": IMAGE},
        chat_template=CHAT_TEMPLATE,
        model_max_length=2048,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def token_id(tokenizer: PreTrainedTokenizerFast, token: str) -> int:
    """The id of one of `SPECIALS`."""
    return int(tokenizer.backend_tokenizer.encode(token).ids[0])


def _corpus(seed: int) -> Iterator[str]:
    yield from SYSTEM_PROMPTS
    yield NO_IMAGE_ANSWER
    yield from COLOURS
    yield from FORMS
    for index in range(_CORPUS_SCENES):
        rng = training_rng(seed, index)
        told = dialogue(random_scene(rng, most=4), rng)  # More than are shown: each word as one token, "four" too.
        for turn in (*told.turns, *without_image(rng, told).turns):
            yield turn.question
            yield turn.answer


def _words(corpus: list[str]) -> list[str]:
    """The corpus's words as the pre-tokenizer cuts them, each as often as any other, so rare words merge too."""
    cutter = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pieces = {piece for text in corpus for piece, _ in cutter.pre_tokenize_str(text)}
    return [piece.replace("Ġ", " ") for piece in sorted(pieces)]
