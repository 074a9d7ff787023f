"""The engine: schedule, run, accept, until nothing is left."""

import math
import operator
import time
from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from torch import Tensor

from minillm.continuous_batching.request import Request, Result, Sample
from minillm.continuous_batching.scheduler import Plan, Scheduler
from minillm.generate import check_request
from minillm.model.sampling import sample as sample_token
from minillm.model.transformer import Transformer
from minillm.paged_cache import PagedKVCache, forward_batch


class Decoding(Protocol):
    """What a step does with its logits, in two replaceable pieces (chapter 6 brings others)."""

    def propose(self, samples: Sequence[Sample]) -> list[list[int]]:
        """Guesses to run behind the newest token of each of these samples, which all decode. Not all may run."""
        ...

    def accept(self, sample: Sample, logits: Tensor) -> list[int]:
        """The tokens that follow, at least one, from the logits `[1 + guesses, vocab]` of the newest token and of
        `sample.drafts`, the guesses that ran. All but the last of them must equal the guesses: their keys and values
        are in the cache.
        """
        ...

    def forget(self, sample: Sample) -> None:
        """It has left, for good or to run again from its beginning: keep nothing for it."""
        ...


def _is_time(seconds: float) -> bool:
    return isinstance(seconds, (int, float)) and 0 <= seconds < math.inf


class OneToken:
    """Plain decoding: no guess, one token."""

    def propose(self, samples: Sequence[Sample]) -> list[list[int]]:
        """None for anybody."""
        return [[] for _ in samples]

    def accept(self, sample: Sample, logits: Tensor) -> list[int]:
        """The arg-max, or a draw for the position of the new token."""
        return [sample_token(logits[-1], sample.sampling, position=len(sample.ids))]

    def forget(self, sample: Sample) -> None:
        """Nothing is kept."""


class Clock:
    """Seconds, and waiting for them."""

    def now(self) -> float:
        """Seconds from some fixed moment."""
        return time.perf_counter()

    def wait(self, seconds: float) -> None:
        """Return that much later."""
        time.sleep(seconds)


