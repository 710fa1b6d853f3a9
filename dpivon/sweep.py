"""Many runs: those of a grid that the ledger lacks, on local workers or on a cluster, resumable, each recorded."""

import fcntl
import io
import logging
import os
import statistics
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, redirect_stderr
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import tyro

from dpivon import data, grid, ledger, train
from dpivon.grid import key as key

# Local workers need not chat, and Ctrl-C, which the terminal sends to all, is for the sweep to hear, not for them. And
# dask would have them hand back each freed tensor to the system, so that every step pays for new pages: a third of the
# processor's time.
LOCAL = {
    "distributed.nanny.pre-spawn-environ.MALLOC_TRIM_THRESHOLD_": None,
    "distributed.nanny.pre-spawn-environ.DASK_LOGGING__DISTRIBUTED": "critical",
    "distributed.worker.preload": ["import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n"],
}
HERE = Path(__file__).parent
PATIENCE = 30.0  # seconds, for a cluster's scheduler, and for its first worker
MISSING = "a sweep needs dask and joblib, which are not installed; pip install 'dpivon[sweep]'"


@dataclass(frozen=True)
class Sweep:
    """Run all that a grid file asks for and the ledger does not hold yet; the same command goes on where it stopped.

    A run that fails is recorded with its error, and the others go on. Several sweeps may share a ledger, at the same
    time and with overlapping grids: each run is made by one of them.

    Parameters
    ----------
    grid
        the TOML file: a table [base] of settings, and tables [[grid]] in which a list stands for each of its values.
    ledger
        the file that gets one line for each run.
    workers
        local processes, of one thread each.
    scheduler
        address of a dask scheduler, as it prints it at its start, whose workers take the place of local ones.
    resources
        what a run takes of a worker of that cluster, such as GPU=1.
    root
        where the data lies, on the workers.
    device
        where each run trains: cpu, or cuda for the GPU of its worker.
    shifted
        evaluate on corrupted and on strange images too.
    dry_run
        list what there is and what would run, with the time that earlier runs let expect, and run nothing.
    retry_failed
        run again what the ledger holds as failed.
    """

    grid: tyro.conf.Positional[Path]
    ledger: Path = Path("runs.jsonl")
    workers: int = 2
    scheduler: str | None = None
    resources: tuple[str, ...] = ()
    root: Path | None = None
    device: str = "cpu"
    shifted: bool = False
    dry_run: bool = False
    retry_failed: bool = False

    def __call__(self) -> None:
        if self.workers < 1:
            raise ValueError(f"workers must be >= 1, got {self.workers}")
        if self.resources and self.scheduler is None:
            raise ValueError("resources are what the workers of a cluster offer; give its --scheduler too")
        for text in self.resources:
            amount(text)
        train.check_writable(self.ledger)
        configs = grid.read(self.grid)
        if self.dry_run:
            print("\n".join(plan(configs, self.ledger, self.workers, self.retry_failed)))
            return
        try:
            failed = self.run(configs, lambda line: print(line, flush=True))
        except KeyboardInterrupt:
            print(f"stopped; what is done is in {self.ledger}, and the same command goes on from there", flush=True)
            sys.exit(130)
        if failed:
            print(f"{failed} failed, see their field error in {self.ledger}; --retry-failed runs them again")
            sys.exit(1)

    def run(self, configs: Iterable[train.Config], report: Callable[[str], None]) -> int:
        """Run what is missing, append each record as it comes, and return how many failed."""
        wanted = {key(config): config for config in configs}
        names = labels(wanted)
        missing = {k: c for k, c in wanted.items() if not is_done(self.ledger, k, self.retry_failed)}
        report(f"{len(wanted)} runs, {len(wanted) - len(missing)} of them in {self.ledger}, {len(missing)} to run")
        if not missing:
            return 0
        done = failed = 0
        with ExitStack() as stack:
            parallel, width = stack.enter_context(engine(self, {config.data for config in missing.values()}))
            claim = stack.enter_context(claims(f"{self.ledger}.claims"))
            left = dict(missing)

            def jobs() -> Iterator[Any]:  # asked for the next one when a worker is free, so it sees the latest ledger
                for name, config in missing.items():
                    if claim(name) and not is_done(self.ledger, name, self.retry_failed):
                        yield job, (config, self.root, self.device, self.shifted), {}
                    else:
                        del left[name]

            for record in stack.enter_context(closing(parallel(jobs()))):
                name = key(record["config"], record["recipe"])
                if name not in missing:
                    raise ValueError(
                        f"a worker ran recipe {record['recipe']} where this is recipe {train.RECIPE}, or has other "
                        "defaults; install the same dpivon on all workers"
                    )
                ledger.append(self.ledger, record)
                del left[name]
                done, failed = done + 1, failed + (record["status"] == "failed")
                rest = remaining(left.values(), records(self.ledger), width)
                report(f"{done} of {done + len(left)}  {names[name]}: {outcome(record)}{rest}")
        elsewhere = len(missing) - done
        if elsewhere:
            report(f"{elsewhere} more were made, or are being made, by another sweep; the same command tells")
        return failed


