"""Training on any UTF-8 text, so that the course's model has read something: `python -m minillm train`.

Training needs no cache and no loop over tokens: every position of every window is predicted in one forward pass.
The model has no batch axis, so B windows of T bytes are B·T rows, and the "cache" below attends window by window.
Windows are short first and long at the end: most of the work is learning to spell, and short windows are cheaper.
Batches are a function of (seed, step), so a run can stop, resume, and end with the same weights.

Matrices are trained with Muon (Jordan 2024, in `torch.optim`), embedding and norms with AdamW.
"""

import itertools
import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from minillm.model.checkpoint import save_checkpoint
from minillm.model.config import ModelConfig
from minillm.model.tokenizer import ByteTokenizer
from minillm.model.transformer import Transformer, init_weights


@dataclass(frozen=True)
class TrainSettings:
    """What a run is determined by, apart from text and model shape. `schedule`: (share of the steps, window length)."""

    steps: int = 4000
    tokens_per_step: int = 4096
    lr: float = 3e-3
    weight_decay: float = 0.3
    warmup: int = 100
    seed: int = 0
    schedule: tuple[tuple[float, int], ...] = ((0.8, 256), (0.15, 1024), (0.05, 2048))

    def window(self, step: int) -> int:
        """Length in tokens of the windows of `step`."""
        ends = itertools.accumulate(share for share, _ in self.schedule)
        lengths = [length for end, (_, length) in zip(ends, self.schedule, strict=True) if step < end * self.steps]
        return lengths[0] if lengths else self.schedule[-1][1]

    def lr_at(self, step: int) -> float:
        """Linear warm-up, then linear decay to zero."""
        return self.lr * min((step + 1) / self.warmup, (self.steps - step) / max(1, self.steps - self.warmup), 1.0)


class WindowAttention:
    """Stands where a cache stands: rows are windows of `length` tokens, each attends causally within its own."""

    def __init__(self, length: int) -> None:
        self.length = length

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
        """q `[B·T, H, d]`, k, v `[B·T, K, d]` -> `[B·T, H, d]`, in the element type of v (autocast makes it 16-bit)."""
        gqa = q.shape[1] != k.shape[1]
        q, k, v = (x.to(v.dtype).unflatten(0, (-1, self.length)).transpose(1, 2) for x in (q, k, v))  # [B, heads, T, d]
        if self.length > 512 or gqa or scale is not None:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=gqa)
        else:  # on a CPU the backward pass of three plain operations is twice as fast on short windows
            mask = torch.full((self.length, self.length), -math.inf, dtype=v.dtype, device=v.device).triu(1)
            out = torch.softmax(q * q.shape[-1] ** -0.5 @ k.transpose(2, 3) + mask, dim=-1, dtype=v.dtype) @ v
        return out.transpose(1, 2).flatten(0, 1)


def split_corpus(text: str, held_out: float) -> tuple[Tensor, Tensor]:
    """Training and held-out ids of `text`, cut at the blank line nearest to `1 - held_out` of it.

    Blank lines separate texts: they become the end-of-text token. Raises ValueError when there is no room for both.
    """
    ids = [[*ByteTokenizer().encode(story), ByteTokenizer.eos_id] for story in text.split("\n\n") if story]
    if len(ids) < 2:
        raise ValueError(
            "the corpus needs two texts or more, separated by blank lines: some to train on, some held out"
        )
    ends = torch.tensor([len(x) for x in ids]).cumsum(0)
    cut = int((ends[:-1] - (1 - held_out) * ends[-1]).abs().argmin()) + 1
    train, rest = (torch.tensor([i for story in part for i in story]) for part in (ids[:cut], ids[cut:]))
    return train, rest


