"""Two processes train as one: masks for each, noise once, the same draw of the weights, empty local batches in step."""

import os
import subprocess
import sys
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from opacus.accountants import RDPAccountant
from opacus.optimizers import DistributedDPOptimizer
from torch import nn
from torch.utils.data import TensorDataset

from dpivon import adaptive, door, ledger, mechanism, models
from dpivon.ivon import IVON

WORLD, N, B, STEPS = 2, 40, 3, 12
SETTINGS = {"noise_multiplier": 0.5, "max_grad_norm": 0.7, "batch_size": B, "n": N}
SOURCE = torch.Generator().manual_seed(0)
X, Y = torch.randn(N, 1, 4, 4, generator=SOURCE).double(), torch.randint(0, 3, (N,), generator=SOURCE)
SAMPLES = {"dp-sgd": None, "dp-ivon-gradsq": None, "dp-ivon-gradsq, two draws": 2}


def seeded(seed):
    return mechanism.new_generator(seed)


def network(hidden=8):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return models.mlp((1, 4, 4), 3, hidden=hidden).double()


def optimizer_of(name, model, posterior=1):
    if name == "dp-sgd":
        return adaptive.sgd(model.parameters(), lr=0.5)
    return IVON(model.parameters(), lr=0.5, ess=N, hess_init=0.5, generator=seeded(posterior))


def train(name, batches, noise):
    """The loop; what it leaves: the weights, every private gradient, the noise scale told, the account."""
    model, accountant = network(), RDPAccountant()
    optimizer = optimizer_of(name, model)
    dp = mechanism.mechanism(optimizer, accountant=accountant, generator=noise, **SETTINGS)
    gradients = []
    for index in batches:
        if SAMPLES[name]:
            mechanism.private_gradient(model, F.cross_entropy, X[index], Y[index], dp, samples=SAMPLES[name])
        else:
            with optimizer.sampled_params():
                mechanism.private_gradient(model, F.cross_entropy, X[index], Y[index], dp)
        gradients.append(flat([p.grad for p in model.parameters()]))
        optimizer.step()
    told = optimizer.param_groups[0].get("noise_std")
    return flat(model.parameters()).detach(), gradients, told, accountant.history


def flat(tensors):
    return torch.cat([t.flatten() for t in tensors]).clone()


def refusal(function, *arguments, **settings):
    """The message of the ValueError that a call raises; all processes must raise it, or the rest would hang."""
    with pytest.raises(ValueError) as error:  # noqa: PT011
        function(*arguments, **settings)
    return str(error.value)


def gradient_of(model, optimizer, dp):
    with optimizer.sampled_params():
        mechanism.private_gradient(model, F.cross_entropy, X[:3], Y[:3], dp)


def worker(rank, folder):
    """What each process does; its results go to a file."""
    torch.set_num_threads(1)
    early_model = network()
    early_optimizer = optimizer_of("dp-sgd", early_model)
    early = mechanism.mechanism(early_optimizer, **SETTINGS)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=WORLD, timeout=timedelta(seconds=60)
    )
    try:
        batches = list(mechanism.poisson_batches(N, B, STEPS, seeded(10 + rank)))
        # Only the first process's noise counts: the other's generator may hold anything.
        found = {name: train(name, batches, seeded(5 + 100 * rank)) for name in SAMPLES}

        model = network(hidden=3000)
        dp = mechanism.mechanism(optimizer_of("dp-sgd", model), **SETTINGS, generator=seeded(rank))
        mechanism.private_gradient(model, F.cross_entropy, X[:0], Y[:0], dp)
        noise = flat([p.grad for p in model.parameters()])

        p = nn.Parameter(torch.zeros(100_000))
        hooks = DistributedDPOptimizer(
            torch.optim.SGD([p], lr=1.0), noise_multiplier=2.0, max_grad_norm=0.5, expected_batch_size=4
        )
        p.grad_sample = torch.zeros(1, 100_000)
        hooks.pre_step()
        hooks.reduce_gradients()

        drifted = network()
        with torch.no_grad():
            next(drifted.parameters()).add_(1e-3 * rank)
        other_draws = network()
        sgd, ivon = optimizer_of("dp-sgd", drifted), optimizer_of("dp-ivon-gradsq", other_draws, posterior=rank)
        linear = nn.Linear(16, 3)
        refused = {
            "masks": refusal(next, mechanism.poisson_batches(N, B, 1, seeded(0))),
            "weights": refusal(gradient_of, drifted, sgd, mechanism.mechanism(sgd, **SETTINGS)),
            "draws": refusal(gradient_of, other_draws, ivon, mechanism.mechanism(ivon, **SETTINGS)),
            "early": refusal(gradient_of, early_model, early_optimizer, early),
            "door": refusal(
                door.make_private, linear, torch.optim.SGD(linear.parameters(), lr=0.1), TensorDataset(X, Y),
                loss=nn.CrossEntropyLoss(), noise_multiplier=1.0, max_grad_norm=1.0, batch_size=2,
            ),
        }  # fmt: skip
        state = {
            "batches": batches, "found": found, "refused": refused, "noise": noise, "told": mechanism.noise_std(dp),
            "opacus": (float(p.grad.std()), mechanism.noise_std(hooks)),
        }  # fmt: skip
        torch.save(state, f"{folder}/{rank}.pt")
        dist.barrier()
    finally:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def processes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("processes")
    mp.spawn(worker, (str(folder),), nprocs=WORLD)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(WORLD)]


