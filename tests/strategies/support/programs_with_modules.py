"""Programs for training that use modules in the ways of existing programs."""

from __future__ import annotations

import copy
import functools
import io
import pickle
from typing import Any

import cloudpickle
import torch
import torch.nn.functional as F
from fastdist import Strategy
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from training_programs import (
    Net,
    finish,
    made,
    program,
    simple,
    simply_trained,
    step_program,
    steps,
    train,
)


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


@program
def containers_and_tied_weights(strategy: Strategy) -> list[torch.Tensor]:
    model, optimizer = made(strategy, Containers)
    simple(strategy, model, optimizer)
    assert model.tied.weight is model.again.weight

    def tied() -> bool:
        return model.tied.weight is model.again.weight and len(list(model.parameters())) == 8

    assert all(strategy.local_results(strategy.run(tied)))
    return finish(strategy, model)


@program
def weights_tied_between_modules(strategy: Strategy) -> list[torch.Tensor]:
    torch.manual_seed(1)
    with strategy.scope():
        one, two = nn.Linear(6, 2), nn.Linear(6, 2)
        two.weight = one.weight
        optimizer = torch.optim.SGD([*one.parameters(), two.bias], lr=0.1)
    simple(strategy, lambda x: one(x) * two(x), optimizer)
    return finish(strategy, one, two)


@step_program
def functional_calls(model: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    optimizer.zero_grad()
    doubled = {name: 2 * p for name, p in model.named_parameters()}
    out = torch.func.functional_call(model, doubled, (x,))
    F.mse_loss(out, y).backward()
    optimizer.step()


@program
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
        train(model, optimizer, x, y)
        inside.update_parameters(model)
        with torch.no_grad():
            for mean, p in zip(ema.parameters(), model.parameters(), strict=True):
                mean.lerp_(p, 0.5)
        return inside(x).detach().sum()

    for _ in steps(strategy, step):
        outside.update_parameters(model)
    return finish(strategy, model, inside, ema, outside)


class Positive(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.softplus(x)


@program
def parametrized(strategy: Strategy) -> list[torch.Tensor]:
    def make() -> nn.Module:
        model = Net()
        parametrizations.weight_norm(model.first)
        parametrize.register_parametrization(model.second, "weight", Positive())
        return model

    model, optimizer = made(strategy, make)
    return simply_trained(strategy, model, optimizer)


@program
def parametrized_after_the_scope(strategy: Strategy) -> list[torch.Tensor]:
    model, _ = made(strategy)
    parametrizations.weight_norm(model.first)
    with strategy.scope():
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return simply_trained(strategy, model, optimizer)


class TwoBiases(nn.Module):
    """Autograd's gradients of the biases are two views of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 2)
        self.biases = nn.ParameterList(torch.randn(2) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = (bias.view(1, 2) for bias in self.biases)
        return self.linear(x) * (first + second)


@program
def gradients_in_one_memory(strategy: Strategy) -> list[torch.Tensor]:
    return simply_trained(strategy, *made(strategy, TwoBiases))


@program
def spectral_norm(strategy: Strategy) -> list[torch.Tensor]:
    def make() -> nn.Module:
        model = Net()
        parametrizations.spectral_norm(model.first)
        return model

    model, optimizer = made(strategy, make)
    simple(strategy, model, optimizer)
    return [*finish(strategy, model), *(b.clone() for b in model.buffers())]


@program
def other_dtype(strategy: Strategy) -> list[torch.Tensor]:
    model, _ = made(strategy)
    model.to(torch.float64)
    with strategy.scope():
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        train(model, optimizer, x.double(), y.double())

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


@program
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
    return simply_trained(strategy, model, optimizer)


@program
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


@program
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


@program
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
    return simply_trained(strategy, model, optimizer)


class Wrapper(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any) -> Any:
        return self.module(*args)


@program
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


@program
def part_replaced(strategy: Strategy) -> list[torch.Tensor]:
    """A new head, in the scope again, as for fine-tuning."""
    model, optimizer = made(strategy)
    simple(strategy, model, optimizer)
    torch.manual_seed(3)
    with strategy.scope():
        model.second = nn.Linear(8, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return simply_trained(strategy, model, optimizer)


@program
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
    return simply_trained(strategy, model, optimizer)


@program
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
    return simply_trained(strategy, model, optimizer)
