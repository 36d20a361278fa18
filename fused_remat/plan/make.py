"""`fused_remat.plan`: read, solve, run, decide."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fused_remat._about import about_step
from fused_remat._out_of_memory import RanOut, unless_out_of_memory
from fused_remat._profiled import note_profiled
from fused_remat._progress import OnProgress, Progress, check_progress
from fused_remat._step import found_once
from fused_remat.budget import MIB, resolve
from fused_remat.plan import ranks
from fused_remat.plan.budgets import Budget, check_budget, check_count, device_memory
from fused_remat.plan.choose import Chooser, Chosen, candidates_of
from fused_remat.plan.fingerprint import fingerprint_of
from fused_remat.plan.numbers import Numbers, read_numbers
from fused_remat.plan.peak import Peak, stage_timeline
from fused_remat.plan.places import places_of
from fused_remat.plan.plan import FrontPoint, ModelRef, Plan
from fused_remat.plan.reading import counted
from fused_remat.plan.rows import outside_of, rows_of
from fused_remat.plan.seconds import with_seconds
from fused_remat.plan.solver import solve
from fused_remat.plan.stand_in import StandIn
from fused_remat.policy import Arrangement, Assignment
from fused_remat.profile.guard import refuse_to_lie
from fused_remat.recording import Recording, record_step
from fused_remat.recording.static import device_of
from fused_remat.show.sketch import Sketch
from fused_remat.sizes import parse_bytes
from fused_remat.training_step import TrainingStep, check_has_memory, make_step

MINIMISE = ("flops", "time")
ABOUT = ("model", "parameters", "loss", "optimizer", "training", "autocast")  # of `about_step`
_SMALLER = (8, 32)  # times smaller than the workspace in force may be what a plan gives its layers
_LEAST_WORKSPACE = MIB  # below that, tiles are too small for matrix products to run well
_NO_PEAK = 1 << 62  # bytes: stands for the peak of a run that memory did not suffice for, where ranks compare


def plan(
    model: nn.Module,
    *inputs: Any,
    budget: int | float | str,
    loss: Callable[[Any], Tensor] | None = None,
    optimizer: Optimizer | type[Optimizer] | Callable[[list[nn.Parameter]], Optimizer] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    minimise: str = "flops",
    fake: bool = False,
    in_flight: int = 1,
    count: Iterable[str] | None = None,
    device_bytes: int | str | None = None,
    device: torch.device | str | None = None,
    progress: OnProgress | None = None,
) -> Plan:
    """Decide for every layer what it keeps for backward and what is rebuilt, so that the peak of a whole optimizer step
    stays within a budget at the least cost.

    Each block of a chain (and each other module that is composed, or can run fused) gets one of: as it is; its MLPs and
    attentions fused, keeping all, a fraction or nothing of what they could keep; and recomputed as a region, alone or
    together with the blocks beside it. All fused layers get one workspace: that in force, or one 8 or 32 times smaller
    (not below 1 MiB, nor below a 128th of the peak as it is) where that lowers the peak; it is theirs whatever is in
    force when they run. What each of these takes is read from steps on fake tensors, a dynamic programme finds the
    trades of peak against cost that nothing beats (`Plan.front`; long ones by steps of a few per cent of the cost), and
    of those, cheapest first, plans are run until the measured peak of one is within the budget. A smaller budget never
    gives a plan with a larger measured peak (`fused_remat/plan/choose.py` has the reason).

    The model, its optimizer and the random generators are left as they were; `Plan.apply` arranges the model.

    Args:
        model: at least one parameter requires a gradient. Stock or converted; compile it after planning. Modules of
            `fused_remat.nn` are decided about like the others; as the model is, they keep all their residuals.
        inputs, kwargs: what `model` is called with.
        budget: for the peak of the step, everything included: parameters, buffers, optimizer state, gradients, inputs,
            kept and rebuilt activations, workspaces. Bytes (an int, "6GiB", "500 MB"); a fraction (0.6, "60%") of
            `device_bytes` where given, else of the memory of the CUDA device that the model is on, else of the
            predicted peak of the model as it is; "min": the smallest peak there is; "knee": the point of the front
            that is farthest below the straight line between its ends, where a saving begins to get dear.
        loss: of the model's output; None: its own `.loss`, its scalar, or the mean square of its first output.
        optimizer: an instance, or a class or function that makes one of the parameters; None: the step ends with
            backward.
        minimise: "flops": of what is redone, by formula, the same everywhere. "time": seconds of the step, measured,
            interleaved.
        fake: nothing is run: predictions alone decide. For models and devices that are not at hand; a model on the
            "meta" device is enough.
        in_flight: micro-batches that a pipeline stage holds between forward and backward (1F1B: as many as there are
            stages from this one on). `fused_remat.plan` then counts what k - 1 others keep, their inputs, and all
            gradients; the run that measures is of one micro-batch.
        count: what the budget includes of "parameters", "buffers", "optimizer", "inputs", "gradients"; None: all.
            Activations always count.
        device_bytes: the memory of the device that the plan is for, bytes or "80GiB". A budget above it is refused.
        device: with `fake`, the device that is predicted for; None: where the model is.
        progress: called as `progress(text, done, total)` before each step that is recorded or timed, and at the end
            with done equal to total. `total` is what is expected: it may grow while plans are run until one fits.

    Returns:
        A `Plan`; it prints as a table, `apply()` arranges the model, `save(path)` writes JSON.

    Raises:
        TypeError, ValueError: an argument of another kind or value; a compiled model; `minimise="time"` with `fake`.
        fused_remat.InfeasibleBudget: a ValueError with the smallest possible peak and what holds it.
        MemoryError: memory ran out in every plan that was run (one that runs out is over the budget, and the next is
            run), or in a step that can only be measured.
        RuntimeError: the numbers would be wrong here, as for `fused_remat.profile`: gradients are off, ...
        Whatever the step raises.

    Segments that are run again as one are those of Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost".
    """
    check_progress(progress)
    asked = _Asked.of(budget, minimise, fake, in_flight, count, device_bytes, device)
    step = make_step(model, inputs, kwargs, loss=loss, optimizer=optimizer)
    _check_not_compiled(model)
    refuse_to_lie(model, fake, "plan")
    if not fake:
        check_has_memory(step)
    planner = _Planner(step, asked, Progress(progress, 1))
    try:
        with found_once():
            found = planner.plan()
    finally:
        planner.arrangement.revert()
    note_profiled(model)
    planner.work.finish()
    return found


@dataclass(frozen=True)
class _Asked:
    """The checked arguments."""

    budget: Budget
    minimise: str
    fake: bool
    in_flight: int
    count: tuple[str, ...]
    device_bytes: int | None
    device: torch.device | None

    @classmethod
    def of(
        cls, budget: Any, minimise: Any, fake: Any, in_flight: Any, count: Any, device_bytes: Any, device: Any
    ) -> _Asked:
        if minimise not in MINIMISE:
            raise ValueError(f"minimise must be one of {', '.join(map(repr, MINIMISE))}; got {minimise!r}")
        if not isinstance(fake, bool):
            raise TypeError(f"fake must be a bool, got {fake!r}")
        if minimise == "time" and fake:
            raise ValueError(
                'minimise="time" measures seconds of real steps, and fake=True runs none; drop one of them'
            )
        if device is not None and not fake:
            raise ValueError(f"device is {device}, but real steps run where the model is; pass fake=True, or move it")
        if isinstance(in_flight, bool) or not isinstance(in_flight, int):
            raise TypeError(f"in_flight must be an int (micro-batches), got {in_flight!r}")
        if in_flight < 1:
            raise ValueError(f"in_flight must be an int of at least 1 (micro-batches), got {in_flight!r}")
        whole = None if device_bytes is None else parse_bytes("device_bytes", device_bytes)
        checked = check_budget(budget)
        if whole is not None and (nbytes := checked.nbytes(whole)) is not None and nbytes > whole:
            raise ValueError(f"budget is {nbytes} bytes, and device_bytes is {whole}; a budget fits on the device")
        return cls(
            checked,
            minimise,
            fake,
            in_flight,
            check_count(count),
            whole,
            None if device is None else torch.device(device),
        )


class _Planner:
    def __init__(self, step: TrainingStep, asked: _Asked, work: Progress):
        self.step, self.asked, self.work = step, asked, work
        self.arrangement = Arrangement(step.model)
        self.device = asked.device or device_of(step)
        self.memory = asked.device_bytes or self._memory()
        self.stand_in = StandIn.of(asked.device)
        self.notes = [self.stand_in.note] if self.stand_in.note else []
        self.why_not_predicted = ""
        self.recordings: dict[str, Recording] = {}  # of the plans that were run

    def plan(self) -> Plan:
        every = self._numbers()
        numbers = every[0]
        candidates = candidates_of(self._front(every))
        workspaces = numbers.tried if self.arrangement.layers else ()
        chooser = Chooser(candidates, self._judge, exact=self.asked.fake, workspaces=workspaces)
        everything = Peak.of(numbers.base, self.asked.in_flight)
        # Rank 0 decides: ranks with other budgets would run other plans, and wait for each other's peaks.
        nbytes = ranks.of_first_rank(self.asked.budget.nbytes(self.memory or everything.peak))
        word = self.asked.budget.word
        chosen = chooser.within(nbytes) if word is None else chooser.smallest() if word == "min" else chooser.knee()
        return self._made(numbers, chosen, everything, nbytes)

    def _memory(self) -> int | None:
        """Of the smallest device of all ranks."""
        mine = device_memory(self.device)
        return None if mine is None else ranks.lowest(mine, self.device)

    def _workspaces(self) -> list[int]:
        """In bytes: that in force, and smaller ones. All ranks read the same."""
        in_force = resolve(None, self.device.type)
        smaller = [max(in_force // times, _LEAST_WORKSPACE) for times in _SMALLER]
        return ranks.of_first_rank(list(dict.fromkeys([in_force, *(n for n in smaller if n < in_force)])))

    def _numbers(self) -> tuple[Numbers, ...]:
        """For each workspace that makes a difference; that in force first."""
        places = places_of(self.arrangement)
        self.why_not_predicted = self._why_not_predicted()
        record = self._read if self.why_not_predicted else self._predict
        every = read_numbers(self.step.model, places, record, self._workspaces(), expect=self._expect)
        if self.asked.minimise == "time":
            every = tuple(self._timed(numbers, every[0]) for numbers in every)
        return tuple(replace(numbers, notes=(*self.notes, *numbers.notes)) for numbers in every)

    def _expect(self, recordings: int) -> None:
        """Those to come, the seconds of `minimise="time"` apart; then, mostly, the smallest plan and the chosen one."""
        self.work.expect(recordings + 3)

    def _why_not_predicted(self) -> str:
        if self.asked.fake:
            return ""
        try:
            self._predict(Assignment())
        except Exception as error:  # whatever the model's code does with values
            first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            self.notes.append(
                f"numbers of the units are measured, since the model does not run on fake tensors: {first}"
            )
            return first
        return ""

    def _predict(self, assignment: Assignment) -> Recording:
        self.arrangement.set(assignment)
        with self.work.piece("predicting a step"), self.stand_in.settings():
            recording = record_step(self.step, fake=True, device=self.stand_in.device)
        return counted(recording, self.asked.count)

    def _measure(self, assignment: Assignment) -> Recording | RanOut:
        self.arrangement.set(assignment)
        with self.work.piece("measuring a step"):
            recording = unless_out_of_memory(lambda: record_step(self.step), self.device)
        return recording if isinstance(recording, RanOut) else counted(recording, self.asked.count)

    def _read(self, assignment: Assignment) -> Recording:
        """A measurement that there is no way around. Raises MemoryError."""
        recording = self._measure(assignment)
        if isinstance(recording, RanOut):
            which = "the step with the model as it is" if assignment == Assignment() else "a step"
            raise MemoryError(
                f"memory ran out in {which} ({recording.error}), and what its parts take can only be measured, since "
                f"the model does not run on fake tensors ({self.why_not_predicted}). Make its inputs smaller, or keep "
                "values of tensors out of what it decides, so that predictions (fake=True) can be made"
            )
        return recording

    def _timed(self, numbers: Numbers, largest: Numbers) -> Numbers:
        """With seconds for costs. Raises MemoryError."""
        timed = unless_out_of_memory(
            lambda: with_seconds(numbers, largest, self.step, self.arrangement, self.device, self.work), self.device
        )
        if isinstance(timed, RanOut):
            raise MemoryError(
                'minimise="time" times the step in every variant, the model as it is among them, and memory ran out in '
                f'one ({timed.error}). Pass minimise="flops", which needs no run to compare, or make the inputs smaller'
            )
        return timed

    def _front(self, every: tuple[Numbers, ...]) -> list[tuple[int, int, Assignment]]:
        """(peak, cost, assignment), cheapest first, as rank 0 has it.

        One workspace for the whole model. A smaller one redoes nothing, but its tiles are slower: of equal costs the
        larger comes first, and the smaller is left where its peak is lower.
        """
        numbers, in_flight = every[0], self.asked.in_flight
        others = (in_flight - 1) * numbers.base.static.get("inputs", 0)
        static, floor = numbers.base.static_bytes + others, numbers.parts.optimizer - others
        solved = [(own, s) for own in every for s in solve(own.units, floor=floor, in_flight=in_flight)]
        mine, lowest = [], math.inf
        for own, solution in sorted(solved, key=lambda s: (s[1].cost, -s[0].workspace, s[1].changes)):
            if solution.peak < lowest:
                lowest = solution.peak
                mine.append([static + lowest, solution.cost, own.assignment(solution).to_dict()])
        as_it_is = Peak.of(numbers.base, in_flight).peak
        # The model as it is was recorded itself.
        stock = numbers.as_it_is().to_dict()
        mine = [point for point in mine if point[2] != stock and (point[0] < as_it_is or point[1] < 0)]
        if not mine or mine[0][1] >= 0:
            mine.insert(0, [as_it_is, 0, stock])
        return [(peak, cost, Assignment.from_dict(data)) for peak, cost, data in ranks.of_first_rank(mine)]

    def _judge(self, assignment: Assignment) -> Peak | RanOut:
        recording = self._predict(assignment) if self.asked.fake else self._measure(assignment)
        ran_out = isinstance(recording, RanOut)
        peak = None if ran_out else Peak.of(recording, self.asked.in_flight)
        highest = ranks.highest(_NO_PEAK if ran_out else peak.peak, self.device)
        if highest == _NO_PEAK:
            return recording if ran_out else RanOut("on another rank")
        self.recordings[repr(assignment)] = recording
        return replace(peak, peak=highest)

    def _sketch(self, recording: Recording, assignment: Assignment) -> Sketch:
        peak = Peak.of(recording, self.asked.in_flight)
        sketch = Sketch.of(recording, assignment.regions, stage_timeline(recording, self.asked.in_flight))
        sketch = replace(sketch, peak_phase=peak.phase, peak_module=peak.module)
        return Sketch.from_dict(ranks.of_first_rank(sketch.to_dict())) if ranks.is_shared() else sketch

    def _made(self, numbers: Numbers, chosen: Chosen, everything: Peak, nbytes: int | None) -> Plan:
        asked, best = self.asked, chosen.candidates[chosen.index]
        about = about_step(self.step, numbers.base.device)
        measured = self.recordings.get(repr(best.assignment))
        predicted = measured if asked.fake else None
        if asked.fake:
            measured = None
        elif not self.why_not_predicted:
            predicted = self._predict(best.assignment)
        return Plan(
            assignment=best.assignment,
            predicted=Peak.of(predicted, asked.in_flight) if predicted else None,
            measured=None if asked.fake else best.peak,
            everything_kept=everything.peak,
            budget=asked.budget.given,
            budget_bytes=nbytes,
            minimise=asked.minimise,
            count=asked.count,
            in_flight=asked.in_flight,
            device=str(asked.device or numbers.base.device),
            device_bytes=self.memory,
            front=tuple(
                FrontPoint(c.predicted, c.cost, c.peak.peak if c.peak and not asked.fake else None, c.ran_out)
                for c in chosen.candidates
            ),
            chosen=chosen.index,
            passed_over=chosen.passed_over,
            units=rows_of(numbers, best.assignment, predicted, measured),
            outside=outside_of(numbers),
            notes=tuple(ranks.of_first_rank([*numbers.notes, *chosen.notes()])),
            fingerprint=fingerprint_of(self.step.model),
            inputs=tuple(f"{list(t.shape)} {str(t.dtype).removeprefix('torch.')}" for t in self.step.inputs()),
            about={name: about[name] for name in ABOUT},
            versions={"fused_remat": fused_remat_version(), "torch": torch.__version__},
            sketch=self._sketch(measured or predicted, best.assignment),
            _model=ModelRef(self.step.model),
        )


def fused_remat_version() -> str:
    """Of this package; asked for late, since the package imports this module."""
    import fused_remat

    return fused_remat.__version__


def _check_not_compiled(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if module._compiled_call_impl is not None or hasattr(module, "_orig_mod"):
            raise ValueError(
                f"{name or 'the model'} is compiled, and a compiled module cannot be arranged: plan the model as it is "
                "(torch.compile keeps the original as ._orig_mod), apply the plan, and compile then"
            )
