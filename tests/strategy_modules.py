"""What people do with modules and optimizers: under every strategy as on one device.

A recipe makes its modules in the strategy's scope, trains three steps, the last batch uneven, and
returns what must be the same however many replicas there are.
"""

from __future__ import annotations

import copy
import functools
import io
import pickle
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle
import fastdist as fd
import pytest
import torch
import torch.nn.functional as F
from fastdist import Strategy
from fastdist.errors import FastdistError
from strategy_contract import batch, require_close
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

Recipe = Callable[[Strategy], list[torch.Tensor]]
RECIPES: list[Recipe] = []


def recipe(function: Recipe) -> Recipe:
    RECIPES.append(function)
    return function


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.second = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


def steps(strategy: Strategy, step: Any) -> Iterator[Any]:
    """Runs `step(x, y)` on each of three batches; what it returns."""
    generator = torch.Generator().manual_seed(2)
    for size in (12, 12, 7):
        x = torch.randn(size, 6, generator=generator)
        y = torch.randn(size, 2, generator=generator)
        yield strategy.run(step, args=batch(strategy, x, y))


def finish(strategy: Strategy, *models: nn.Module) -> list[torch.Tensor]:
    strategy.check_in_sync()
    return [p.detach().clone().float() for model in models for p in model.parameters()]


def made(strategy: Strategy, make: Any = Net, optimizer: Any = None) -> Any:
    torch.manual_seed(1)
    optimizer = optimizer or functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    with strategy.scope():
        model = make()
        return model, optimizer(model.parameters())


def simple(strategy: Strategy, model: Any, optimizer: Any, loss_of: Any = F.mse_loss) -> None:
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        loss_of(model(x), y).backward()
        optimizer.step()

    for _ in steps(strategy, step):
        pass


@recipe
def gradient_penalty(strategy: Strategy) -> list[torch.Tensor]:
    model, optimizer = made(strategy)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        x.requires_grad_()
        out = model(x)
        (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        (F.mse_loss(out, y) + grad.square().sum(1).mean()).backward()
        optimizer.step()

    for _ in steps(strategy, step):
        pass
    return finish(strategy, model)


@recipe
def backward_twice(strategy: Strategy) -> list[torch.Tensor]:
    """A graph kept, and a second loss on it; both are summed in `.grad`."""
    model, optimizer = made(strategy)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        out = model(x)
        F.mse_loss(out, y).backward(retain_graph=True)
        out.square().mean().backward()
        optimizer.step()

    for _ in steps(strategy, step):
        pass
    return finish(strategy, model)


@recipe
def create_graph_in_backward(strategy: Strategy) -> list[torch.Tensor]:
    model, optimizer = made(strategy)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            F.mse_loss(model(x), y).backward(create_graph=True)
        for p in model.parameters():
            p.grad = p.grad.detach()
        optimizer.step()

    for _ in steps(strategy, step):
        pass
    return finish(strategy, model)


@recipe
def grad_by_hand(strategy: Strategy) -> list[torch.Tensor]:
    """torch.autograd.grad gives the replica's own; the context reduces it."""
    model, optimizer = made(strategy)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        context = fd.get_replica_context()
        parameters = list(model.parameters())
        loss = F.mse_loss(model(x), y) if len(x) else 0 * model(x).sum()
        grads = torch.autograd.grad(loss, parameters)
        for p, grad in zip(parameters, grads, strict=True):
            p.grad = context.all_reduce("mean", grad * context.weight)
        optimizer.step()

    for _ in steps(strategy, step):
        pass
    return finish(strategy, model)


@recipe
def checkpointed_with_dropout(strategy: Strategy) -> list[torch.Tensor]:
    """Recomputed in backward with the same mask: else the gradient is that of another loss."""
    torch.manual_seed(1)
    with strategy.scope():
        model = nn.Sequential(nn.Linear(6, 300), nn.Dropout(0.5))
    for reentrant in (True, False):

        def step(x: torch.Tensor, reentrant: bool = reentrant) -> bool:
            model.zero_grad()
            torch.rand(3)
            with strategy.no_sync():
                x = x.requires_grad_()
                out = checkpoint(model, x, use_reentrant=reentrant)
                torch.rand(5)
                out.sum().backward()
            kept = (out != 0).float().sum(0) * 2
            return torch.equal(model[0].bias.grad, kept)

        rows = strategy.distribute_values_from_function(lambda context: torch.ones(4, 6))
        for _ in range(5):
            assert all(strategy.local_results(strategy.run(step, args=(rows,))))
    return finish(strategy, model)


@recipe
def checkpointed(strategy: Strategy) -> list[torch.Tensor]:
    model, optimizer = made(strategy)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        hidden = checkpoint(model.first, x, use_reentrant=False)
        out = checkpoint(lambda h: model.second(torch.tanh(h)), hidden, use_reentrant=True)
        F.mse_loss(out, y).backward()
        optimizer.step()

    for _ in steps(strategy, step):
        pass
    return finish(strategy, model)


@recipe
def autocast_and_scaler(strategy: Strategy) -> list[torch.Tensor]:
    torch.manual_seed(1)
    with strategy.scope():
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
    scales = []

    def step(x: torch.Tensor, y: torch.Tensor) -> float:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=False):
            loss = F.mse_loss(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        return scaler.get_scale()

    for scale in steps(strategy, step):
        scales.append(scale)
    assert scaler.get_scale() == 64.0
    return finish(strategy, model)


@recipe
def overflow_on_one_replica(strategy: Strategy) -> list[torch.Tensor]:
    """All skip the step that only one would."""
    torch.manual_seed(1)
    with strategy.scope():
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)

    def step(x: torch.Tensor, y: torch.Tensor) -> float:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        if fd.get_replica_context().replica_id_in_sync_group == 0:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return scaler.get_scale()

    for scales in steps(strategy, step):
        assert len(set(strategy.local_results(scales))) == 1
    assert scaler.get_scale() == 1.0
    return finish(strategy, model)


