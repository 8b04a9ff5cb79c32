r"""AdamW whose learning rates a small network sets, group by group, and which trains that network.

    m = controller(|gradients|, |parameters|, depth)    lr_g = base_lr_g m_g

with m = 1 until the controller has been trained. Its training follows the hypergradient: how the
loss of the next batch, or of held-out data, depends on m through the step that was taken;
``reference`` has the formulas. A step is AdamW's with squares taken by group, of parameters as well
as gradients, and one small launch; there is no state but AdamW's and some numbers for each group.

What a step does follows from its number on the host; all else, skips included, the device selects,
so that the host waits for nothing and a step can be captured.

Behrouz et al., Nested Learning, arXiv 2512.24695, has the idea; the controller is no part of it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch

from .._core.backends import Backend
from .._core.precision import wide_dtype
from ..adamw.adamw import Rounding
from ..common.checks import check_adamw_group, check_gradient
from ..common.contract import OWN, as_it_is, keep_rate_on_device
from ..common.placement import current
from ..common.sharding import mean_of, mesh_of_all
from .adamw_mode import AdamWMode
from .checks import Options, check_decoupled, check_members, check_nested, check_plain
from .continuum_mode import ContinuumMode
from .controller_training import ControllerTraining
from .nested_controller import Features, NestedController
from .parameter_groups import UNKNOWN, Grouping, Named, parameter_groups
from .rates import GroupRates
from .several import local_gradients, share_, whole
from .state import NestedState

Tensor = torch.Tensor
Loss = float | Tensor | Callable[[], Any] | None


class DeepNestedOptimizer(NestedState):
    """Learning rates by group from a controller that the optimizer trains.

    Args:
        model: a module, or pairs of a name and a parameter; all that need gradients are taken, on
            one device. DTensors are moved where their shards are, by sums over all of them; the
            loss is then the mean of all processes', the controller the first one's. Continua, and
            hypergradients in mode "explicit" or of ``meta_update``, want whole parameters.
        base_lr: of every group, to be multiplied; a number, which schedulers change as
            ``param_groups[i]["lr"]``, or a 0-d tensor on the device.
        meta_lr: of Adam on the controller.
        grouping: ``group_of`` where left out, which tells embeddings, norms and gates from the
            other matrices; or a function of name and parameter, or groups; see
            ``parameter_groups``.
        betas, eps, weight_decay, state_dtype, rounding, seed: AdamW's.
        max_grad_norm: all gradients are scaled down to this norm; None for no such bound.
        mode: "simple" trains the controller within every ``meta_update_freq``-th step; "explicit"
            leaves it to ``meta_update``.
        meta: "hypergradient" follows dL/dm exactly through one step; "proxy" the rule that looks at
            the losses and at no gradient of them: see ``ControllerTraining``.
        controller_hidden_dim, controller_num_layers, features: see ``NestedController``.
        controller_update_freq: multipliers change in the first step and in each step whose number
            it divides; only then squares of parameters are read.
        update: "adamw"; or "continuum", a learned update of momenta at several frequencies, which
            keeps up to two fp32 numbers for each level and element: see ``Continuum``; and one more
            from a step to the hypergradient through it, which mode "explicit" may ask for any step.
        frequencies, preprocessing, momentum_hidden_dim, momentum_num_layers: of "continuum".
        capturable: keep learning rates on the device, so that schedulers reach a captured step.
        backend: as AdamW has it.

    Attributes:
        controller: the ``NestedController``.
        global_step: how many steps were called, skipped ones too; a whole number on the host.
        grad_norm, skipped, skipped_steps: as AdamW has them.

    A step whose loss or gradients are not finite, as ``AdamW`` has it with skip_nonfinite, or that
    a ``torch.amp.GradScaler`` skips, updates nothing and leaves all counts of steps but
    ``global_step`` as they were. Gradients stay as they are.

    In a CUDA graph: a step is captured as it is at its ``global_step``, so capture one for each
    pattern of things that happen, most simply with mode "explicit", and after the first steps of
    all patterns, which make what they need. The controller may then run each step; of the levels
    of "continuum" those fire that would at that number. Give the loss as a tensor of the graph's,
    and write what schedules say with ``capturable``. Replays do not count: set ``global_step``.

    Raises:
        TypeError: model or grouping is neither; a parameter is complex or sparse, or a DTensor
            where it has to be whole.
        ValueError: an option is out of its range, no parameter needs a gradient, parameters are on
            several devices, two groups have one name; the groups are others since, in another order
            or of other depths; or a state dict is of another update, of other networks or shapes,
            and nothing is taken of it.
    """

    def __init__(
        self,
        model: torch.nn.Module | Named,
        base_lr: float | Tensor = 1e-3,
        meta_lr: float = 1e-4,
        *,
        grouping: Grouping | None = None,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float | Tensor = 1e-8,
        weight_decay: float | Tensor = 0.0,
        max_grad_norm: float | None = 1.0,
        mode: Literal["simple", "explicit"] = "simple",
        meta: Literal["hypergradient", "proxy"] = "hypergradient",
        meta_update_freq: int = 100,
        controller_hidden_dim: int = 32,
        controller_num_layers: int = 2,
        controller_update_freq: int = 1,
        features: Features = "log",
        update: Literal["adamw", "continuum"] = "adamw",
        frequencies: Sequence[int] = (1, 10, 100),
        preprocessing: bool = True,
        momentum_hidden_dim: int = 64,
        momentum_num_layers: int = 2,
        capturable: bool = False,
        state_dtype: torch.dtype | None = None,
        rounding: Rounding = "nearest",
        seed: int = 0,
        backend: Backend = "auto",
    ) -> None:
        """Take the arguments that the class names."""
        self.options: Options = Options(
            meta_lr=meta_lr,
            max_grad_norm=max_grad_norm,
            mode=mode,
            meta=meta,
            meta_update_freq=meta_update_freq,
            controller_hidden_dim=controller_hidden_dim,
            controller_num_layers=controller_num_layers,
            controller_update_freq=controller_update_freq,
            features=features,
            update=update,
            frequencies=tuple(frequencies),
            preprocessing=preprocessing,
            momentum_hidden_dim=momentum_hidden_dim,
            momentum_num_layers=momentum_num_layers,
            state_dtype=state_dtype,
            rounding=rounding,
            seed=seed,
            backend=backend,
        )
        check_nested(self.options)
        groups = parameter_groups(model, grouping)
        defaults: dict[str, Any] = dict(
            lr=base_lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            decoupled_weight_decay=True,
            capturable=capturable,
        )
        defaults[OWN] = None
        super().__init__(groups, defaults)
        self.global_step: int = 0
        self._build()

    def _build(self) -> None:
        """Make everything that follows from the groups."""
        options, first = self.options, next(iter(self._all_parameters()), None)
        if first is None:
            # Of a copy whose groups were all emptied.
            first = self.controller.linears[0].weight
        device, dtype = first.device, wide_dtype(first)
        with current(device):
            mesh = mesh_of_all(self._all_parameters())
            if "controller" not in self.__dict__:
                self.controller: NestedController = NestedController(
                    options.controller_hidden_dim,
                    options.controller_num_layers,
                    features=options.features,
                    device=device,
                    dtype=dtype,
                )
                share_(self.controller.parameters(), mesh)
            depths = [float(group["depth"]) for group in self.param_groups]
            # Plain torch serves a controller of fp64.
            backend: Backend = "reference" if dtype == torch.float64 else options.backend
            self._rates = GroupRates(self.controller, depths, device, backend)
            self._rates.hold([group["lr"] for group in self.param_groups])
            mode = AdamWMode if options.update == "adamw" else ContinuumMode
            self._mode: Any = mode(self.param_groups, self._rates, options)
            self._mode.follow(self.param_groups, self.state)
            self._training = ControllerTraining(
                self.controller, len(depths), options.meta_lr, backend
            )
        self._loss: float | Tensor | None = None
        # What the rates are of, by place.
        self._rated: list[str] = self._described()

    def _described(self) -> list[str]:
        return [f"{group['name']} of depth {group['depth']:g}" for group in self.param_groups]

    def _check_rated(self) -> None:
        """Raise where the rates are of other groups."""
        found = self._described()
        if found != self._rated:
            raise ValueError(
                f"the groups must be {', '.join(self._rated)}, got {', '.join(found)}: one may be "
                "emptied, and others come by add_param_group"
            )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, with options of their own where given, "name" and "depth" among them."""
        if "depth" not in param_group or "name" not in param_group:
            name = f"group_{len(self.param_groups)}"
            param_group = {"name": name, "depth": UNKNOWN} | param_group
        built = "_rates" in self.__dict__
        if built:
            self._check_rated()
        super().add_param_group(param_group)
        if built:
            numbers = self._numbers()
            self._build()
            self._take_numbers(numbers)

    def _check_group(self, group: dict[str, Any]) -> None:
        check_adamw_group(group)
        check_decoupled(group)
        check_plain(group)
        check_members(self.param_groups, self.options)
        keep_rate_on_device(group)

    def set_loss(self, loss: float | Tensor) -> None:
        """Set the loss of the next step that is called without one, as a GradScaler does."""
        self._loss = loss

    @as_it_is
    def step(  # type: ignore[override]
        self, loss: Loss = None, *, closure: Callable[[], Any] | None = None
    ) -> dict[str, Any]:
        """Take one step.

        Args:
            loss: of the gradients: a number, a tensor of one, or a closure that computes gradients
                and returns it. Without one ``set_loss``'s counts, else 0 with a warning; but a
                first step at learning rates of 0, as torch.distributed.checkpoint takes it, then
                allocates state and has no other effect.
            closure: the same, by torch's name.

        Returns:
            Tensors, without waiting for the device: "global_step", 0-d on the host;
            "lr_multipliers", ``[groups]``; "ema_loss", the losses' mean that decays by a tenth a
            step; "skipped"; "grad_norm"; "loss". All but the first and the last are the optimizer's
            own, which the next step writes over.

        Raises:
            TypeError, ValueError: a gradient or the loss has a wrong shape, dtype or device;
                nothing is changed.
        """
        self._check_rated()
        closure = loss if callable(loss) else closure
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        allocates = loss is None and self._loss is None and self._allocates()
        value: Any = loss
        if loss is None:
            value = 0.0 if allocates else self._pending_loss()
        rates, t = self._rates, self.global_step + (not allocates)
        scaler = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        options = self.options
        with current(rates.device):
            now = mean_of(rates.loss_of(value), mesh_of_all(self._all_parameters()))
            self._mode.follow(self.param_groups, self.state)
            if allocates:
                self._mode.allocate()
                return self._report(now)
            trains = options.mode == "simple" and t % options.meta_update_freq == 0
            if trains and options.meta == "hypergradient" and t > 1:
                gradients = [p.grad for p in self._all_parameters()]
                self._descend(gradients, now, scaler[0])
            rates.hold([group["lr"] for group in self.param_groups])
            updates = t == 1 or t % options.controller_update_freq == 0
            keeps = options.meta == "hypergradient" and (
                options.mode == "explicit" or (t + 1) % options.meta_update_freq == 0
            )
            self._mode.step(t, now, updates, keeps, scaler)
            if trains and options.meta == "proxy":
                self._training.follow_proxy(rates.statistics, now, self.skipped)
        self._loss, self.global_step = None, t
        return self._report(now)

    def _report(self, loss: Tensor) -> dict[str, Any]:
        rates = self._rates
        return {
            "global_step": torch.scalar_tensor(self.global_step, dtype=torch.int64),
            "lr_multipliers": rates.multipliers,
            "ema_loss": rates.ema_loss,
            "skipped": self.skipped,
            "grad_norm": self.grad_norm,
            "loss": loss,
        }

    def _pending_loss(self) -> float | Tensor:
        if self._loss is None:
            if not self.__dict__.get("_warned", False):
                self._warned = True
                warnings.warn(
                    "step has no loss: pass it, or call set_loss; 0 is taken",
                    RuntimeWarning,
                    stacklevel=4,
                )
            return 0.0
        return self._loss

    def _descend(
        self, gradients: Sequence[Tensor | None], loss: Tensor, scale: Tensor | None = None
    ) -> Tensor:
        """Update the controller against dL/dm of the last step; returns it."""
        for p, g in zip(self._all_parameters(), gradients, strict=True):
            if g is not None:
                check_gradient(p, g)
        rates = self._rates
        memories = local_gradients(gradients, self._all_parameters())
        hypergradient = self._mode.hypergradient(self.param_groups, memories)
        if scale is not None:
            hypergradient = hypergradient / scale.double().reshape(())
        skips = self.skipped | ~loss.isfinite()
        self._training.follow(rates.statistics, hypergradient, skips)
        return hypergradient

    @as_it_is
    def meta_update(self, loss: Loss = None) -> dict[str, Tensor]:
        """Train the controller on a loss at the parameters as they are, right after a step.

        Args:
            loss: of held-out data: a closure that returns it, or the tensor itself with its graph.
                Gradients are taken without touching any ``grad``. For meta="proxy" a number does,
                and without one the mean of the losses so far is taken.

        Returns:
            "loss", 0-d, and "hypergradient", ``[groups]`` in fp64: dL/dm of each group; of the
            proxy "loss" alone.

        Raises:
            RuntimeError: there was no step.
            TypeError: meta is "hypergradient" and the loss has no graph, or a parameter is a
                DTensor.
        """
        if not self.global_step:
            raise RuntimeError("meta_update needs a step before it, got none yet")
        self._check_rated()
        rates, mesh = self._rates, mesh_of_all(self._all_parameters())
        if mesh is not None and self.options.meta == "hypergradient":
            raise TypeError(
                "meta_update takes gradients of parameters of one process, got a DTensor: those of "
                "a later step train the controller"
            )
        with torch.enable_grad():
            value = loss() if callable(loss) else loss
        if self.options.meta == "proxy":
            now = rates.ema_loss.clone()
            if value is not None:
                now = mean_of(rates.loss_of(value), mesh)
            self._training.follow_proxy(rates.statistics, now, self.skipped)
            return {"loss": now}
        if not isinstance(value, Tensor) or not value.requires_grad:
            raise TypeError(f"meta_update needs a loss with its graph, got {value!r}")
        gradients = torch.autograd.grad(value, self._all_parameters(), allow_unused=True)
        with torch.no_grad(), current(rates.device):
            self._mode.follow(self.param_groups, self.state)
            now = rates.loss_of(value)
            return {"loss": now, "hypergradient": self._descend(gradients, now)}

    def get_lr_multipliers(self) -> dict[str, Tensor]:
        """Of each group by its name, 0-d on the device."""
        names = [group["name"] for group in self.param_groups]
        return dict(zip(names, self._rates.multipliers.clone().unbind(), strict=True))

    def get_effective_lrs(self) -> dict[str, Tensor]:
        """Learning rate times multiplier of each group by its name, 0-d fp64 on the device."""
        multipliers = self._rates.multipliers.double().unbind()
        groups = zip(self.param_groups, multipliers, strict=True)
        return {group["name"]: group["lr"] * m for group, m in groups}

    @torch.no_grad()
    def get_momentum_stats(self) -> dict[str, dict[str, Tensor]]:
        """Norms of momentum of each group by its name, in fp64 on the device: "exp_avg" of AdamW,
        "momentum_0" and on of the levels of a continuum.
        """
        norms: dict[str, dict[str, Tensor]] = {}
        for group in self.param_groups:
            squares: dict[str, list[Tensor]] = {}
            for p in group["params"]:
                for name, value in self.state.get(p, {}).items():
                    if name == "exp_avg" or name.startswith("momentum"):
                        squares.setdefault(name, []).append(whole(value.double().square().sum()))
            norms[group["name"]] = {
                name: torch.stack(some).sum().sqrt() for name, some in squares.items()
            }
        return norms