# ---- what there is already


def records(path: str | Path) -> dict[str, dict[str, Any]]:
    """The record of each run by its key: the latest finished one, else the latest that failed. Read again on change."""
    if not Path(path).exists():
        return {}
    state = Path(path).stat()
    return _records(str(path), state.st_mtime_ns, state.st_size)


@lru_cache(maxsize=4)
def _records(path: str, *state: int) -> dict[str, dict[str, Any]]:
    lines = [r for status in ("failed", "finished") for r in ledger.read(path, strict=False) if r["status"] == status]
    return {key(r["config"], r["recipe"]): r for r in lines}


def results(grid_path: str | Path, ledger_path: str | Path) -> tuple[list[dict[str, Any]], list[train.Config]]:
    """What a ledger holds of a grid, and what is missing: the finished records, in the grid's order, and the configs.

    Lines of other experiments in the same ledger are left out, as are failed runs and those of an earlier recipe.

    Raises
    ------
    ValueError
        the file is no grid.
    """
    known = {name: r for name, r in records(ledger_path).items() if r["status"] == "finished"}
    wanted = {key(config): config for config in grid.read(grid_path)}
    return [known[name] for name in wanted if name in known], [c for name, c in wanted.items() if name not in known]


def is_done(path: str | Path, name: str, retry_failed: bool) -> bool:
    """Does the ledger hold this run: finished, or failed where it is not to be tried again?"""
    record = records(path).get(name)
    return record is not None and (record["status"] == "finished" or not retry_failed)


def outcome(record: Mapping[str, Any]) -> str:
    """How a run ended, for a person."""
    if record["status"] == "failed":
        return f"FAILED, {record['error']}"
    best = record["results"].get("samples", record["results"]["mean"])
    seconds = "" if record["seconds"] is None else f"  {record['seconds']:.0f} s"
    return f"accuracy {best['accuracy']:.3f}  NLL {best['nll']:.3f}  ECE {best['ece']:.3f}{seconds}"


def shown(setting: Any) -> str:
    """A setting, for a person."""
    return f"{setting:g}" if isinstance(setting, float) else str(setting)


def labels(configs: Mapping[str, train.Config]) -> dict[str, str]:
    """A name for each run: its method, and the settings in which that method's runs differ."""
    fields = {name: asdict(config) for name, config in configs.items()}
    seen: dict[tuple[str, str], set[str]] = {}
    for f in fields.values():
        for n in f:
            seen.setdefault((f["method"], n), set()).add(repr(f[n]))
    return {
        name: " ".join([f["method"], *(f"{n}={shown(v)}" for n, v in f.items() if len(seen[f["method"], n]) > 1)])
        for name, f in fields.items()
    }


# ---- how long it takes


def expect(config: train.Config, known: Iterable[Mapping[str, Any]]) -> float | None:
    """The seconds that a run will take: the median of recorded ones of its data, network, batch, epochs and method.

    Where there are none, the median pace of what is known of its data and network; None where nothing is.
    """
    finished = [r for r in known if r["status"] == "finished" and r["seconds"] is not None]
    for same in (("data", "model", "batch_size", "epochs", "method"), ("data", "model")):
        alike = [r for r in finished if all(r["config"].get(name) == getattr(config, name) for name in same)]
        if alike:
            assert config.epochs is not None
            return statistics.median(took(r) * config.epochs / r["config"]["epochs"] for r in alike)
    return None


def took(record: Mapping[str, Any]) -> float:
    """The seconds of all of a finished run; a resumed one recorded those of its last session, for some of the steps."""
    results = record["results"]
    part = 1 - results.get("resumed_at", 0) / max(results.get("steps", 1), 1)
    seconds: float = record["seconds"] / max(part, 0.01) + record.get("cost", {}).get("predict_seconds", 0)
    return seconds


def total(configs: Iterable[train.Config], known: Mapping[str, Mapping[str, Any]], width: int) -> float | None:
    """The seconds that all will take on `width` workers; a run of which nothing is known counts like the others."""
    times = [expect(config, known.values()) for config in configs]
    told = [t for t in times if t is not None]
    return None if not told else statistics.fmean(told) * len(times) / min(width, len(times))


