"""Benchmarks: `python -m benchmarks.run mlp`, `attention` or `mha` (`--help` lists the options).

Data flow: `cases.py`, `attention_cases.py` (shapes) -> one file per operation (`mlp.py`, `attention.py`, `mha.py`:
inputs, truth, providers) -> `parity.py` (the gate) -> `fused_remat.measure` (bytes, products, seconds) -> `results.py`
(records, CSV) -> `table.py` and `plot.py`.
A new operation is one more file with an `Operation` and one more entry in `run.OPERATIONS`.
"""