@recipe
def bfloat16_autocast(strategy: Strategy) -> list[torch.Tensor]:
    model, optimizer = made(strategy)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = model(x)
            assert out.dtype == torch.bfloat16
        F.mse_loss(out.float(), y).backward()
        optimizer.step()

    for _ in steps(strategy, step):
        pass
    return [(p * 20).round() / 20 * 0 for p in finish(strategy, model)]


@recipe
def clipped_by_norm_and_value(strategy: Strategy) -> list[torch.Tensor]:
    model, optimizer = made(strategy)

    def step(x: torch.Tensor, y: torch.Tensor) -> float:
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        nn.utils.clip_grad_value_(model.parameters(), 0.1)
        optimizer.step()
        return float(norm)

    norms = [strategy.local_results(norm)[0] for norm in steps(strategy, step)]
    return [*finish(strategy, model), torch.tensor(norms)]


@recipe
def frozen_then_unfrozen(strategy: Strategy) -> list[torch.Tensor]:
    torch.manual_seed(1)
    with strategy.scope():
        model = Net()
        model.first.requires_grad_(False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()

    for _ in steps(strategy, step):
        model.first.requires_grad_(True)
    model.second.bias.requires_grad = False
    simple(strategy, model, optimizer)
    return finish(strategy, model)


@recipe
def frozen_and_unfrozen_inside_run(strategy: Strategy) -> list[torch.Tensor]:
    model, optimizer = made(strategy)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        for first in (True, False):
            optimizer.zero_grad()
            model.first.requires_grad_(first)
            model.second.requires_grad_(not first)
            F.mse_loss(model(x), y).backward()
            optimizer.step()
        model.requires_grad_(True)

    for _ in steps(strategy, step):
        pass
    return finish(strategy, model)


class Containers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.ParameterList([nn.Parameter(torch.randn(6, 4)) for _ in range(2)])
        self.named = nn.ParameterDict({"out": nn.Parameter(torch.randn(4, 2))})
        self.tied = nn.Linear(6, 4)
        self.tied.weight = nn.Parameter(self.tied.weight.detach().clone())
        self.again = nn.Linear(6, 4)
        self.again.weight = self.tied.weight
        self.layers = nn.ModuleDict({"a": nn.Linear(2, 2)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = sum(x @ row for row in self.rows) + self.tied(x) + self.again(x)
        return self.layers["a"](torch.tanh(hidden) @ self.named["out"])


@recipe
def containers_and_tied_weights(strategy: Strategy) -> list[torch.Tensor]:
    model, optimizer = made(strategy, Containers)
    simple(strategy, model, optimizer)
    assert model.tied.weight is model.again.weight

    def tied() -> bool:
        return model.tied.weight is model.again.weight and len(list(model.parameters())) == 8

    assert all(strategy.local_results(strategy.run(tied)))
    return finish(strategy, model)


@recipe
def weights_tied_between_modules(strategy: Strategy) -> list[torch.Tensor]:
    torch.manual_seed(1)
    with strategy.scope():
        one, two = nn.Linear(6, 2), nn.Linear(6, 2)
        two.weight = one.weight
        optimizer = torch.optim.SGD([*one.parameters(), two.bias], lr=0.1)
    simple(strategy, lambda x: one(x) * two(x), optimizer)
    return finish(strategy, one, two)


@recipe
def functional_calls(strategy: Strategy) -> list[torch.Tensor]:
    model, optimizer = made(strategy)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        doubled = {name: 2 * p for name, p in model.named_parameters()}
        out = torch.func.functional_call(model, doubled, (x,))
        F.mse_loss(out, y).backward()
        optimizer.step()

    for _ in steps(strategy, step):
        pass
    return finish(strategy, model)


@recipe
def averages_of_weights(strategy: Strategy) -> list[torch.Tensor]:
    """An EMA by hand on a deep copy, and torch's, made in scope and outside."""
    torch.manual_seed(1)
    with strategy.scope():
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        inside = torch.optim.swa_utils.AveragedModel(model)
        ema = copy.deepcopy(model).requires_grad_(False)
    outside = torch.optim.swa_utils.AveragedModel(model)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        inside.update_parameters(model)
        with torch.no_grad():
            for mean, p in zip(ema.parameters(), model.parameters(), strict=True):
                mean.lerp_(p, 0.5)
        return inside(x).detach().sum()

    for _ in steps(strategy, step):
        outside.update_parameters(model)
    return finish(strategy, model, inside, ema, outside)


@recipe
def lbfgs(strategy: Strategy) -> list[torch.Tensor]:
    model, optimizer = made(
        strategy,
        optimizer=functools.partial(
            torch.optim.LBFGS, lr=0.5, max_iter=4, line_search_fn="strong_wolfe"
        ),
    )

    def step(x: torch.Tensor, y: torch.Tensor) -> float:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            return loss

        return float(optimizer.step(closure).detach())

    losses = [strategy.local_results(loss)[0] for loss in steps(strategy, step)]
    return [*finish(strategy, model), torch.tensor(losses)]


@recipe
def groups_and_schedulers(strategy: Strategy) -> list[torch.Tensor]:
    schedulers = torch.optim.lr_scheduler
    torch.manual_seed(1)
    with strategy.scope():
        model = Net()
        extra = nn.Linear(2, 2)
        optimizer = torch.optim.AdamW(
            [
                {"params": model.first.parameters(), "lr": 1e-2},
                {"params": model.second.parameters(), "weight_decay": 0.1},
            ],
            lr=1e-1,
        )
        cosine = schedulers.CosineAnnealingLR(optimizer, 10)
        plateau = schedulers.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    rates = []

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(extra(model(x)), y)
        loss.backward()
        optimizer.step()
        cosine.step()
        return loss.detach()

    for i in range(2):
        for _ in steps(strategy, step):
            plateau.step(1.0)
            rates.append(optimizer.param_groups[0]["lr"])
        if i == 0:
            optimizer.add_param_group({"params": extra.parameters(), "lr": 1e-3})
            cosine = schedulers.StepLR(optimizer, 1)
    return [*finish(strategy, model, extra), torch.tensor(rates)]


@recipe
def one_cycle(strategy: Strategy) -> list[torch.Tensor]:
    torch.manual_seed(1)
    schedulers = torch.optim.lr_scheduler
    with strategy.scope():
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        cycle = schedulers.OneCycleLR(optimizer, 0.2, total_steps=10)

    def step(x: torch.Tensor, y: torch.Tensor) -> tuple[float, ...]:
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        cycle.step()
        group = optimizer.param_groups[0]
        return group["lr"], group["momentum"], cycle.get_last_lr()[0]

    rates = [strategy.local_results(a) for one in steps(strategy, step) for a in one]
    assert all(len(set(rate)) == 1 for rate in rates)
    return [*finish(strategy, model), torch.tensor([rate[0] for rate in rates])]


@recipe
def sequential_schedulers(strategy: Strategy) -> list[torch.Tensor]:
    torch.manual_seed(1)
    schedulers = torch.optim.lr_scheduler
    with strategy.scope():
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        chained = schedulers.SequentialLR(
            optimizer,
            [
                schedulers.LinearLR(optimizer, 0.5, total_iters=2),
                schedulers.ExponentialLR(optimizer, 0.9),
            ],
            [2],
        )

    def step(x: torch.Tensor, y: torch.Tensor) -> float:
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        chained.step()
        return optimizer.param_groups[0]["lr"]

    rates = [strategy.local_results(one) for one in steps(strategy, step)]
    assert all(len(set(rate)) == 1 for rate in rates)
    return [*finish(strategy, model), torch.tensor([rate[0] for rate in rates])]


class Positive(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.softplus(x)


@recipe
def parametrized(strategy: Strategy) -> list[torch.Tensor]:
    def make() -> nn.Module:
        model = Net()
        parametrizations.weight_norm(model.first)
        parametrize.register_parametrization(model.second, "weight", Positive())
        return model

    model, optimizer = made(strategy, make)
    simple(strategy, model, optimizer)
    return finish(strategy, model)


@recipe
def parametrized_after_the_scope(strategy: Strategy) -> list[torch.Tensor]:
    model, _ = made(strategy)
    parametrizations.weight_norm(model.first)
    with strategy.scope():
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    simple(strategy, model, optimizer)
    return finish(strategy, model)


@recipe
def spectral_norm(strategy: Strategy) -> list[torch.Tensor]:
    def make() -> nn.Module:
        model = Net()
        parametrizations.spectral_norm(model.first)
        return model

    model, optimizer = made(strategy, make)
    simple(strategy, model, optimizer)
    return [*finish(strategy, model), *(b.clone() for b in model.buffers())]


@recipe
def other_dtype(strategy: Strategy) -> list[torch.Tensor]:
    model, _ = made(strategy)
    model.to(torch.float64)
    with strategy.scope():
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        F.mse_loss(model(x.double()), y.double()).backward()
        optimizer.step()

    for _ in steps(strategy, step):
        pass
    assert model.first.weight.dtype == torch.float64
    model.float()
    simple(strategy, model, optimizer)
    model.half()

    def dtype() -> Any:
        return model.first.weight.dtype

    assert set(strategy.local_results(strategy.run(dtype))) == {torch.float16}
    return finish(strategy, model)


@recipe
def initialised_and_loaded(strategy: Strategy) -> list[torch.Tensor]:
    torch.manual_seed(1)

    def init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.1)

    with strategy.scope():
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model.apply(init)
    simple(strategy, model, optimizer)
    torch.manual_seed(3)
    model.load_state_dict(Net().state_dict(), assign=True)
    with strategy.scope():
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    simple(strategy, model, optimizer)
    return finish(strategy, model)


@recipe
def saved_and_restored(strategy: Strategy) -> list[torch.Tensor]:
    model, optimizer = made(strategy, optimizer=functools.partial(torch.optim.AdamW, lr=0.01))
    simple(strategy, model, optimizer)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    whole = pickle.loads(cloudpickle.dumps(model))
    twin = copy.deepcopy(optimizer)
    assert type(twin) is torch.optim.AdamW
    simple(strategy, model, optimizer)
    file.seek(0)
    saved = torch.load(file)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    simple(strategy, model, optimizer)
    return [*finish(strategy, model), *(p.detach() for p in whole.parameters())]


@recipe
def train_and_eval(strategy: Strategy) -> list[torch.Tensor]:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.9), nn.Linear(8, 2))

    model, optimizer = made(strategy, make)
    model.eval()
    simple(strategy, model, optimizer)

    def step() -> bool:
        model.train()
        inside = model[1].training
        model.eval()
        return inside and not model[1].training

    model.train()
    assert all(strategy.local_results(strategy.run(step)))
    assert not model.training
    return finish(strategy, model)


@recipe
def forward_and_backward_hooks(strategy: Strategy) -> list[torch.Tensor]:
    torch.manual_seed(1)
    with strategy.scope():
        model = Net()
        model.first.register_forward_hook(lambda module, args, out: out * 2)
        model.second.weight.register_hook(lambda grad: grad * 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    later = model.second.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    model.second.register_full_backward_hook(lambda module, given, out: (given[0] * 2,))
    model.first.bias.register_hook(lambda grad: grad * 5)
    simple(strategy, model, optimizer)
    later.remove()
    simple(strategy, model, optimizer)
    return finish(strategy, model)


class Wrapper(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any) -> Any:
        return self.module(*args)


@recipe
def wrapped(strategy: Strategy) -> list[torch.Tensor]:
    """Wrappers made outside; parallel ones of torch that do nothing on a CPU."""
    model, optimizer = made(strategy)
    simple(strategy, Wrapper(model), optimizer)
    simple(strategy, nn.DataParallel(model), optimizer)
    simple(strategy, nn.Sequential(model, nn.Identity()), optimizer)
    with strategy.scope():
        inside = Wrapper(model)
    simple(strategy, inside, optimizer)
    return finish(strategy, inside)


@recipe
def part_replaced(strategy: Strategy) -> list[torch.Tensor]:
    """A new head, in the scope again, as for fine-tuning."""
    model, optimizer = made(strategy)
    simple(strategy, model, optimizer)
    torch.manual_seed(3)
    with strategy.scope():
        model.second = nn.Linear(8, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    simple(strategy, model, optimizer)
    return finish(strategy, model)


@recipe
def accumulated(strategy: Strategy) -> list[torch.Tensor]:
    """With no_sync inside the step, around runs, and without it."""
    model, optimizer = made(strategy)

    def add(x: torch.Tensor, y: torch.Tensor) -> None:
        F.mse_loss(model(x), y).backward()

    def apply() -> None:
        optimizer.step()
        optimizer.zero_grad()

    for _ in steps(strategy, add):
        pass
    strategy.run(apply)
    return finish(strategy, model)


@recipe
def optimizer_hooks(strategy: Strategy) -> list[torch.Tensor]:
    torch.manual_seed(1)
    with strategy.scope():
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def halve(optimizer: Any, args: Any, kwargs: Any) -> None:
            for group in optimizer.param_groups:
                for p in group["params"]:
                    p.grad.mul_(0.5)

        optimizer.register_step_pre_hook(halve)
    simple(strategy, model, optimizer)
    return finish(strategy, model)


@recipe
def optimizer_in_backward(strategy: Strategy) -> list[torch.Tensor]:
    """Gradients set to None, accumulated into, and detached, between steps."""
    model, optimizer = made(strategy)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        F.mse_loss(model(x), y).backward()
        optimizer.step()

    for _ in steps(strategy, step):
        pass
    return finish(strategy, model)


@recipe
def cleared_and_clipped_outside_run(strategy: Strategy) -> list[torch.Tensor]:
    """Backward in one run, the step in another, and gradients changed between them."""
    model, optimizer = made(strategy)

    def backward(x: torch.Tensor, y: torch.Tensor) -> None:
        F.mse_loss(model(x), y).backward()

    optimizer.zero_grad()
    for _ in steps(strategy, backward):
        nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        model.first.bias.grad = torch.ones(8)
        strategy.run(lambda: optimizer.step())
        optimizer.zero_grad()
    return finish(strategy, model)


@recipe
def stepped_outside_run(strategy: Strategy) -> list[torch.Tensor]:
    """And inside again: momentum has followed."""
    model, optimizer = made(strategy, optimizer=functools.partial(torch.optim.AdamW, lr=0.01))

    def backward(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()

    for _ in range(2):
        for _ in steps(strategy, backward):
            optimizer.step()
        simple(strategy, model, optimizer)
    return finish(strategy, model)


@recipe
def plateau_inside_run(strategy: Strategy) -> list[torch.Tensor]:
    torch.manual_seed(1)
    with strategy.scope():
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.1))
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1, factor=0.5)

    def step(x: torch.Tensor, y: torch.Tensor) -> float:
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        plateau.step(1.0)
        return float(optimizer.param_groups[0]["lr"])

    rates = [strategy.local_results(one) for one in steps(strategy, step)]
    for rate, wanted in zip(rates, (0.1, 0.1, 0.05), strict=True):
        assert rate == pytest.approx((wanted,) * len(rate))
    return finish(strategy, model)


@recipe
def changed_without_the_scope(strategy: Strategy) -> list[torch.Tensor]:
    """Tensors replaced, parts exchanged, attributes set and deleted, between runs."""
    model, optimizer = made(strategy)
    simple(strategy, model, optimizer)
    torch.manual_seed(3)
    fresh = Net().state_dict()
    model.load_state_dict(fresh, assign=True)
    optimizer.param_groups[0]["params"] = list(model.parameters())
    optimizer.state.clear()
    simple(strategy, model, optimizer)
    torch.manual_seed(4)
    model.second = nn.Sequential(nn.Linear(8, 2), nn.Tanh())
    model.scale = torch.tensor(3.0)
    model.unused = 1
    del model.unused
    optimizer.param_groups[0]["params"] = list(model.parameters())
    simple(strategy, lambda x: model(x) * model.scale, optimizer)
    model.second[1] = nn.Sigmoid()
    model.first.bias.data = torch.ones(8)
    simple(strategy, model, optimizer)
    model.first.bias = None
    simple(strategy, model, optimizer)
    return finish(strategy, model)


@recipe
def exchanged_inside_run(strategy: Strategy) -> list[torch.Tensor]:
    """Each replica gives its model a new part; it trains with the others' from the next run on."""
    model, optimizer = made(strategy)

    def exchange() -> None:
        model.second = nn.Linear(8, 2)
        for parameter in model.second.parameters():
            nn.init.ones_(parameter)
        optimizer.param_groups[0]["params"] = list(model.parameters())

    simple(strategy, model, optimizer)
    strategy.run(exchange)
    simple(strategy, model, optimizer)
    return finish(strategy, model)


@recipe
def adversarial(strategy: Strategy) -> list[torch.Tensor]:
    """Two models and two optimizers in turn, as a GAN's; one is frozen while the other trains."""
    torch.manual_seed(1)
    with strategy.scope():
        one, two = nn.Linear(6, 6), Net()
        first = torch.optim.Adam(one.parameters(), lr=0.01)
        second = torch.optim.RMSprop(two.parameters(), lr=0.01)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        second.zero_grad()
        F.mse_loss(two(one(x).detach()), y).backward()
        second.step()
        two.requires_grad_(False)
        first.zero_grad()
        (-F.mse_loss(two(one(x)), y)).backward()
        first.step()
        two.requires_grad_(True)

    for _ in steps(strategy, step):
        pass
    return finish(strategy, one, two)


@functools.cache
def on_one_device(recipe: Recipe) -> list[torch.Tensor]:
    return recipe(fd.OneDeviceStrategy("cpu"))


class StrategyModules:
    """Bound to a kind of replicas, beside the contract."""

    @pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.__name__)
    def test_trains_as_on_one_device(self, strategies: Any, recipe: Recipe) -> None:
        def case(strategy: Strategy) -> None:
            require_close(recipe(strategy), on_one_device(recipe), 4e-5)

        strategies.run(case)

    def test_a_step_in_the_middle_of_backward(self, strategies: Any) -> None:
        def case(strategy: Strategy) -> None:
            model, optimizer = made(strategy)

            def apply(parameter: torch.Tensor) -> None:
                optimizer.step()

            model.first.weight.register_post_accumulate_grad_hook(apply)
            with pytest.raises(FastdistError, match=r"SGD.step\(\) was called in the middle of"):
                simple(strategy, model, optimizer)

        strategies.run(case)

    def test_parameters_that_are_in_no_module(self, strategies: Any) -> None:
        def case(strategy: Strategy) -> None:
            model, _ = made(strategy)
            with strategy.scope():
                scale = nn.Parameter(torch.ones(3))
                optimizer = torch.optim.SGD([*model.parameters(), scale], lr=0.1)
            with pytest.raises(ValueError, match=r"shape \(3,\) that is in none of the strategy's"):
                simple(strategy, model, optimizer)

        strategies.run(case)

    def test_backward_outside_run(self, strategies: Any) -> None:
        def case(strategy: Strategy) -> None:
            model, optimizer = made(strategy)
            loss = model(torch.ones(1, 6)).sum()
            grads = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
            if len(strategy.devices) > 1:
                with pytest.raises(FastdistError, match=r"second.bias outside run"):
                    loss.backward()
            else:
                loss.backward()
                assert torch.equal(model.second.bias.grad, grads[3])
            optimizer.zero_grad()
            simple(strategy, model, optimizer)
            strategy.check_in_sync()

        strategies.run(case)

    def test_replicas_are_alike_after_a_failure(self, strategies: Any) -> None:
        def case(strategy: Strategy) -> None:
            model, optimizer = made(strategy)

            def step(x: torch.Tensor, y: torch.Tensor) -> None:
                F.mse_loss(model(x), y).backward()
                if fd.get_replica_context().local_replica == 0:
                    raise KeyError("before the step")
                optimizer.step()

            with pytest.raises(KeyError):
                next(steps(strategy, step))
            simple(strategy, model, optimizer)
            strategy.check_in_sync()

        if strategies.runs_in_one_process:
            strategies.run(case)

    def test_nothing_of_torch_stays_replaced(self, strategies: Any) -> None:
        def case(strategy: Strategy) -> None:
            names = [
                (torch.random, "default_generator"),
                (torch.autograd, "_engine_run_backward"),
                (nn.Module, "__setstate__"),
                (torch.optim.SGD, "__init__"),
                (torch.optim.Optimizer, "__init__"),
            ]
            before = [getattr(*name) for name in names]
            model, optimizer = made(strategy)
            simple(strategy, model, optimizer)
            assert all(getattr(*name) is was for name, was in zip(names, before, strict=True))

        strategies.run(case)