def test_each_process_draws_from_its_own_share_and_empty_batches_stay_in_step(processes):
    batches = [process["batches"] for process in processes]
    for rank, mine in enumerate(batches):
        assert len(mine) == STEPS
        assert all((index % WORLD == rank).all() for index in mine)
    sizes = torch.tensor([[len(index) for index in mine] for mine in batches])
    assert ((sizes == 0).any(0) & (sizes > 0).any(0)).any()  # the case that makes Opacus' loaders fall out of step
    halves = [[index.div(WORLD, rounding_mode="floor").tolist() for index in mine] for mine in batches]
    assert halves[0] != halves[1]  # not the same mask twice


@pytest.mark.parametrize("name", list(SAMPLES))
def test_two_processes_take_the_steps_of_one(processes, name):
    union = [torch.cat(parts) for parts in zip(*(process["batches"] for process in processes), strict=True)]
    weights, gradients, told, history = train(name, union, seeded(5))
    for process in processes:
        its_weights, its_gradients, its_told, its_history = process["found"][name]
        torch.testing.assert_close(torch.stack(its_gradients), torch.stack(gradients), rtol=0, atol=1e-12)
        torch.testing.assert_close(its_weights, weights, rtol=0, atol=1e-10)
        assert its_told == pytest.approx(told)
        assert its_history == history == [(0.5, B / N, STEPS)]
    assert (weights - flat(network().parameters())).abs().max() > 0.01  # it has moved
    first, second = (process["found"][name][0] for process in processes)
    assert torch.equal(first, second)


def test_noise_is_added_once(processes):
    first, second = (process["noise"] for process in processes)
    assert torch.equal(first, second)
    assert processes[0]["told"] == pytest.approx(0.5 * 0.7 / B)
    assert float(first.std()) == pytest.approx(0.5 * 0.7 / B, rel=0.02)


def test_noise_std_is_right_for_opacus_distributed_optimizer(processes):
    for process in processes:
        measured, told = process["opacus"]
        assert told == pytest.approx(2.0 * 0.5 / (4 * WORLD))
        assert measured == pytest.approx(told, rel=0.02)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("masks", "same seed, so examples are not drawn independently"),
        ("weights", "hold different weights"),
        ("draws", "generators of the same seed"),
        ("early", "before the 2 processes were joined"),
        ("door", "make_private is for one process"),
    ],
)
def test_what_would_break_the_guarantee_is_refused_by_all(processes, case, message):
    assert all(message in process["refused"][case] for process in processes)


# ---- a whole run by torchrun


def launched(folder, *arguments, processes):
    """`python -m dpivon train`, alone or by torchrun; the ledger's lines and what was printed."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"] if processes > 1 else []
    command = [sys.executable, *torchrun, "-m", "dpivon", "train", "--ledger", f"{folder}/runs.jsonl", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)
    assert ended.returncode == 0, ended.stderr
    return ledger.read(f"{folder}/runs.jsonl"), ended.stdout


def test_torchrun_trains_one_model_and_records_one_line(tmp_path):
    """With all examples in each batch there are no masks, so two processes must do what one does, noise included."""
    settings = ["--method", "dp-ivon-gradsq", "--batch-size", "1438", "--epochs", "5", "--seed", "0"]
    settings += ["--noise-multiplier", "5"]
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    (alone,), _ = launched(tmp_path / "one", *settings, processes=1)
    checkpoint = ["--checkpoint", str(tmp_path / "run"), "--export", str(tmp_path / "posterior")]
    (together,), printed = launched(tmp_path / "two", *settings, *checkpoint, processes=2)
    assert printed.count("recorded in") == printed.count("finished after 5 steps") == 1
    assert together["hardware"]["processes"] == 2
    assert together["privacy"] == alone["privacy"]
    for how in ("mean", "samples"):
        assert together["results"][how] == pytest.approx(alone["results"][how], abs=1e-3)
    last, its_last = alone["results"]["trace"][-1], together["results"]["trace"][-1]
    assert its_last == pytest.approx(last, rel=1e-3)
    assert sorted(path.name for path in tmp_path.glob("run*")) == ["run", "run of process 1"]
    assert (tmp_path / "posterior").exists()


def test_a_method_without_a_mechanism_is_refused_by_all(tmp_path):
    with pytest.raises(AssertionError, match="only the mechanism adds up the gradients of several processes"):
        launched(tmp_path, "--method", "sgd", "--epochs", "1", processes=2)
    assert not (tmp_path / "runs.jsonl").exists()