class Engine:
    """Serves requests on one model and one block pool. Not for several threads at a time.

    `on_step(engine, plan)` is called after every step, for pictures and tests. Raises nothing at the start: a pool of
    another element type than the model's is refused at the first step.
    """

    def __init__(
        self,
        model: Transformer,
        cache: PagedKVCache,
        scheduler: Scheduler | None = None,
        decoding: Decoding | None = None,
        clock: Clock | None = None,
        on_step: Callable[["Engine", Plan], None] | None = None,
    ) -> None:
        self.model, self.cache = model, cache
        self.scheduler = scheduler or Scheduler()
        self.decoding = decoding or OneToken()
        self.clock = clock or Clock()
        self.on_step = on_step
        self.waiting: list[Sample] = []
        self.running: list[Sample] = []  # both in order of arrival
        self.steps = 0
        self._submissions = 0

    def add(self, request: Request) -> Result:
        """Put a request in the queue; its result fills while `step` runs.

        Raises ValueError, and everything else goes on, for an empty prompt, ids outside the vocabulary,
        `max_new_tokens` or `n` below 1, an empty stop string, an arrival that never comes, or a worst case beyond the
        context or the pool; TypeError for numbers that are not whole.
        """
        prompt = [operator.index(i) for i in request.prompt_ids]
        check_request(self.model, prompt, operator.index(request.max_new_tokens))
        if operator.index(request.n) < 1:
            raise ValueError(f"n must be at least 1, got {request.n}")
        if isinstance(request.stop, str) or not all(isinstance(s, str) and s for s in request.stop):
            raise ValueError(f"stop must be a sequence of strings, none empty, got {request.stop!r}")
        if not _is_time(request.arrival):
            raise ValueError(f"arrival must be finite and at least 0, got {request.arrival}")
        worst = self.cache.blocks_for(len(prompt) + request.max_new_tokens - 1)  # the last token never runs
        if worst > self.cache.num_blocks:
            raise ValueError(
                f"{len(prompt)} prompt tokens and {request.max_new_tokens} new ones may need {worst} blocks of "
                f"{self.cache.block_size}, the whole pool has {self.cache.num_blocks}"
            )
        now = self.clock.now()
        self._submissions += 1
        samples = [Sample(request, i, self._submissions, now, list(prompt), len(prompt)) for i in range(request.n)]
        self.waiting.extend(samples)
        return Result(request, samples)

    def cancel(self, result: Result) -> None:
        """End a request now, at any moment, also from within a callback; its blocks are free at once."""
        for sample in result.samples:
            self._finish(sample, "cancelled")

    def run(self, requests: Sequence[Request]) -> list[Result]:
        """Serve `requests`, each from its `arrival` on; results in the order given.

        A request that is refused has a result without tokens and the error in it; the others are served. If the model
        fails in a step, the samples that were running end with that error, and those that come after them are served.
        """
        start = self.clock.now()
        results: list[Result | None] = [None] * len(requests)
        arrivals = [r.arrival if _is_time(r.arrival) else 0.0 for r in requests]  # the others are refused at once
        coming = sorted(range(len(requests)), key=lambda i: arrivals[i])
        while coming or self.waiting or self.running:
            while coming and arrivals[coming[0]] <= self.clock.now() - start:
                i = coming.pop(0)
                results[i] = self._add_or_refuse(requests[i])
                for sample in results[i].samples:  # a request that came during a step waited from then on
                    sample.submitted = start + arrivals[i]
            if self.waiting or self.running:
                self._step_or_end_running()
            elif coming:
                self.clock.wait(max(0.0, start + arrivals[coming[0]] - self.clock.now()))
        return results

    def step(self) -> None:
        """Schedule, run, accept. After an exception in the model every sample is as it was before the step."""
        # Guesses come only behind a token of the answer: where a prompt ends, samples are forked.
        decoding = [s for s in self.running if s.decodes and s.token_ids]
        for sample, drafts in zip(decoding, self.decoding.propose(decoding), strict=True):
            sample.drafts = drafts
        plan = self.scheduler.plan(self.running, self.waiting, self.cache)
        steps = self._prepare(plan)
        if steps:
            self._accept(steps, self._run(steps))
        elif self.waiting and not self.running and not plan.preempt:
            held = self.cache.num_blocks - self.cache.num_free_blocks
            raise RuntimeError(f"nobody can run: {held} blocks of the pool are held by sequences outside this engine")
        self.steps += 1
        if self.on_step:
            self.on_step(self, plan)

    def _add_or_refuse(self, request: Request) -> Result:
        try:
            return self.add(request)
        except (ValueError, TypeError) as error:
            refused = Sample(replace(request, stop=()), 0, 0, self.clock.now(), [], 0)
            refused.finish_reason, refused.error = "error", error
            return Result(request, [refused])

    def _step_or_end_running(self) -> None:
        try:
            self.step()
        except Exception as error:
            if not self.running:
                raise
            for sample in list(self.running):
                self._finish(sample, "error", error)

    def _prepare(self, plan: Plan) -> list[tuple[Sample, int]]:
        """Carry out preemptions and admissions. An admitted sample may need fewer tokens than planned: what others
        left in the pool of its beginning it need not run.
        """
        for sample in plan.preempt:
            self.running.remove(sample)
            sample.sequence.free()
            sample.sequence, sample.drafts = None, []
            sample.preemptions += 1
            self.decoding.forget(sample)
            insort(self.waiting, sample, key=Sample.order)
        steps = []
        for sample, n in plan.counts:
            if sample.sequence is None:
                self.waiting.remove(sample)
                insort(self.running, sample, key=Sample.order)
                sample.sequence = self.cache.sequence(sample.ids)
                sample.started = self.clock.now() if sample.started is None else sample.started
            known = min(n, len(sample.pending))
            sample.drafts = sample.drafts[: n - known]
            steps.append((sample, known + len(sample.drafts)))
        return steps

    def _run(self, steps: list[tuple[Sample, int]]) -> list[Tensor]:
        """One forward pass: the logits `[n, vocab]` of each sample's tokens."""
        new = [(sample.sequence, (sample.pending + sample.drafts)[:n]) for sample, n in steps]
        return list(forward_batch(self.model, self.cache, new).split([n for _, n in steps]))

    def _accept(self, steps: list[tuple[Sample, int]], logits: list[Tensor]) -> None:
        """Commit what ran; whoever has run everything he knows gets his next tokens."""
        for (sample, n), rows in zip(steps, logits, strict=True):
            if sample.finish_reason:
                continue  # cancelled by a callback of this very step
            known = len(sample.ids) - sample.sequence.length
            try:
                if n < known:  # a slice of a prompt
                    sample.sequence.advance(sample.ids[sample.sequence.length :][:n])
                    continue
                new = self.decoding.accept(sample, rows[known - 1 :])
                sample.sequence.advance(sample.ids[sample.sequence.length :] + new[:-1])
                if not sample.token_ids:  # no guess was behind the prompt: the sequence holds it and nothing else
                    self._fork_siblings(sample, rows[known - 1 :])
                self._extend(sample, new)
            except Exception as error:  # a broken callback or broken logits end their own sample only
                self._finish(sample, "error", error)

    def _fork_siblings(self, sample: Sample, logits: Tensor) -> None:
        """The prompt has run for one sample: the others of its request begin where it is, sharing its blocks."""
        siblings = [s for s in self.waiting if s.submission == sample.submission and not s.token_ids]
        for sibling in siblings[: self.scheduler.max_batch - len(self.running)]:
            self.waiting.remove(sibling)
            insort(self.running, sibling, key=Sample.order)
            sibling.sequence, sibling.started = sample.sequence.fork(), self.clock.now()
            try:
                self._extend(sibling, self.decoding.accept(sibling, logits))
            except Exception as error:
                self._finish(sibling, "error", error)

    def _extend(self, sample: Sample, new: list[int]) -> None:
        """Append tokens up to the one that ends the answer, and say so to whoever listens."""
        request = sample.request
        for token in new:
            sample.ids.append(token)
            sample.token_times.append(self.clock.now())
            text = "" if token == request.eos else sample.stream.push(token)
            reason = "eos" if token == request.eos else "stop" if sample.stream.stopped else None
            if reason is None and len(sample.token_ids) >= request.max_new_tokens:
                reason = "length"
            if reason:
                text += sample.stream.finish()
            if request.on_token and sample.index == 0:
                request.on_token(token, text)
            if reason:
                self._finish(sample, reason)
            if sample.finish_reason:  # also if the callback cancelled it
                return

    def _finish(self, sample: Sample, reason: str, error: Exception | None = None) -> None:
        """Take a sample out, wherever it is, and give its blocks back."""
        sample.error = error or sample.error
        if sample.finish_reason:
            return
        sample.finish_reason = reason
        for samples in (self.running, self.waiting):
            if sample in samples:
                samples.remove(sample)
        if sample.sequence:
            sample.sequence.free()
            sample.sequence = None
        self.decoding.forget(sample)
        sample.stream.finish()