def remaining(configs: Iterable[train.Config], known: Mapping[str, Mapping[str, Any]], width: int) -> str:
    """The time left, as the end of a line of progress."""
    configs = list(configs)
    seconds = total(configs, known, width) if configs else None
    return "" if seconds is None else f"; about {duration(seconds)} left"


def duration(seconds: float) -> str:
    """Seconds in the unit that a person would choose."""
    for unit, size in (("h", 3600), ("min", 60)):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"


def plan(configs: Iterable[train.Config], path: Path, workers: int, retry_failed: bool = False) -> list[str]:
    """What a sweep would do, as lines: each run with its state, and the sum.

    Examples
    --------
    >>> from pathlib import Path
    >>> from dpivon import sweep, train
    >>> runs = [train.Config(seed=seed) for seed in range(3)]
    >>> runs = [train.resolve(config) for config in runs]
    >>> lines = sweep.plan(runs, Path("runs.jsonl"), workers=2)
    >>> print(lines[-1])
    3 runs, 3 to run, for a time not known yet on 2 workers
    """
    wanted = {key(config): config for config in configs}
    known, names = records(path), labels(wanted)
    missing = [config for name, config in wanted.items() if not is_done(path, name, retry_failed)]
    lines = []
    for name, config in wanted.items():
        seconds = expect(config, known.values())
        guess = "" if seconds is None else f", about {duration(seconds)}"
        state = known[name]["status"] if is_done(path, name, retry_failed) else f"to run{guess}"
        lines.append(f"{name}  {names[name]}: {state}")
    seconds = total(missing, known, workers) if missing else 0
    time_needed = "for a time not known yet" if seconds is None else f"for about {duration(seconds)}"
    return [*lines, f"{len(wanted)} runs, {len(missing)} to run, {time_needed} on {workers} workers"]


# ---- one run, in a worker


@lru_cache(maxsize=2)
def loaded(name: str, root: Path | None) -> data.Images:
    """The data, once for each worker process.

    Raises
    ------
    data.DataError
        they are not there, which concerns all runs and ends the sweep.
    """
    return train.load(name, root)


def job(config: train.Config, root: Path | None, device: str = "cpu", shifted: bool = False) -> dict[str, Any]:
    """One run on one thread: its record, or the record of its failure."""
    torch.set_num_threads(1)
    begin = time.perf_counter()
    try:
        with redirect_stderr(io.StringIO()):  # the bars of several runs would write over each other
            return train.run(config, images=loaded(config.data, root), device=device, shifted=shifted)
    except data.DataError:
        raise
    except Exception as error:
        print(f"[diagnostic, not covered by epsilon: {type(error).__name__}: {error}]", file=sys.stderr)
        return failure(config, publishable(error), time.perf_counter() - begin, device)


def publishable(error: BaseException) -> str:
    """What a record may say of an error: the message of those that dpivon words, of others the place where they came.

    That of an allocator, say, has the size of the batch in it, which is private.
    """
    if isinstance(error, ValueError | OSError | FloatingPointError):
        return f"{type(error).__name__}: {error}"
    here = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).parent == HERE]
    place = f" in {Path(here[-1].filename).name}, line {here[-1].lineno}" if here else ""
    return f"{type(error).__name__}{place}; its message, which may tell of examples, is not recorded"


def failure(config: train.Config, error: str, seconds: float, device: str = "cpu") -> dict[str, Any]:
    """The ledger's record of a run that failed: without results, with its error."""
    return {**train.entry(config, "failed", seconds, device), "error": error}


# ---- many runs


@contextmanager
def claims(path: str | Path) -> Iterator[Callable[[str], bool]]:
    """A function that takes a run for this sweep, and tells whether no other sweep that lives has it.

    A claim is a lock on one byte of a file, at the place that the key names. The system frees it when the sweep ends,
    however it ends.
    """
    with open(path, "ab") as file:

        def claim(name: str) -> bool:
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, int(name, 16) >> 2)
            except (BlockingIOError, PermissionError):  # the two ways in which systems say that another has it
                return False
            except OSError as error:
                raise OSError(
                    f"{path} cannot be locked ({error}), so two sweeps would make the same runs; put the ledger "
                    "on a file system with locks, or let one sweep work on a cluster, with --scheduler"
                ) from None
            return True

        yield claim


