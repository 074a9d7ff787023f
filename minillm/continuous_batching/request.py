"""What is asked of the engine, and an answer while it grows."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from minillm.measure.metrics import Timeline
from minillm.model.sampling import SamplingParams
from minillm.model.tokenizer import StreamDecoder
from minillm.paged_cache import PagedSequence


@dataclass(frozen=True)
class Request:
    """A prompt and how to continue it, `n` times.

    Greedy when `sampling` is None; the i-th sample draws with `seed + i`. An answer ends after `max_new_tokens`, with
    the token `eos`, or before the first of the `stop` strings in its text. `arrival` is in seconds after the start of
    `Engine.run`. `on_token(token_id, text)` is called for each token of the first sample; `text` is what became
    certain with it, often empty. `name` is only for people.
    """

    prompt_ids: Sequence[int]
    max_new_tokens: int
    sampling: SamplingParams | None = None
    eos: int | None = None
    stop: Sequence[str] = ()
    n: int = 1
    arrival: float = 0.0
    on_token: Callable[[int, str], None] | None = None
    name: str = ""

    def sampling_of(self, index: int) -> SamplingParams | None:
        """How sample `index` draws: samples of one request differ, and a rerun gives the same ones."""
        return self.sampling and replace(self.sampling, seed=self.sampling.seed + index)


class TextStream:
    """Text from ids as it becomes certain, up to the first stop string.

    Text that may be the beginning of a stop string is held back until it is or is not: nothing of a stop string is
    ever released, and text that only looked like its start is.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self.stop = tuple(stop)
        self.text = ""  # what was released
        self.stopped = False
        self._held = ""
        self._decoder = StreamDecoder()

    def push(self, token_id: int) -> str:
        """The text that is certain now and was not before."""
        self._held += self._decoder.push(token_id)
        return self._release()

    def finish(self) -> str:
        """The rest: nothing more will come that could make a stop string of it."""
        self._held += self._decoder.finish()
        released = self._release()
        rest, self._held = "" if self.stopped else self._held, ""
        self.text += rest
        return released + rest

    def _release(self) -> str:
        if self.stopped:
            return ""
        found = [i for s in self.stop if (i := self._held.find(s)) >= 0]
        if found:
            self.stopped = True
            end = min(found)
        else:  # hold back the longest end of the text that begins a stop string
            beginnings = (k for s in self.stop for k in range(len(s) - 1, 0, -1) if self._held.endswith(s[:k]))
            end = len(self._held) - max(beginnings, default=0)
        released, self._held = self._held[:end], self._held[end:]
        self.text += released
        return released


@dataclass(eq=False)
class Sample:
    """One answer to a request. `ids` are the prompt and everything generated; `sequence` holds what has run of them,
    and is None while the sample waits.
    """

    request: Request
    index: int
    submission: int  # the same number for the samples of one `add`
    submitted: float
    ids: list[int]
    n_prompt: int  # how many of them were asked, not generated
    sequence: PagedSequence | None = None
    drafts: list[int] = field(default_factory=list)  # guesses that may run behind `ids` (chapter 6)
    token_times: list[float] = field(default_factory=list)
    started: float | None = None
    finish_reason: str | None = None
    error: Exception | None = None
    preemptions: int = 0

    def __post_init__(self) -> None:
        self.stream = TextStream(self.request.stop)
        self.sampling = self.request.sampling_of(self.index)

    def order(self) -> tuple[int, int]:
        """Who came first."""
        return self.submission, self.index

    @property
    def pending(self) -> list[int]:
        """Tokens that are known and have not run: all of them while it waits, one when it decodes."""
        return self.ids[self.sequence.length if self.sequence else 0 :]

    @property
    def decodes(self) -> bool:
        """Whether everything but the newest token has run."""
        return len(self.pending) == 1

    @property
    def token_ids(self) -> list[int]:
        """What was generated."""
        return self.ids[self.n_prompt :]

    @property
    def text(self) -> str:
        """Its text, as far as it is certain, without the stop string."""
        return self.stream.text

    @property
    def timeline(self) -> Timeline:
        """When it was submitted and when each of its tokens came."""
        return Timeline(self.submitted, tuple(self.token_times))

    @property
    def queue_time(self) -> float | None:
        """Seconds between submission and the first step it was in; None if it never was."""
        return None if self.started is None else self.started - self.submitted


@dataclass
class Result:
    """The answers to one request. Most requests have one sample, and its fields can be read here directly.

    `finish_reason`: "length", "eos", "stop", "cancelled", "error" (see `error`), or None while it runs.
    """

    request: Request
    samples: list[Sample]

    @property
    def token_ids(self) -> list[int]:
        """The first sample's."""
        return self.samples[0].token_ids

    @property
    def text(self) -> str:
        """The first sample's."""
        return self.samples[0].text

    @property
    def timeline(self) -> Timeline:
        """The first sample's."""
        return self.samples[0].timeline

    @property
    def finish_reason(self) -> str | None:
        """The first sample's."""
        return self.samples[0].finish_reason

    @property
    def error(self) -> Exception | None:
        """The first sample's."""
        return self.samples[0].error