def loss(model: Transformer, windows: Tensor) -> Tensor:
    """Mean cross-entropy in nats per token of windows `[B, T + 1]`: each token from those before it in its window."""
    inputs, targets = windows[:, :-1], windows[:, 1:]
    length = inputs.shape[1]
    positions = torch.arange(length, device=windows.device).repeat(len(windows))
    logits = model(inputs.reshape(-1), positions, WindowAttention(length))
    return F.cross_entropy(logits.float(), targets.reshape(-1))


@torch.inference_mode()
def bits_per_byte(model: Transformer, ids: Tensor, window: int = 1024) -> float:
    """Mean loss in bits per token (a token is a byte) over consecutive windows of `ids` `[M]`.

    The first tokens of a window are predicted from almost nothing, so this is a little above the loss of a reader
    who remembers everything.
    """
    window = min(window, len(ids) - 1, model.config.max_seq_len)
    starts = range(0, len(ids) - window, window)
    losses = [loss(model, ids[None, s : s + window + 1].to(model.device)).item() for s in starts]
    return sum(losses) / len(losses) / math.log(2)


class Trainer:
    """One run: the model, its optimizers and the step reached, kept in `folder` so that it can go on later.

    Raises ValueError when the corpus is too short for the windows of the settings.
    """

    def __init__(
        self, config: ModelConfig, settings: TrainSettings, train: Tensor, held_out: Tensor, folder: Path
    ) -> None:
        longest = max(length for _, length in settings.schedule)
        if longest > config.max_seq_len:
            raise ValueError(f"windows of {longest} tokens do not fit a model of max_seq_len={config.max_seq_len}")
        if len(train) <= longest or len(held_out) < 2:
            raise ValueError(
                f"{len(train)} bytes to train on and {len(held_out)} held out: too few for windows of {longest} bytes"
            )
        self.settings, self.train, self.held_out, self.folder = settings, train, held_out, folder
        self.step = 0
        self.model = Transformer(config)
        init_weights(self.model, std=0.02, generator=torch.Generator().manual_seed(settings.seed))
        matrices = {n: p for n, p in self.model.named_parameters() if p.dim() == 2 and n.startswith("blocks")}
        others = {n: p for n, p in self.model.named_parameters() if n not in matrices}
        self.optimizers = (
            torch.optim.Muon(
                matrices.items(), settings.lr, weight_decay=settings.weight_decay, adjust_lr_fn="match_rms_adamw"
            ),
            torch.optim.AdamW(others.items(), settings.lr, betas=(0.9, 0.95), weight_decay=0.0),
        )

    def batch(self) -> Tensor:
        """Random windows `[B, T + 1]` of the training text: a function of seed and step only."""
        length = self.settings.window(self.step)
        generator = torch.Generator().manual_seed(self.settings.seed * 1_000_003 + self.step)
        n_windows = max(1, self.settings.tokens_per_step // length)
        starts = torch.randint(len(self.train) - length, (n_windows, 1), generator=generator)
        return self.train[starts + torch.arange(length + 1)]

    def run_step(self) -> float:
        """One update; returns the training loss in bits per byte."""
        with torch.autocast("cpu", dtype=torch.bfloat16):
            value = loss(self.model, self.batch())
        value.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.settings.lr_at(self.step)
            optimizer.step()
            optimizer.zero_grad()
        self.step += 1
        return value.item() / math.log(2)

    def run(self, save_every: int = 250) -> None:
        """Train to the last step, showing loss and time left; the state is saved now and then and at the end."""
        progress = tqdm(total=self.settings.steps, initial=self.step, unit="step", smoothing=0.05)
        smooth = None
        while self.step < self.settings.steps:
            value = self.run_step()
            smooth = value if smooth is None else 0.98 * smooth + 0.02 * value
            progress.update()
            progress.set_postfix_str(f"train {smooth:.3f} bits/byte")
            if self.step % save_every == 0 or self.step == self.settings.steps:
                self.save()
                held_out = bits_per_byte(self.model, self.held_out[:32_768], self.settings.window(self.step - 1))
                progress.write(f"step {self.step}: train {smooth:.3f}, held out {held_out:.3f} bits per byte")
        progress.close()

    @property
    def _state_file(self) -> Path:
        return self.folder / "state.safetensors"

    def save(self) -> None:
        """Write weights, optimizer state and step to `folder`, replacing what was there in one move."""
        self.folder.mkdir(parents=True, exist_ok=True)
        tensors = {f"model/{n}": p.detach() for n, p in self.model.named_parameters()}
        for i, optimizer in enumerate(self.optimizers):
            for index, state in optimizer.state_dict()["state"].items():
                tensors |= {f"optimizer/{i}/{index}/{key}": value for key, value in state.items()}
        metadata = {"step": str(self.step), "settings": json.dumps(asdict(self.settings))}
        partial = self._state_file.with_suffix(".partial")
        save_file(tensors, partial, metadata)
        partial.replace(self._state_file)

    def resume(self) -> None:
        """Go on from the state in `folder`. Raises ValueError if it belongs to other settings or another shape."""
        if not self._state_file.is_file():
            raise ValueError(f"nothing to resume: {self._state_file} does not exist")
        try:
            with safe_open(self._state_file, framework="pt") as file:
                metadata = {"settings": "{}", "step": "0"} | (file.metadata() or {})
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
        except SafetensorError as error:
            raise ValueError(f"{self._state_file} is damaged: {error}") from None
        ours = json.loads(json.dumps(asdict(self.settings)))
        theirs = json.loads(metadata["settings"])
        if differing := [f"{key}={theirs.get(key)} (now {ours[key]})" for key in ours if theirs.get(key) != ours[key]]:
            raise ValueError(f"{self._state_file} was made with other settings: {', '.join(differing)}")
        weights = {name.removeprefix("model/"): x for name, x in tensors.items() if name.startswith("model/")}
        if {n: p.shape for n, p in self.model.named_parameters()} != {n: x.shape for n, x in weights.items()}:
            raise ValueError(f"{self._state_file} holds a model of another shape")
        self.model.load_state_dict(weights)
        for i, optimizer in enumerate(self.optimizers):
            state: dict[int, dict[str, Tensor]] = {}
            for name, x in tensors.items():
                if name.startswith(f"optimizer/{i}/"):
                    index, key = name.split("/")[2:]
                    state.setdefault(int(index), {})[key] = x
            optimizer.load_state_dict(optimizer.state_dict() | {"state": state})
        self.step = int(metadata["step"])


def train(
    corpus: Path, config: ModelConfig, settings: TrainSettings, folder: Path, held_out: float, resume: bool
) -> Path:
    """Train a model of shape `config` on the text in `corpus`, report its losses, and write the checkpoint.

    `held_out` is the share of the text kept for judging. Returns the path of the bfloat16 checkpoint in `folder`.
    Raises ValueError or OSError for a corpus that cannot be read or used, or a state that does not fit.
    """
    if settings.steps < 1:
        raise ValueError(f"steps must be at least 1, got {settings.steps}")
    if not 0 < held_out < 1:
        raise ValueError(f"held_out must lie between 0 and 1, got {held_out}")
    try:
        text = corpus.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{corpus} is not UTF-8 text: {error}") from None
    train_ids, held_out_ids = split_corpus(text, held_out)
    folder.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(config, settings, train_ids, held_out_ids, folder)
    if resume:
        trainer.resume()
    n_parameters = sum(p.numel() for p in trainer.model.parameters())
    print(f"{n_parameters:,} parameters; {len(train_ids):,} bytes to train on, {len(held_out_ids):,} held out")
    trainer.run()
    path = folder / "model.safetensors"
    save_checkpoint(trainer.model, path)
    report = {
        "train": bits_per_byte(trainer.model, train_ids[: len(held_out_ids)]),
        "held out": bits_per_byte(trainer.model, held_out_ids),
    }
    print("bits per byte: " + ", ".join(f"{name} {value:.3f}" for name, value in report.items()) + f"; wrote {path}")
    return path
