"""Bytes as tokens, and text that is complete at every moment of a stream."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minillm.model.tokenizer import ByteTokenizer, StreamDecoder

SMILE = list("🙂".encode())  # F0 9F 99 82


@given(st.text().filter(lambda s: "\0" not in s and s.isprintable()))
def test_every_text_comes_back(text):
    tokenizer = ByteTokenizer()
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("pieces", [[2, 2], [1, 3], [3, 1], [1, 1, 1, 1]])
def test_a_character_in_pieces_is_emitted_once_and_whole(pieces):
    decoder, out, start = StreamDecoder(), [], 0
    for n in pieces:
        out.append("".join(decoder.push(i) for i in SMILE[start : start + n]))
        start += n
    assert out == [""] * (len(pieces) - 1) + ["🙂"]
    assert decoder.finish() == ""


def test_a_truncated_character_becomes_one_replacement_at_the_end():
    decoder = StreamDecoder()
    assert [decoder.push(i) for i in SMILE[:3]] == ["", "", ""]
    assert decoder.finish() == "\ufffd"


def test_an_invalid_byte_holds_nothing_up():
    decoder = StreamDecoder()
    assert decoder.push(0xFF) == "\ufffd", "no character starts with FF: nothing to wait for"
    assert decoder.push(ord("a")) == "a"
    assert decoder.push(0xF0) == "", "this one may still become a character"
    assert decoder.push(ord("b")) == "\ufffdb", "now it cannot: it is released together with what came"


@given(st.lists(st.integers(0, 255)))
def test_streamed_text_equals_the_text_at_once(ids):
    decoder = StreamDecoder()
    streamed = "".join([decoder.push(i) for i in ids]) + decoder.finish()
    assert streamed == bytes(ids).decode("utf-8", errors="replace") == ByteTokenizer().decode(ids)


def test_finish_leaves_a_fresh_decoder():
    decoder = StreamDecoder()
    decoder.push(SMILE[0])
    decoder.finish()
    assert [decoder.push(i) for i in SMILE][-1] == "🙂"


@pytest.mark.parametrize(
    ("text", "message"), [("a\0b", "NUL at position 1"), ("ab\ud83d", "half of a surrogate pair at position 2")]
)
def test_text_without_a_spelling_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        ByteTokenizer().encode(text)


@pytest.mark.parametrize("token", [-1, 256])
def test_ids_outside_the_vocabulary_are_refused(token):
    with pytest.raises(ValueError, match=rf"token id {token} is outside 0\.\.255"):
        ByteTokenizer().decode([65, token])
