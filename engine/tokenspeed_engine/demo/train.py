"""Command line: trains the embedded model on a corpus written by `prepare`, on one GPU or (slowly) a CPU.

Phases: dense attention on short windows; dense attention on long windows while the indexer learns; sparse attention
with the learning rate falling; then the draft layer alone, dense and sparse. A run that is cut by --max-seconds saves
its state and goes on from there when started again with the same arguments.
"""

import argparse
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from . import evaluate
from .attention import Mode
from .config import DemoConfig
from .export import load_checkpoint, save_checkpoint
from .losses import Losses, draft_losses, text_losses
from .model import DemoModel


class Phase(NamedTuple):
    """`steps` optimiser steps on windows of `length` tokens; the learning rate goes linearly from `start` to `end`."""

    name: str
    steps: int
    length: int
    mode: Mode
    start: float
    end: float
    draft: bool = False


DENSE, DENSE_INDEXER, SPARSE_INDEXER = Mode(False, False), Mode(False, True), Mode(True, True)
WARM_UP = 200


def default_plan(steps: list[int], rate: float, lengths: tuple[int, int, int] = (512, 2048, 1024)) -> list[Phase]:
    """The five phases with the given numbers of steps, those of 0 left out; window lengths: short, long, draft."""
    short, long, draft = lengths
    phases = [
        Phase("dense", steps[0], short, DENSE, rate, rate),
        Phase("indexer", steps[1], long, DENSE_INDEXER, rate, rate),
        Phase("sparse", steps[2], long, SPARSE_INDEXER, rate, rate / 50),
        Phase("draft-dense", steps[3], draft, DENSE_INDEXER, rate, rate, draft=True),
        Phase("draft-sparse", steps[4], draft, SPARSE_INDEXER, rate, rate / 50, draft=True),
    ]
    return [phase for phase in phases if phase.steps]


