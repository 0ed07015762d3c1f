"""Updates weights by AdamW (arXiv 1711.05101, algorithm 2), in torch's fused kernels, and plans the learning rate.

The moments may lie in host memory: they are 8 of a parameter's 16 bytes beside its activations, and needed for a
moment of each step. A step then takes them through the device piece by piece, in three stages that overlap: copy in,
update, copy out. As the kernel is the same, and AdamW treats each element alone, the weights are those without it.

Invariant: between steps the state of a parameter is one `step`, `exp_avg` and `exp_avg_sq` with its shape and shards,
wherever the moments lie. So a checkpoint is read by trainers that keep them elsewhere.
"""

import contextlib
import math
from collections.abc import Iterable, Mapping
from typing import Any, Final, Literal, TypeAlias

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from ebbtide.client.publisher.tensor_snapshots import allocate

Schedule: TypeAlias = Literal["constant", "linear", "cosine"]

#: Elements of a piece.
PIECE: Final = 1 << 24
#: Pieces whose moments are on the device at once: one comes, one is updated, one leaves.
_PLACES: Final = 3


def rate_factor(step: int, schedule: Schedule, *, warmup_steps: int, steps: int) -> float:
    """Returns the share of the learning rate at `step` (from 0) of `steps`.

    It rises linearly over `warmup_steps`. From then on it is 1, falls linearly, or along half a cosine (arXiv
    1608.03983, equation 5, without restarts); either would reach 0 at the step behind the last.
    """
    if step < warmup_steps or schedule == "constant":
        return min(1.0, (step + 1) / (warmup_steps + 1))
    done = min(1.0, (step - warmup_steps) / max(1, steps - warmup_steps))
    return 1.0 - done if schedule == "linear" else (1.0 + math.cos(math.pi * done)) / 2


class AdamW(torch.optim.AdamW):
    """AdamW over parameters of one or several ranks, whose state may be kept in host memory."""

    def __init__(
        self,
        parameters: Iterable[Tensor],
        *,
        rate: float,
        betas: tuple[float, float],
        weight_decay: float,
        in_host: bool = False,
    ) -> None:
        """`in_host`: keep the moments there, in locked pages if the parameters are on a GPU and pages can be locked."""
        self.in_host = in_host
        super().__init__(parameters, lr=rate, betas=betas, weight_decay=weight_decay, fused=True)

    def step(self, closure: Any = None) -> Any:
        if not self.in_host:
            return super().step(closure)
        with torch.no_grad():
            for group in self.param_groups:
                self._step_in_pieces(group)
        return None

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads a state, wherever its moments lay. How this optimiser computes stays as it is."""
        own = [{name: group[name] for name in ("fused", "foreach", "capturable")} for group in self.param_groups]
        groups = [{**given, **kept} for given, kept in zip(state_dict["param_groups"], own, strict=True)]
        moments = {} if self.in_host else state_dict["state"]
        super().load_state_dict({"state": moments, "param_groups": groups})
        if self.in_host:
            self._take(state_dict["state"])

    def _take(self, states: Mapping[int, Mapping[str, Tensor]]) -> None:
        """Keeps the moments of `states`, by the numbers of their parameters, where they are in host memory."""
        parameters = [one for group in self.param_groups for one in group["params"]]
        for number, state in states.items():
            parameter = parameters[number]
            locked = parameter.is_cuda
            held = {name: to_host(state[name].detach(), locked=locked) for name in ("exp_avg", "exp_avg_sq")}
            self.state[parameter] = {"step": state["step"].cpu().float(), **held}

    def _step_in_pieces(self, group: dict[str, Any]) -> None:
        trained = [parameter for parameter in group["params"] if parameter.grad is not None]
        line: _Line | None = None
        for parameter in trained:
            self._begin(parameter)
            state, count = self.state[parameter], float(self.state[parameter]["step"])
            weights, gradient, *moments = (
                own_part(one).view(-1) for one in (parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"])
            )
            line = line or _Line(weights.device)
            for at in range(0, len(weights), PIECE):
                place = line.bring([one[at : at + PIECE] for one in moments])
                _update(weights[at : at + PIECE], gradient[at : at + PIECE], place, count, group)
                line.leave()
            state["step"] += 1
        if line is not None:
            line.settle()

    def _begin(self, parameter: Tensor) -> None:
        if not self.state[parameter]:
            locked = parameter.is_cuda
            made = {name: to_host(torch.zeros_like(parameter), locked=locked) for name in ("exp_avg", "exp_avg_sq")}
            self.state[parameter] = {"step": torch.zeros(()), **made}


def own_part(tensor: Any) -> Tensor:
    """Returns the tensor that this rank's part of `tensor` is kept in, and no view of it."""
    found: Tensor = tensor._local_tensor if isinstance(tensor, DTensor) else tensor  # noqa: SLF001
    return found


