"""The command line of dpivon: train, epsilon, suggest, audit, compare, sweep, ledger, bench."""

import math
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tyro

from dpivon import accounting, audit, bench, compare, data, ledger, processes, records, rules, sweep, train


@dataclass(frozen=True)
class Train:
    """Train one model, print its test metrics and privacy statement, and record the run.

    Parameters
    ----------
    config
        what to run.
    root
        where the data lies: an official archive, its unpacked folder, or a folder of class folders. Default:
        $DPIVON_DATA, else a download into the user's cache.
    ledger
        the file that gets one line for this run.
    checkpoint
        resume from this file if it exists, and save to it after each epoch. Keep it secret.
    export
        write the learned posterior and its privacy statement to this file, which may be published where the
        statement says so. `dpivon.posterior.load` reads it.
    samples_folder
        an empty folder for the iterates that a method keeps (dp-sgd-snapshots, dp-sgld), which then need no memory.
    shifted
        evaluate on corrupted and on strange images too.
    device
        where to train: cpu, cuda, cuda:1, ... Under `torchrun`, all processes train one model, each on its own GPU.
    """

    config: tyro.conf.OmitArgPrefixes[train.Config]
    root: Path | None = None
    ledger: Path = Path("runs.jsonl")
    checkpoint: Path | None = None
    export: Path | None = None
    samples_folder: Path | None = None
    shifted: bool = False
    device: str = "cpu"

    def __call__(self) -> None:
        train.check_writable(self.ledger)
        with processes.joined(self.device) as device:
            first = processes.first()
            record = train.run(
                self.config,
                root=self.root,
                checkpoint_path=self.checkpoint,
                export_path=self.export,
                samples_path=self.samples_folder,
                shifted=self.shifted,
                device=device,
                report=(lambda line: print(line, flush=True)) if first else None,
            )
        if not first:
            return
        print(summary(record), flush=True)  # first: a full disk must not hide the results
        ledger.append(self.ledger, record)
        print(f"recorded in {self.ledger} as {record['key']}")
        if self.export is not None:
            print(f"exported to {self.export}")


@dataclass(frozen=True)
class Epsilon:
    """Convert between a noise multiplier and epsilon, by the RDP and the PRV accountant.

    Parameters
    ----------
    noise_multiplier
        sigma_p, to learn its epsilon.
    epsilon
        a budget, to learn its noise multiplier.
    n
        N, the number of training examples.
    batch_size
        b, the expected batch size.
    epochs
        passes over the data; T = round(epochs N / b).
    steps
        T itself, instead of epochs.
    delta
        delta_p.
    """

    noise_multiplier: float | None = None
    epsilon: float | None = None
    n: int = 50_000
    batch_size: int = 1024
    epochs: float = 10
    steps: int | None = None
    delta: float = 1e-5

    def __call__(self) -> None:
        if (self.noise_multiplier is None) == (self.epsilon is None):
            raise ValueError("give either --noise-multiplier (to learn epsilon) or --epsilon (to learn the noise)")
        q, steps = sampling(self.n, self.batch_size, self.epochs)
        steps = steps if self.steps is None else self.steps
        print(
            f"q = {self.batch_size} / {self.n}, {steps} steps, delta {self.delta:g}, add or remove one example, Poisson"
        )
        for name in accounting.ACCOUNTANTS:
            if self.noise_multiplier is not None:
                sigma = self.noise_multiplier
                spent = accounting.epsilon(sigma, q, steps, self.delta, name)
            else:
                assert self.epsilon is not None
                sigma = accounting.noise_for(self.epsilon, q, steps, self.delta, name)
                spent = accounting.epsilon(sigma, q, steps, self.delta, name)
            print(f"{name.upper()}  noise multiplier {sigma:.4f}  epsilon {spent:.4f}")


@dataclass(frozen=True)
class Suggest:
    """Settings to try first, from public numbers alone, and what a run with them can know about curvature.

    Parameters
    ----------
    epsilon
        the budget.
    n
        N, the number of training examples.
    batch_size
        b, the expected batch size.
    epochs
        passes over the data; T = round(epochs N / b).
    max_grad_norm
        C, the clipping norm.
    parameters
        P, the number of weights of the network.
    delta
        delta_p.
    """

    epsilon: float = 1.0
    n: int = 50_000
    batch_size: int = 1024
    epochs: float = 10
    max_grad_norm: float = 1.0
    parameters: int = 62_006
    delta: float = 1e-5

    def __call__(self) -> None:
        q, steps = sampling(self.n, self.batch_size, self.epochs)
        if not 0 < self.max_grad_norm < math.inf:
            raise ValueError(f"max-grad-norm must be finite and > 0, got {self.max_grad_norm}")
        sigma = accounting.noise_for(self.epsilon, q, steps, self.delta)
        s = sigma * self.max_grad_norm / self.batch_size
        decay = rules.weight_decay(self.max_grad_norm, self.parameters)
        shortest = rules.least_learning_rate(steps, self.max_grad_norm)
        lr = max(rules.learning_rate(s, steps, decay), shortest)
        squares = rules.resolved_by_squares(sigma, self.batch_size, steps, self.parameters)
        price = rules.resolved_by_price(sigma, self.batch_size, steps, self.n)
        print(f"noise multiplier {sigma:.3g}, so privacy noise of {s:.3g} in each coordinate of {steps} gradients")
        print("dp-sgd-snapshots (or dp-sgd-average):")
        print(f"  --schedule constant --lr {lr:.2g} --weight-decay {decay:.2g}")
        if lr == shortest:
            print("  (a budget so strong that steps which arrive carry more noise than they should)")
        print("dp-ivon-gradsq, whose rate falls and whose curvature starts at its floor:")
        print(
            f"  --lr {lr * math.sqrt(8 / 3):.2g} --weight-decay {decay:.2g}"
            f" --hess-init {rules.hess_init(s, self.n):.2g} --beta2 {rules.beta2(max(steps, 6)):.4g}"
        )
        told = [f"{r:,.0f}" if r >= 10 else f"{r:.2g}" for r in (min(r, self.parameters) for r in (squares, price))]
        print(f"curvatures that the run can tell from zero, of {self.parameters:,}: {told[0]} by squared gradients,")
        print(f"{told[1]} by Price's theorem, both at best")