class Trainer:
    """Model, optimiser and place in the plan; deterministic in `seed` and the plan, apart from GPU reductions."""

    def __init__(
        self, config: DemoConfig, plan: list[Phase], stream: Tensor, tokens_per_step: int, device: str, seed: int = 0
    ) -> None:
        torch.manual_seed(seed)
        self.model = DemoModel(config).to(device)
        self.plan, self.tokens_per_step, self.seed = plan, tokens_per_step, seed
        self.stream = stream.to(device)
        self.device = device
        self.phase, self.step = 0, 0
        self.optimizer = self._start_phase()

    def _start_phase(self) -> torch.optim.Optimizer:
        """Optimiser for what the current phase trains; main phases share one, draft phases another."""
        draft = self.phase < len(self.plan) and self.plan[self.phase].draft
        decayed: list[nn.Parameter] = []
        plain: list[nn.Parameter] = []
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(name.startswith("mtp.") == draft)
            if parameter.requires_grad:
                matrix = parameter.dim() > 1 and "conv1d" not in name and "embed" not in name
                (decayed if matrix else plain).append(parameter)
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), fused=self.device == "cuda")

    def window(self, length: int) -> Tensor:
        """[batch, length + 1] int64 from random places of the stream, decided by seed, phase and step."""
        chance = torch.Generator().manual_seed(hash((self.seed, self.phase, self.step)) % (1 << 63))
        count = max(1, self.tokens_per_step // length)
        starts = torch.randint(self.stream.numel() - length, (count,), generator=chance).to(self.device)
        return self.stream[starts[:, None] + torch.arange(length + 1, device=self.device)].long()

    def train_step(self) -> Losses:
        """One optimiser step of the current phase; moves on to the next phase after its last step."""
        phase = self.plan[self.phase]
        rate = phase.start + (phase.end - phase.start) * self.step / phase.steps
        if self.phase == 0 or phase.draft != self.plan[self.phase - 1].draft:
            rate *= min(1.0, (self.step + 1) / WARM_UP)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        compute: Callable[[DemoModel, Tensor, Mode], Losses] = draft_losses if phase.draft else text_losses
        with torch.autocast(self.device, dtype=torch.bfloat16, enabled=self.device == "cuda"):
            losses = compute(self.model, self.window(phase.length), phase.mode)
        torch.autograd.backward(losses.total)
        if not phase.mode.train_indexer:  # compiled layers give it zeros, which would let weight decay act
            for name, parameter in self.model.named_parameters():
                parameter.grad = None if ".indexer." in name else parameter.grad
        nn.utils.clip_grad_norm_([p for p in self.model.parameters() if p.grad is not None], 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        if self.step == phase.steps:
            self.phase, self.step = self.phase + 1, 0
            if self.phase < len(self.plan) and self.plan[self.phase].draft and not phase.draft:
                self.model.start_draft()
                self.optimizer = self._start_phase()
        return losses

    def save(self, path: Path) -> None:
        """Writes everything that `load` needs to go on."""
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        torch.save({**state, "phase": self.phase, "step": self.step}, path)

    def load(self, path: Path) -> None:
        state = torch.load(path, map_location=self.device)
        self.phase, self.step = state["phase"], state["step"]
        self.model.load_state_dict(state["model"])
        self.optimizer = self._start_phase()
        self.optimizer.load_state_dict(state["optimizer"])

    def run(self, deadline: float, on_phase_end: Callable[[Phase], None]) -> bool:
        """Trains until the plan ends (True) or the clock passes `deadline` (False). Raises if a loss is not finite."""
        started, seen = time.time(), 0
        while self.phase < len(self.plan):
            phase, number = self.plan[self.phase], self.step
            losses = self.train_step()
            seen += 1
            if number % 100 == 0 or self.step == 0:
                token, balance, indexer = (x.item() for x in losses[1:])
                if not math.isfinite(token + indexer):
                    raise FloatingPointError(f"{phase.name} step {number}: loss {token}, indexer {indexer}")
                speed = seen * self.tokens_per_step / (time.time() - started)
                started, seen = time.time(), 0
                print(
                    f"{phase.name} {number}/{phase.steps} loss {token:.4f} balance {balance:.3f}"
                    f" indexer {indexer:.4f} tokens/s {speed:,.0f}",
                    flush=True,
                )
            if self.step == 0:
                on_phase_end(phase)
                started, seen = time.time(), 0
            if number % 10 == 0 and self.device == "cuda":
                torch.cuda.synchronize()
            if time.time() > deadline:
                return self.phase == len(self.plan)
        return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, required=True, help="the .npz file that prepare wrote")
    parser.add_argument("--out", type=Path, required=True, help="folder for the checkpoint and report.json")
    parser.add_argument("--state", type=Path, help="file to resume from and to save to at --max-seconds")
    parser.add_argument("--steps", type=int, nargs=5, default=[6000, 400, 2400, 800, 800], help="of the five phases")
    parser.add_argument("--lengths", type=int, nargs=3, default=[512, 2048, 1024], help="windows: short, long, draft")
    parser.add_argument("--init", type=Path, help="checkpoint folder to start from instead of random weights")
    parser.add_argument("--rate", type=float, default=3e-3, help="peak learning rate")
    parser.add_argument("--tokens-per-step", type=int, default=65536)
    parser.add_argument("--max-seconds", type=float, default=math.inf)
    parser.add_argument("--no-compile", action="store_true", help="run eagerly")
    arguments = parser.parse_args()
    deadline = time.time() + arguments.max_seconds
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_float32_matmul_precision("high")

    corpus = {name: torch.from_numpy(ids.astype(np.int32)) for name, ids in np.load(arguments.corpus).items()}
    # Library code counts twice: it is what the model is meant to write.
    stream = torch.cat([corpus["library"], corpus["library"], corpus["tests"], corpus["chat"]])
    held_out = corpus["held_out"].to(device)
    bytes_per_token = corpus["held_out_bytes_per_100_tokens"].item() / 100
    plan = default_plan(arguments.steps, arguments.rate, tuple(arguments.lengths))
    trainer = Trainer(DemoConfig(), plan, stream, arguments.tokens_per_step, device)
    if arguments.init:
        trainer.model.load_state_dict(load_checkpoint(arguments.init).state_dict())
    if arguments.state and arguments.state.exists():
        trainer.load(arguments.state)
    if not arguments.no_compile:
        torch._dynamo.config.recompile_limit = 64  # layer kinds × modes × lengths
        for layer in trainer.model.text.layers:
            layer.compile(dynamic=False)

    def measure(phase: Phase) -> None:
        # Eager: each new shape would cost a minute of compiling.
        eager = torch.compiler.set_stance("force_eager")
        with eager, torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
            loss = evaluate.text_loss(trainer.model, held_out, bytes_per_token, phase.length, phase.mode)
            drafts = evaluate.draft_agreement(trainer.model, held_out, phase.length) if phase.draft else []
        print(f"held out after {phase.name}: {json.dumps(loss)} {drafts}", flush=True)

    finished = trainer.run(deadline, measure)
    save_checkpoint(trainer.model, arguments.out)
    if arguments.state:
        trainer.save(arguments.state)
    if finished:
        eager = torch.compiler.set_stance("force_eager")
        with eager, torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
            result = evaluate.report(trainer.model, held_out, bytes_per_token, (512, 2048, 4096))
        (arguments.out / "report.json").write_text(json.dumps(result, indent=2) + "\n")
        print(json.dumps(result))
    print("finished" if finished else f"stopped in {trainer.plan[trainer.phase].name} at step {trainer.step}")


if __name__ == "__main__":
    main()
