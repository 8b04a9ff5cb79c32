"""What torch's optimizers promise, as all of ours keep it: groups that are taken whole or not at
all, copies, state dicts that are checked before anything is taken from them, and a step's results.
"""

from __future__ import annotations

import functools
import io
import itertools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed
from torch.compiler import is_dynamo_compiling

from .placement import local
from .tables import is_captured, same

Tensor = torch.Tensor
# Options of torch's groups that ours take by another name or as a tensor, or keep as they are.
THEIRS = "capturable", "adjust_lr_fn", "lr"
# The option of the first group with parameters that has a state dict's pieces of no parameter: what
# torch.distributed.checkpoint keeps of a state dict is state of parameters, and their groups. As
# bytes, since it loads only tensors that it found in the state dict of the optimizer that it loads
# into.
OWN = "optimizer_state"
Method = TypeVar("Method", bound=Callable[..., Any])


def as_it_is(method: Method) -> Method:
    """A method that runs without gradients and, in a loop under torch.compile, as it is between
    the loop's graphs: the compiler would trace parts of it, and lose what these write to the
    optimizer.
    """

    @functools.wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        # False outside of the compiler, which takes it for True.
        if is_dynamo_compiling():
            return torch.compiler.disable(run)(*args, **kwargs)
        with torch.no_grad():
            return method(*args, **kwargs)

    return run  # type: ignore[return-value]