def to_host(tensor: Tensor, *, locked: bool = False) -> Tensor:
    """Returns the tensor, or changes a sharded one's own part, to lie in host memory; `locked`: in locked pages.

    A GPU copies to and from these by itself.
    """
    part = own_part(tensor)
    if locked:
        buffer = torch.from_numpy(allocate(part.nbytes, str(part.device)))
        home = buffer.view(part.dtype).view(part.shape).copy_(part)
    else:
        home = part.cpu()
    if isinstance(tensor, DTensor):
        tensor._local_tensor = home  # noqa: SLF001
        return tensor
    return home


class _Line:
    """Carries the moments of pieces from host memory to the device and back, while another is updated."""

    def __init__(self, device: torch.device) -> None:
        self._places = [torch.empty((2, PIECE), device=device) for _ in range(_PLACES)]
        self._count = 0
        self._homes: list[Tensor] = []
        self._cuda = _CudaLine(device) if device.type == "cuda" else None

    def bring(self, moments: list[Tensor]) -> list[Tensor]:
        """Returns the `moments` of a piece, both (n,), on the device."""
        place = self._places[self._count % _PLACES]
        self._homes, there = moments, [row[: len(one)] for row, one in zip(place, moments, strict=True)]
        with self._cuda.coming(self._count % _PLACES) if self._cuda else contextlib.nullcontext():
            for one, home in zip(there, moments, strict=True):
                one.copy_(home, non_blocking=True)
        if self._cuda:
            self._cuda.arrived()
        return there

    def leave(self) -> None:
        """Copies the piece's moments back."""
        number = self._count % _PLACES
        with self._cuda.leaving() if self._cuda else contextlib.nullcontext():
            for row, home in zip(self._places[number], self._homes, strict=True):
                home.copy_(row[: len(home)], non_blocking=True)
        if self._cuda:
            self._cuda.left(number)
        self._count += 1

    def settle(self) -> None:
        """Waits until all moments are back."""
        if self._cuda:
            self._cuda.settle()


class _CudaLine:
    """Orders the copies: a stream for each way, beside the one that computes."""

    def __init__(self, device: torch.device) -> None:
        self._computing = torch.cuda.current_stream(device)
        make: Any = torch.cuda.Stream
        self._in, self._out = make(device), make(device)
        self._in.wait_stream(self._computing)  # the places' memory may have been another tensor's until now
        self._left: list[torch.cuda.Event | None] = [None] * _PLACES

    def coming(self, place: int) -> contextlib.AbstractContextManager[Any]:
        if (left := self._left[place]) is not None:
            self._in.wait_event(left)
        return torch.cuda.stream(self._in)

    def arrived(self) -> None:
        self._computing.wait_stream(self._in)

    def leaving(self) -> contextlib.AbstractContextManager[Any]:
        self._out.wait_stream(self._computing)
        return torch.cuda.stream(self._out)

    def left(self, place: int) -> None:
        self._left[place] = self._out.record_event()

    def settle(self) -> None:
        self._out.synchronize()


def _update(weights: Tensor, gradient: Tensor, moments: list[Tensor], count: float, group: dict[str, Any]) -> None:
    """Updates some elements (n,) and their moments in place; `count`: the steps before."""
    beta1, beta2 = group["betas"]
    adamw(
        [weights],
        [gradient],
        moments[:1],
        moments[1:],
        [],
        [torch.full((), count, device=weights.device)],
        fused=group["fused"],
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )
