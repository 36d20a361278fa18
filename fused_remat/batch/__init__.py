"""`find_batch_size`: the largest batch whose whole optimizer step fits, with and without a policy.

In reading order: `find` checks the arguments and runs one `search` per policy, which asks `trials` for each size;
`meters` say what limits a trial and what it used, `inputs` what `make_batch` returned, `arrange` puts a model under a
policy for a while; `report` is the result.
"""

from fused_remat.batch.find import find_batch_size
from fused_remat.batch.report import BatchReport, BatchResult
from fused_remat.batch.search import Accumulation, Trial
from fused_remat.batch.trials import TrialError

__all__ = ["Accumulation", "BatchReport", "BatchResult", "Trial", "TrialError", "find_batch_size"]
