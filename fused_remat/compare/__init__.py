"""The command `fused-remat compare`: real models, real data, trained three ways with the same seeds.

One file per model (`vit.py`, `llama.py`, each a `Workload`) and one for a model of the user's own (`custom.py`, with
`factory.py` and `inputs.py`), one for the three ways (`variants.py`, `blocks.py`), one that trains them side by side
(`train.py`), one that puts these together (`run.py`), and what is made of the outcome (`results.py`): `report.py`
(tables, CSV, JSON), `picture.py` and `page.py` (HTML). `command.py` has the options and their checks.
Importing this package imports none of the optional dependencies.
"""
