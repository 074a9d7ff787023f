"""Bytes as tokens: 256 ids, nothing to download, and every text in every language has a spelling.

A character may take up to four tokens, so text that is streamed must wait for the rest of a character, and a model
may produce bytes that are no UTF-8 at all. Byte 0 never occurs in text here: it is the end-of-text token.
"""

import codecs
from collections.abc import Iterable


class ByteTokenizer:
    """UTF-8 bytes to ids and back."""

    vocab_size = 256
    eos_id = 0

    def encode(self, text: str) -> list[int]:
        """The UTF-8 bytes of `text`. Raises ValueError for what has none: NUL, and halves of surrogate pairs."""
        if "\0" in text:
            raise ValueError(f"text holds NUL at position {text.index(chr(0))}: byte 0 is the end-of-text token")
        try:
            return list(text.encode("utf-8"))
        except UnicodeEncodeError as error:
            raise ValueError(f"text holds half of a surrogate pair at position {error.start}") from None

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`, each malformed byte sequence as U+FFFD. Raises ValueError for an id outside 0..255."""
        decoder = StreamDecoder()
        return "".join([decoder.push(i) for i in ids]) + decoder.finish()


class StreamDecoder:
    """Text from ids as they come: `push` returns what is certain, `finish` what is left.

    A character is returned once, when its last byte has come; bytes that cannot become a character are returned as
    U+FFFD at once, so nothing behind them waits.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """The text that `token_id` completes, often one character, empty inside a character."""
        if not 0 <= token_id < ByteTokenizer.vocab_size:
            raise ValueError(f"token id {token_id} is outside 0..{ByteTokenizer.vocab_size - 1}")
        return self._decoder.decode(bytes([token_id]))

    def finish(self) -> str:
        """U+FFFD if the ids ended inside a character, else nothing. The decoder is then ready for another text."""
        return self._decoder.decode(b"", final=True)
