"""What was measured, as records, and the records as CSV.

The CSV has one row per metric, with the columns of Liger's benchmark files (kernel_name ... timestamp) and then the
versions. Measured values stand in the y columns alone; goals and shapes are in `extra_benchmark_config_str` (JSON).
"""

from __future__ import annotations

import csv
import json
import platform
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import astuple, dataclass
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import fused_remat
from benchmarks.operation import CHECKPOINT, EAGER
from fused_remat.measure import Measurement, Spread, Timing

_MIB = 2**20
# Name, unit, and median, 20th and 80th percentile (empty for what is counted rather than timed).
_Metric = tuple[str, str, tuple]


@dataclass(frozen=True)
class CaseResult:
    """One case: measurements, times and errors of its providers by name (eager first), and why the others did not run.

    `errors`: the largest error against float64 among output and gradients, in units of eager's error of that tensor.
    """

    operation: str
    case: Any
    memory: Mapping[str, Measurement]
    times: Mapping[str, Timing]
    errors: Mapping[str, float]
    not_run: Mapping[str, str]

    def ratio(self, provider: str, baseline: str) -> Spread | None:
        """Time of `provider` over that of `baseline`; None if the baseline did not run."""
        return self.times[provider].ratio_to(self.times[baseline]) if baseline in self.times else None

    def products(self, provider: str) -> float:
        """Matrix products run, in units of one product of the layer (2MDF FLOP for the MLP)."""
        return self.memory[provider].gemm_flop / self.case.gemm_flop

    def redone(self, provider: str) -> float:
        """Products run beyond eager's."""
        return self.products(provider) - self.products(EAGER)


def mib(nbytes: int | None) -> float:
    """Bytes as MiB."""
    return (nbytes or 0) / _MIB


def environment(device: torch.device) -> dict[str, str]:
    """Versions, commit and device, named as the CSV columns; empty text for what is not there."""
    return {
        "device_name": _device_name(device),
        "device_threads": str(torch.get_num_threads()) if device.type == "cpu" else "",
        "timestamp": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M:%S"),
        "fused_remat_version": fused_remat.__version__,
        "fused_remat_commit": _commit(),
        "torch_version": torch.__version__,
        "triton_version": _version("triton"),
        "cuda_version": torch.version.cuda or "",
        "python_version": platform.python_version(),
    }


def rows(result: CaseResult, environment: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """The CSV rows of one case: each metric of each provider that ran, and one row with the reason for each other."""
    case = result.case
    for provider in result.times:
        for metric, unit, value in _metrics(result, provider):
            goals = {bar.baseline: bar.most for bar in case.bars if bar.provider == provider}
            config = {**case.config(), "rounds": len(result.times[provider].rounds), "time_ratio_goals": goals}
            yield _row(result, provider, (metric, unit, value), config, environment)
    for provider, reason in result.not_run.items():
        config = {**case.config(), "reason": reason}
        yield _row(result, provider, ("not run", "", ("", "", "")), config, environment)


def write_csv(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """`rows` (at least one) to `path`, the columns being the keys of the first."""
    rows = list(rows)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def _metrics(result: CaseResult, provider: str) -> Iterator[_Metric]:
    seconds, memory = result.times[provider].seconds, result.memory[provider]
    yield "speed", "ms", tuple(1e3 * value for value in astuple(seconds))
    for baseline in (EAGER, CHECKPOINT):
        ratio = result.ratio(provider, baseline)
        if ratio is not None:
            yield f"speed_to_{baseline}", "ratio", astuple(ratio)
    counted = {
        ("kept_memory", "MiB"): mib(memory.kept_bytes),
        ("forward_peak_above_output", "MiB"): mib(memory.forward_peak_above_output_bytes),
        ("backward_peak_above_gradients", "MiB"): mib(memory.backward_peak_above_gradients_bytes),
        ("backward_peak", "MiB"): mib(memory.backward_peak_bytes),
        ("products", "of the layer"): result.products(provider),
        ("products_redone", "of the layer"): result.redone(provider),
        ("gemm_calls", "count"): memory.gemms,
        ("error_to_eager", "ratio"): result.errors[provider],
    }
    for (name, unit), value in counted.items():
        yield name, unit, (value, "", "")


def _row(
    result: CaseResult,
    provider: str,
    metric: _Metric,
    config: Mapping[str, Any],
    environment: Mapping[str, str],
) -> dict[str, Any]:
    name, unit, (median, p20, p80) = metric
    return {
        "kernel_name": result.operation,
        "kernel_provider": provider,
        "kernel_operation_mode": "full",
        "metric_name": name,
        "metric_unit": unit,
        "x_name": "case",
        "x_label": "shape and dtype",
        "x_value": result.case.name,
        "y_value_50": median,
        "y_value_20": p20,
        "y_value_80": p80,
        "extra_benchmark_config_str": json.dumps(config),
        **environment,
    }


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpu_info = Path("/proc/cpuinfo")
    lines = cpu_info.read_text().splitlines() if cpu_info.exists() else []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _commit() -> str:
    """Commit of the checkout that holds this file, with `-dirty` if it was changed; empty outside of one."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--exclude=*", "--abbrev=12"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