@contextmanager
def engine(sweep: Sweep, needed: Iterable[str]) -> Iterator[tuple[Any, int]]:
    """joblib on dask: a function from jobs to their records, in the order in which they end; and the workers' number.

    Raises
    ------
    ValueError
        dask is not installed, or the workers of the cluster do not fit.
    OSError
        there is no scheduler at that address, or it was lost.
    """
    try:
        import dask
        from dask.distributed import Client, LocalCluster
        from joblib import Parallel, parallel_config
    except ImportError:
        raise ValueError(MISSING) from None
    for logger in ("distributed", "distributed.client"):  # what they have to say, we say in one line
        logging.getLogger(logger).setLevel(logging.CRITICAL)
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", message=".*still being processed by the workers")  # once it was stopped
        if sweep.scheduler is None:
            for name in needed:  # a download happens once, and what is missing is said before workers start
                loaded(name, sweep.root)
            loaded.cache_clear()
            stack.enter_context(dask.config.set(LOCAL))
            # What a killed worker leaves behind is cleared away at the end, and no news.
            os.environ["PYTHONWARNINGS"] = "ignore:resource_tracker," + os.environ.get("PYTHONWARNINGS", "")
            # No limit of memory: at a share of it a worker would pause, silently, rather than fail.
            cluster = LocalCluster(
                n_workers=sweep.workers, threads_per_worker=1, memory_limit=None, dashboard_address=":0"
            )
            client = stack.enter_context(Client(stack.enter_context(cluster)))
            ahead = "n_jobs"  # what no worker is free for is left to another sweep
        else:
            try:
                client = stack.enter_context(Client(sweep.scheduler, timeout=PATIENCE))
            except OSError as error:
                raise OSError(f"no scheduler at {sweep.scheduler} ({error}); start one with: dask scheduler") from None
            ahead = "all"  # workers may join later, and the scheduler has work for them
        resources = dict(amount(text) for text in sweep.resources)
        width = fitting(client, resources)
        stack.enter_context(parallel_config(backend=backend(client, resources)))
        yield Parallel(return_as="generator_unordered", batch_size=1, pre_dispatch=ahead), width


def backend(client: Any, resources: Mapping[str, float]) -> Any:
    """joblib's backend for dask; but where that would wait without end, for a run that kills its workers, it fails."""
    from dask.distributed import KilledWorker
    from joblib._dask import DaskDistributedBackend

    class Backend(DaskDistributedBackend):
        def effective_n_jobs(self, n_jobs: int) -> int:
            return max(2, super().effective_n_jobs(n_jobs))  # for one, joblib would run all in this very process

        def submit(self, func: Any, callback: Any = None) -> Any:
            ((_, (config, *_), _),) = func.items

            def ended(future: Any) -> None:
                error = future.exception()
                if isinstance(error, KilledWorker):
                    callback([failure(config, "its worker died each time; too little memory?", 0.0)])
                elif error is not None:
                    callback(error)

            future = super().submit(func, callback)
            future.add_done_callback(ended)
            return future

        def retrieve_result_callback(self, out: Any) -> Any:
            if isinstance(out, BaseException):  # not the run's own: lost connections, workers without dpivon
                raise OSError(f"the workers cannot go on: {type(out).__name__}: {out}; what is done is recorded")
            return super().retrieve_result_callback(out)

    return Backend(client=client, **({"resources": resources} if resources else {}))


def amount(text: str) -> tuple[str, float]:
    """A resource such as GPU=1 as name and number."""
    name, _, number = text.partition("=")
    try:
        return name, float(number)
    except ValueError:
        raise ValueError(f"a resource is a name and a number, such as GPU=1, got {text!r}") from None


def fitting(client: Any, resources: Mapping[str, float]) -> int:
    """How many workers a run can go to. It needs one of a single thread, since it sets its process' random state."""
    options = "".join(f" --resources {name}={number:g}" for name, number in resources.items())
    start = f"start them with: dask worker ADDRESS --nthreads 1 --memory-limit 0{options}"
    deadline = time.monotonic() + PATIENCE
    while True:
        found = client.scheduler_info(n_workers=-1)["workers"].values()
        fit = [w for w in found if all(w["resources"].get(name, 0) >= number for name, number in resources.items())]
        if fit:
            break
        if time.monotonic() > deadline:
            offer = " that offers " + " ".join(f"{n}={x:g}" for n, x in resources.items()) if resources else ""
            raise ValueError(f"the cluster has {len(found)} workers and needs one{offer}; {start}")
        time.sleep(0.2)
    threads = max(w["nthreads"] for w in fit)
    if threads > 1:
        raise ValueError(f"a worker has {threads} threads, and runs must not share a process; {start}")
    return len(fit)