class CompiledModules:
    """torch.compile takes seconds: bound to few kinds of replicas."""

    @pytest.mark.timeout(120)
    @pytest.mark.parametrize("compiled", ["model", "loss", "step"])
    def test_compiled(self, strategies: Any, compiled: str) -> None:
        def case(strategy: Strategy) -> None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # those of dynamo about torch
                wanted = train_compiled(fd.OneDeviceStrategy("cpu"), "nothing")
                require_close(train_compiled(strategy, compiled), wanted, 4e-5)

        strategies.run(case)

    @pytest.mark.timeout(120)
    def test_compiled_functions_draw_as_others_do(self, strategies: Any) -> None:
        def drawn(strategy: Strategy, compiled: bool) -> list[torch.Tensor]:
            torch.compiler.reset()
            torch.manual_seed(3)
            with strategy.scope():
                model = nn.Sequential(nn.Linear(2, 50), nn.Dropout(0.5))
            forward = torch.compile(model, backend="aot_eager") if compiled else model
            rows = [strategy.gather(strategy.run(forward, (torch.ones(1, 2),))) for _ in range(2)]
            return [*rows, torch.rand(1)]

        def case(strategy: Strategy) -> None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                require_close(drawn(strategy, True), drawn(strategy, False), 1e-6)

        strategies.run(case)


def train_compiled(strategy: Strategy, compiled: str) -> list[torch.Tensor]:
    torch.compiler.reset()
    compile_ = functools.partial(torch.compile, backend="aot_eager")
    torch.manual_seed(1)
    with strategy.scope():
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    called = compile_(model) if compiled == "model" else model

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(called(x), y)

    reached = compile_(loss_of) if compiled == "loss" else loss_of

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        optimizer.zero_grad()
        loss = reached(x, y)
        loss.backward()
        optimizer.step()
        return fd.get_replica_context().all_reduce("sum", loss.detach())

    for _ in steps(strategy, compile_(step) if compiled == "step" else step):
        pass
    return finish(strategy, model)