@dataclass(frozen=True)
class Attack:
    """Attack a method, and print the epsilon that it claims beside the epsilon that the attacks certify.

    Three attacks: on one step of the mechanism with all examples in the batch, on a training run of which everything
    is seen that may be released, and on the predictions of its final model. Exit status 1 when a claim is refuted.

    Parameters
    ----------
    config
        the run to attack; its seed is 0 where none is given.
    canaries
        planted examples in the training run.
    confidence
        with which no true claim is refuted, by all three attacks together.
    root
        where the data lies.
    figure
        draw the scores into this file.
    """

    config: tyro.conf.OmitArgPrefixes[train.Config]
    canaries: int = 4000
    confidence: float = 0.95
    root: Path | None = None
    figure: Path | None = None

    def __call__(self) -> None:
        if not 0.5 < self.confidence < 1:
            raise ValueError(f"confidence must be between 0.5 and 1, got {self.confidence}")
        train.check_writable(self.figure)
        config = train.resolve(replace(self.config, seed=self.config.seed or 0))
        images = data.load(config.data, self.root)
        settings: dict[str, Any] = {"significance": (1 - self.confidence) / 3}  # three attacks share it
        if config.noise_multiplier == 0:
            raise ValueError("without noise there is no claim to attack; give epsilon, or a noise_multiplier > 0")
        white = audit.white_box(config, images, canaries=self.canaries, **settings)
        black = audit.black_box(config, images, canaries=min(self.canaries, images.n // 3), **settings)
        sigma = audit.noise_of(min(white.claimed, 50.0), config.delta)  # beyond, a claim says nothing
        step = audit.full_batch(noise_multiplier=sigma, delta=config.delta, **settings)
        audits = {"one full-batch step": step, "whole run": white, "final model": black}
        print(f"attack                            claimed epsilon    certified, {self.confidence:.0%} confidence")
        for name, found in audits.items():
            for what, bound in found.bounds.items():
                print(f"{name + ', ' + what:34s}{found.claimed:12.2f}{bound:22.2f}")
        refuted = [name for name, found in audits.items() if found.rejected]
        print(f"REFUTED: {', '.join(refuted)}" if refuted else "no claim is refuted (which does not prove them)")
        if self.figure is not None:
            audit.draw(audits, self.figure)
            print(f"scores drawn in {self.figure}")
        if refuted:
            sys.exit(1)


def sampling(n: int, batch_size: int, epochs: float) -> tuple[float, int]:
    """The sampling rate q and the number of steps T."""
    if n < 1 or not 0 < batch_size <= n:
        raise ValueError(f"need 0 < batch-size <= n, got {batch_size} and {n}")
    if not 0 < epochs < math.inf:
        raise ValueError(f"epochs must be finite and > 0, got {epochs}")
    return batch_size / n, max(1, round(epochs * n / batch_size))


def summary(record: dict) -> str:
    """A record for a person: how it ended, test metrics, seconds, and what was promised."""
    seconds = "" if record["seconds"] is None else f", {record['seconds']:.0f} s"
    lines = [f"{record['status']} after {record['results']['steps']} steps{seconds}"]
    where = "held-out training examples" if record["config"]["holdout"] else "test set"
    for name in ("mean", "samples"):
        if name in record["results"]:
            value = record["results"][name]
            how = "at the mean" if name == "mean" else f"averaged over {record['config']['samples']} samples"
            lines.append(
                f"{where}, {how}: accuracy {value['accuracy']:.3f}  NLL {value['nll']:.3f}  ECE {value['ece']:.3f}  "
                f"Brier {value['brier']:.3f}  confidence - accuracy {value['overconfidence']:+.3f}"
            )
    if "temperature" in record["results"]:
        lines.append(f"at temperature {record['results']['temperature']:.3g}, which was chosen on examples set aside")
    privacy = record["privacy"]
    if privacy is None:
        return "\n".join([*lines, "not private"])
    known = accounting.PrivacyStatement.__dataclass_fields__
    fields = {name: value for name, value in privacy.items() if name in known}
    return "\n".join([*lines, str(accounting.PrivacyStatement(**fields))])


COMMANDS: dict[str, Callable[..., Any]] = {
    "train": Train,
    "epsilon": Epsilon,
    "suggest": Suggest,
    "audit": Attack,
    "compare": compare.Compare,
    "sweep": sweep.Sweep,
    "ledger": records.Ledger,
    "bench": bench.Bench,
}


def spread(words: list[str]) -> list[str]:
    """The command line with a list such as 1,3,8 as the words 1 3 8."""
    number = r"[\d.]+(?:e-?\d+)?"
    lists = re.compile(f"{number}(?:,{number})+")
    return [part for word in words for part in (word.split(",") if lists.fullmatch(word) else [word])]


def main() -> None:
    """Run one command; an error a person can mend is one line on stderr and exit status 2."""
    command = tyro.extras.subcommand_cli_from_dict(
        COMMANDS, prog="python -m dpivon", description=__doc__, args=spread(sys.argv[1:])
    )
    try:
        command()
    except (ValueError, OSError, FloatingPointError, ledger.LedgerError) as error:
        print(f"dpivon: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("dpivon: interrupted", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
