"""One call of a region: what is noted before and after its forward, and checked and put back for its replay."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.weak import TensorWeakRef

from fused_remat.guards import _torch
from fused_remat.guards.arguments import Arguments, keep, version
from fused_remat.guards.errors import RematCache, RematDevice, RematError, RematMutation, RematWarning
from fused_remat.guards.flags import Flags
from fused_remat.guards.randomness import Randomness, global_sources, source_of
from fused_remat.guards.reach import Reach
from fused_remat.guards.saved import Saved
from fused_remat.guards.seen import seen_of
from fused_remat.guards.state import State, updated_buffers
from fused_remat.guards.watch import Watch

# A replay that stopped inside would have noise that is saved before it is drawn, or break a script's interpreter.
_RUN_ON = (nn.RReLU, torch.jit.ScriptModule)


class Call:
    """Torch runs `_run` in forward and again in backward: the first time it is the forward."""

    def __init__(
        self,
        name: str,
        fn: Callable[..., Any],
        module: nn.Module | None,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        verify: str,
    ) -> None:
        self.region = f"region {name!r}"
        self.fn = fn
        self.arguments = Arguments(args, kwargs)
        self.module = module
        self.reach, self.modules = self._look(None)
        for iterator in self.reach.iterators:
            raise RematMutation(
                f"{self.region} reaches the iterator {iterator}, which its replay could only go on with; take the next "
                "item before the region and pass that"
            )
        root = module if module is not None else next(iter(self.reach.roots), None)
        self.seen = seen_of(name, fn, root)
        values = verify == "always" or (verify == "once" and not self.seen.verified)
        self.saved = Saved(self.region, values, self.seen, updated_buffers(self.modules) if values else set())
        self.runs_on = self.seen.runs_on or any(isinstance(m, _RUN_ON) for _, m in self.modules)
        self.first: tuple[Any, Any] | None = (args, kwargs)
        self.settled = False

    def run(self) -> Any:
        """The forward."""
        arguments = self.arguments
        self.flags = Flags()
        self.state = State(self.modules, self.seen)
        self.randomness = Randomness([*global_sources(), *self.reach.sources])
        for generator in self.seen.generators:
            if (alive := generator()) is not None:
                self.randomness.add(source_of(alive, "a torch.Generator"))
        hints = [torch.empty(0, device=device) for device in _devices(arguments.tensors, self.modules)]
        self.refs = [TensorWeakRef(x) for x in arguments.tensors]
        self.kept = keep(arguments.tensors)
        arguments.forget_tensors()
        with _torch.saved_description(self.saved.describe) as (described, forget):

            def contexts() -> tuple[Any, Any]:
                forget()
                return self.saved.forward(), nullcontext()

            out = checkpoint(
                self._run,
                *hints,  # by their devices torch knows whose autocast to replay
                use_reentrant=False,
                preserve_rng_state=False,  # ours keeps the states that were drawn from only, and those of all devices
                determinism_check=described,
                context_fn=contexts,
            )
        self._settle()
        return out

    def _look(self, held: list[tuple[str, Any]] | None) -> tuple[Reach, list[tuple[str, nn.Module]]]:
        reach = Reach(self.fn, self.arguments.others)
        modules = _named_modules(self.module, reach.roots)
        reach.look_inside(modules, held)
        return reach, modules

    def _run(self, *hints: Tensor) -> Any:
        if self.first is None:
            return self._replay()
        (args, kwargs), self.first = self.first, None
        if (self.seen.watched and not self.saved.values) or _has_compiled(self.modules):
            out = self.fn(*args, **kwargs)
        else:
            out = self._watched(args, kwargs)
        if self.runs_on:
            _save_nothing()
        return out

    def _watched(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        with Watch(self.randomness.add, self.saved) as watch:
            out = self.fn(*args, **kwargs)
        self.seen.watched = True
        known = [generator() for generator in self.seen.generators]
        self.seen.generators += [weakref.ref(g) for g in watch.generators.values() if not any(g is k for k in known)]
        self.seen.runs_on = self.runs_on = self.runs_on or watch.saves_noise
        if watch.moves:
            warnings.warn(
                f"{self.region}: {watch.moves[0]} inside the region, and its replay will move it again; move it before "
                "the region",
                RematWarning,
                stacklevel=7,
            )
        return out

    def _settle(self) -> None:
        """After the forward: raise what it did that a replay cannot undo, and forget what it left alone."""
        if self.saved.count:
            self._settle_arguments()
        self.state.compare(self.region)
        for name in self.randomness.appeared() if self.saved.count else ():
            raise RematDevice(
                f"{self.region} was the first to use a device, so {name} cannot be put back for the replay; use the "
                "device before (torch.cuda.init(), or any tensor on it)"
            )
        self.randomness.keep_drawn()
        self.settled = self.seen.settled = True

    def _settle_arguments(self) -> None:
        for path, changed in self._changed_inputs():
            raise RematMutation(
                f"{self.region} changes its input {path} ({changed}) in place, so its replay would start from the "
                "changed values; work on a clone inside the region, or make the change before it"
            )
        reach, _ = self._look(self.reach.held)
        for name, happened in reach.grown_since(self.reach):
            raise RematCache(
                f"{self.region}: {name} {happened} in the forward and would be so again in the replay; if it is a "
                "cache, do without it in training, otherwise change it outside of the region"
            )
        for name, happened in reach.changed_since(self.reach):
            passed = "" if name.startswith(("args[", "kwargs[")) else ", which it reaches without being passed it,"
            raise RematMutation(
                f"{self.region}: {name}{passed} {happened} in the forward and would be so again in the replay; make it "
                "a buffer or attribute of a module, or change it outside of the region"
            )

    def _changed_inputs(self) -> Iterator[tuple[str, str]]:
        arguments = self.arguments
        for ref, path, words, count in zip(
            self.refs, arguments.paths, arguments.words, arguments.versions, strict=True
        ):
            tensor = ref()
            if tensor is not None and version(tensor) != count:
                yield path, words

    def _replay(self) -> Any:
        if not self.settled:
            raise RematError(
                f"{self.region}: backward ran inside its own forward, where its state cannot be put back; take that "
                "gradient outside of the region"
            )
        tensors = self._inputs()
        self._check()
        args, kwargs = self.arguments.build(tensors)
        del tensors
        self.saved.replayed()
        with ExitStack() as stack:
            stack.enter_context(self.state.as_before())
            stack.enter_context(self.randomness.as_before())
            stack.enter_context(self.flags.as_before())
            self.fn(*args, **kwargs)
            if self.runs_on:
                _save_nothing()
        if _torch.stops_early():
            raise self.saved.fewer()

    def _inputs(self) -> tuple[Tensor, ...]:
        try:
            return self.kept()
        except RematError:
            raise
        except RuntimeError as error:
            for path, words in self._changed_inputs():
                raise RematMutation(
                    f"{self.region}: its input {path} ({words}) was changed in place between forward and backward; "
                    "change it after backward, or pass a clone to the region"
                ) from error
            raise

    def _check(self) -> None:
        """Before a replay: what it finds by itself must be what the forward found."""
        reach, _ = self._look(self.reach.held)
        for name, happened in (*reach.grown_since(self.reach), *reach.changed_since(self.reach)):
            raise RematMutation(
                f"{self.region}: {name} {happened} between forward and backward; change it after backward, or pass it "
                "as an argument"
            )
        self.state.check(self.region)


def _save_nothing() -> None:
    """Makes the replay go on to here, past operations that save something before they have written it."""
    keep([torch.empty(0, device="cpu")])


def _named_modules(module: nn.Module | None, roots: list[nn.Module]) -> list[tuple[str, nn.Module]]:
    """Every distinct module inside `module` and the roots, with its path in the first that has it."""
    found: dict[int, tuple[str, nn.Module]] = {}
    for root in roots if module is None else (module, *roots):
        if id(root) not in found:
            for path, inner in root.named_modules():
                found.setdefault(id(inner), (path, inner))
    return list(found.values())


def _has_compiled(modules: list[tuple[str, nn.Module]]) -> bool:
    """Whether one of them is compiled: it would be compiled anew to be watched."""
    return any("_orig_mod" in module._modules or module._compiled_call_impl is not None for _, module in modules)


def _devices(tensors: list[Tensor], modules: list[tuple[str, nn.Module]]) -> list[torch.device]:
    """Of the inputs and parameters; the CPU and meta tensors need no mention."""
    found = dict.fromkeys(x.device for x in tensors)
    for _, module in modules:
        found.update(dict.fromkeys(p.device for p in module._parameters.values() if p is not None))
    return [device for device in found if device.type not in ("cpu", "meta")]
