"""Streaming text: whole characters, the whole text, and nothing of a stop string."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from tests.worker.checkpoints import SPECIALS, write_tokenizer
from triptych.worker.detokenizer import Detokenizer, StopFilter, TextStream

TEXTS = [
    "plain words, and more of them",
    "emoji 😀 and a family 👩‍👩‍👧‍👦 and a flag 🇩🇪!",
    "漢字とひらがな、中文字符。",
    "combined: e\u0301 a\u0308 n\u0303 க்ஷி 한국어 กำ",
    "  leading spaces,\n\nnew lines\t and trailing  ",
    "mixed ä😀é漢 ascii",
]


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Every byte is a token, so every character above ASCII is spread over several."""
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def byte_fallback() -> Tokenizer:
    """As Llama's: words with ▁ for the space, bytes as <0x..>, and no space in front of the first word."""
    words = ["▁hello", "▁world", "hello", "▁", "é", "▁你"]
    vocabulary = {
        token: index for index, token in enumerate(["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *words])
    }
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def id_of(tokenizer: Tokenizer, token: str) -> int:
    found = tokenizer.token_to_id(token)
    assert found is not None
    return found


def stream(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.push(token) for token in ids]
    return [*pieces, detokenizer.finish()]


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_are_whole_characters_and_together_the_text(byte_level: Tokenizer, text: str) -> None:
    pieces = stream(byte_level, byte_level.encode(text).ids)
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece for piece in pieces)


def test_a_long_text_is_streamed_without_delay(byte_level: Tokenizer) -> None:
    text = "word " * 100
    detokenizer = Detokenizer(byte_level)
    assert "".join(detokenizer.push(token) for token in byte_level.encode(text).ids) == text


@settings(max_examples=150, deadline=None)
@given(text=st.text(max_size=60))
def test_any_text_streams_as_itself(byte_level: Tokenizer, text: str) -> None:
    if "\ufffd" not in text and not any(special in text for special in SPECIALS):
        assert "".join(stream(byte_level, byte_level.encode(text).ids)) == text


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_byte_fallback_pieces_are_the_decoding_of_the_whole(byte_fallback: Tokenizer, seed: int) -> None:
    dice = random.Random(seed)
    ids: list[int] = []
    for _ in range(dice.randint(1, 30)):
        word = dice.choice(["▁hello", "▁world", "hello", "▁", "é", "▁你", "😀", "你", "ß"])
        known = byte_fallback.token_to_id(word)
        ids += [known] if known is not None else [id_of(byte_fallback, f"<0x{byte:02X}>") for byte in word.encode()]
    pieces = stream(byte_fallback, ids)
    assert "".join(pieces) == byte_fallback.decode(ids)
    assert all("\ufffd" not in piece for piece in pieces)


def test_half_a_character_at_the_end_is_dropped(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("ok 😀").ids
    for missing in (1, 2, 3):
        assert "".join(stream(byte_level, ids[:-missing])) == "ok "


def test_an_unreadable_byte_does_not_hold_back_what_follows(byte_level: Tokenizer) -> None:
    broken = id_of(byte_level, "ÿ")  # Byte 0xFF, which no character contains.
    ids = [*byte_level.encode("before").ids, broken, *byte_level.encode("after").ids]
    pieces = stream(byte_level, ids)
    assert pieces[-2] == "r"
    assert "".join(pieces) == "before\ufffdafter"


def test_endless_unreadable_bytes_neither_hang_nor_grow(byte_level: Tokenizer) -> None:
    broken = id_of(byte_level, "ÿ")
    detokenizer = Detokenizer(byte_level)
    text = "".join(detokenizer.push(broken) for _ in range(500))
    assert len(text) > 490
    assert len(detokenizer._window) <= 64
    text = "".join(detokenizer.push(token) for token in byte_level.encode(" fine").ids)
    assert text.endswith(" fine")


def test_special_tokens_are_no_text(byte_level: Tokenizer) -> None:
    ids = [*byte_level.encode("a").ids, SPECIALS.index("<|user|>"), *byte_level.encode("b").ids]
    assert stream(byte_level, ids) == ["a", "", "b", ""]


@pytest.mark.parametrize(
    ("pieces", "stops", "sent"),
    [
        (["one ", "STO", "P two"], ["STOP"], ["one ", "", ""]),
        (["one ", "STO", "RE"], ["STOP"], ["one ", "", "STORE"]),
        (["aab"], ["ab"], ["a"]),
        (["a", "a", "b"], ["ab"], ["", "a", ""]),
        (["x", "</", "end", ">", "y"], ["</end>", "never"], ["x", "", "", ""]),
        (["first second"], ["second", "first"], [""]),
        (["mid", "dle"], ["dd"], ["mi", ""]),
        (["日", "本"], ["日本"], ["", ""]),
    ],
)
def test_stop_strings_never_leak(pieces: list[str], stops: list[str], sent: list[str]) -> None:
    stop_filter = StopFilter(stops)
    got: list[str] = []
    for piece in pieces:
        text, stopped = stop_filter.push(piece)
        got.append(text)
        if stopped:
            break
    assert got == sent


@settings(max_examples=200, deadline=None)
@given(
    text=st.text(alphabet="ab", max_size=40),
    stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=4), min_size=1, max_size=3),
    seed=st.integers(0, 1000),
)
def test_text_up_to_the_first_stop_is_sent_however_it_is_cut(text: str, stops: list[str], seed: int) -> None:
    dice = random.Random(seed)
    stop_filter = StopFilter(stops)
    sent, rest, stopped = "", text, False
    while rest and not stopped:
        size = dice.randint(1, 3)
        piece, stopped = stop_filter.push(rest[:size])
        sent, rest = sent + piece, rest[size:]
    sent += "" if stopped else stop_filter.finish()
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    assert stopped == bool(ends)
    if stopped:
        # Pieces end generation as soon as a stop string is complete, even if a longer one began before it.
        assert any(text.startswith(sent + stop) for stop in stops)
        assert not any(stop in sent for stop in stops)
    else:
        assert sent == text


def test_a_stop_string_held_back_is_sent_when_the_answer_ends_first(byte_level: Tokenizer) -> None:
    answer = TextStream(byte_level, ["STOP"])
    pieces = [answer.push(token) for token in byte_level.encode("a STO").ids]
    assert "".join(piece.text for piece in pieces) == "a "
    assert answer.finish().text == "STO"