class Contract(torch.optim.Optimizer):
    """A subclass says what it requires of a group and of a state dict, and what its copies keep.

    Attributes:
        grad_norm, skipped, skipped_steps: as ``AdamW`` has them.
    """

    # torch.amp.GradScaler sets grad_scale and found_inf before a step, and deletes them after.
    _step_supports_amp_scaling = True
    # Attributes that copies and pickles have besides torch's. Nothing else: a scheduler replaces
    # its optimizer's step, and copies must not have that one.
    copied: tuple[str, ...] = ()
    _results: tuple[Tensor, Tensor, Tensor] | None = None
    # Of the groups that were loaded last, what they had of THEIRS.
    _theirs: Sequence[dict[str, Any]] = ()

    def _check_group(self, group: dict[str, Any]) -> None:
        """Raise where a group's parameters or options are not supported."""
        raise NotImplementedError

    def _completed(self, saved: dict[str, Any]) -> dict[str, Any]:
        """A state dict whose groups have all options: those that they lack stay as they are."""
        wanted, sizes = (
            [len(group["params"]) for group in groups]
            for groups in (self.param_groups, saved["param_groups"])
        )
        if sizes != wanted:
            raise ValueError(f"the state dict must have groups of {wanted} parameters, got {sizes}")
        pairs = zip(self.param_groups, saved["param_groups"], strict=True)
        return {**saved, "param_groups": [{**own, **loaded} for own, loaded in pairs]}

    def _checked(self, saved: dict[str, Any]) -> dict[str, Any]:
        """The completed state dict; raises where it does not fit these parameters."""
        raise NotImplementedError

    def _take(self, saved: dict[str, Any], before: list[dict[str, Any]]) -> None:
        """Take the state, and all else but the groups, of a checked state dict; ``before`` are the
        groups as they were.
        """
        raise NotImplementedError

    def _forget_plans(self) -> None:
        """Have the next step plan again."""
        raise NotImplementedError

    def _keep_captured(self, planned: Sequence[Any]) -> None:
        """Keep the plans of a step that is captured: its replays read them, and torch does not say
        when a graph is gone.
        """
        if planned and is_captured(planned[0].device):
            kept = self.__dict__.setdefault("_replayed", [])
            if not kept or not same(kept[-1], planned):
                kept.append(planned)

    def forget_captures(self) -> None:
        """Free what the replays of captured steps read, replaced state included. To be called when
        no graph that holds a step is replayed any more.
        """
        self.__dict__.pop("_replayed", None)

    def _clear_results(self) -> None:
        """The results of a step without gradients."""
        if self._results is not None:
            clear_results(self._results)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, with options of their own where given."""
        super().add_param_group(param_group)
        try:
            self._check_group(self.param_groups[-1])
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise
        self._forget_plans()

    def _own(self) -> dict[str, Any]:
        """The pieces of a state dict that are of no parameter; their optimizers have OWN among the
        groups' options.
        """
        return {}

    def state_dict(self) -> dict[str, Any]:
        """As torch's optimizers have it, with what torch's own had chosen and ours does not use."""
        saved = super().state_dict()
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            saved["state"] = {number: sendable(x) for number, x in saved["state"].items()}
        for group, theirs in zip(saved["param_groups"], self._theirs, strict=False):
            if "capturable" in theirs:
                group["capturable"] = theirs["capturable"]
            # Which takes no tensor.
            if group.get("foreach") and not group["capturable"]:
                group["lr"] = number_again(group["lr"], theirs.get("lr"))
        own = self._own()
        if own:
            groups = saved["param_groups"]
            next((group for group in groups if group["params"]), groups[0])[OWN] = packed(own)
        return saved | own

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the state of such an optimizer, in the dtypes that it has."""
        before = [dict(group) for group in self.param_groups]
        saved: dict[str, Any] = {}
        theirs: list[dict[str, Any]] = []

        def check(_: Any, adapted: dict[str, Any]) -> dict[str, Any]:
            if self._own():
                check_not_lost(adapted)
            saved.update(self._checked(self._completed(unpacked(adapted))))
            for group in adapted["param_groups"]:
                theirs.append({name: group[name] for name in THEIRS if name in group})
            # torch would cast it to the parameters' dtypes.
            return {**saved, "state": {}}

        def take(_: Any) -> None:
            self._take(saved, before)
            self._theirs = theirs
            self._forget_plans()

        # Other hooks may adapt what is loaded before it is checked, and run after it is taken.
        hooks = (
            self.register_load_state_dict_pre_hook(check),
            self.register_load_state_dict_post_hook(take, prepend=True),
        )
        try:
            super().load_state_dict(state_dict)
        finally:
            for hook in hooks:
                hook.remove()

    def __getstate__(self) -> dict[str, Any]:
        kept = (*self.copied, "_results", "_theirs")
        return super().__getstate__() | {name: getattr(self, name) for name in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._forget_plans()

    @property
    def grad_norm(self) -> Tensor:
        return self._last()[0]

    @property
    def skipped(self) -> Tensor:
        return self._last()[1]

    @property
    def skipped_steps(self) -> Tensor:
        return self._last()[2]

    def _last(self) -> tuple[Tensor, Tensor, Tensor]:
        if self._results is not None:
            return self._results
        first = next(iter(self._all_parameters()), None)
        return self._results_on(torch.device("cpu") if first is None else first.device)

    def _allocates(self) -> bool:
        """Whether a step without a loss is torch.distributed.checkpoint's, which takes one at a
        learning rate of 0 so that state is allocated.
        """
        return not self.state and all(is_zero(group["lr"]) for group in self.param_groups)

    def _results_on(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Where a step on this device writes them."""
        if self._results is None:
            self._results = new_results(device)
        elif self._results[0].device != device:
            norm, skipped, count = self._results
            self._results = norm.to(device), skipped.to(device), count.to(device)
        return self._results

    def _all_parameters(self) -> list[Tensor]:
        return [*itertools.chain.from_iterable(group["params"] for group in self.param_groups)]

    def _all_state(self) -> list[Any]:
        return [*itertools.chain.from_iterable(map(dict.values, self.state.values()))]

    def _states_of(self, saved: dict[str, Any]) -> list[tuple[Tensor, dict[str, Any]]]:
        """The saved state of each parameter, which is empty where there is none."""
        numbers = [number for group in saved["param_groups"] for number in group["params"]]
        states = (saved["state"].get(number, {}) for number in numbers)
        return list(zip(self._all_parameters(), states, strict=True))


def packed(own: dict[str, Any]) -> bytes:
    memory = io.BytesIO()
    torch.save(own, memory)
    return memory.getvalue()


def unpacked(saved: dict[str, Any]) -> dict[str, Any]:
    """A state dict with the pieces of no parameter at its top alone."""
    groups = [{k: x for k, x in group.items() if k != OWN} for group in saved["param_groups"]]
    own = [group[OWN] for group in saved["param_groups"] if group.get(OWN) is not None]
    pieces: dict[str, Any] = {}
    if own:
        pieces = torch.load(io.BytesIO(own[0]), map_location="cpu", weights_only=True)
    return {**pieces, **saved, "param_groups": groups}


def sendable(state: dict[str, Any]) -> dict[str, Any]:
    """The state of a parameter in dtypes that processes send each other: int16 is none of them."""
    return {
        name: x.int() if isinstance(x, Tensor) and x.dtype == torch.int16 else x
        for name, x in state.items()
    }


def check_not_lost(saved: dict[str, Any]) -> None:
    """Raise where no group has the pieces that one of them had."""
    found = [group[OWN] for group in saved["param_groups"] if OWN in group]
    if found and saved.keys() <= {"state", "param_groups"} and not any(found):
        raise ValueError(
            f'the state dict must have "{OWN}" in one of its groups, got none: its groups were '
            "others than those that it is loaded into"
        )


def is_zero(lr: float | Tensor) -> bool:
    """Of a learning rate on the host; no other is looked at."""
    return bool(lr == 0.0) if not isinstance(lr, Tensor) or lr.is_cpu else False


def loss_of(closure: Callable[[], Any]) -> Any:
    """What a closure returns, with gradients."""
    with torch.enable_grad():
        return closure()


def keep_rate_on_device(group: dict[str, Any]) -> None:
    """Where a group is capturable: lr as a tensor that schedulers write to."""
    lr, params = group["lr"], group["params"]
    if group["capturable"] and params and not isinstance(lr, Tensor):
        group["lr"] = torch.tensor(lr, dtype=torch.float32, device=local(params[0]).device)


def number_again(lr: float | Tensor, loaded: Any) -> float | Tensor:
    """A rate that was loaded as a number, and is a tensor since."""
    if not isinstance(lr, Tensor) or loaded is None or isinstance(loaded, Tensor):
        return lr
    number = lr.item()  # sync: a state dict may wait
    as_loaded = torch.tensor(loaded, dtype=lr.dtype, device="cpu").item()  # sync: none, on the host
    return loaded if number == as_loaded else number


def clear_results(results: tuple[Tensor, Tensor, Tensor]) -> None:
    """After a step without gradients: no norm, nothing skipped."""
    norm, skipped, _ = results
    norm.fill_(torch.nan)
    skipped.zero_()


def new_results(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """grad_norm, skipped and skipped_steps before any step."""
    return (
        torch.full((), float("nan"), dtype=torch.float32, device=device),
        torch.zeros((), dtype=torch.bool, device=device),
        torch.zeros((), dtype=torch.int64, device=device),
    )
