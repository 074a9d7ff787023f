"""Chapter 5: continuous batching.

The bottleneck: a batch that waits for its longest answer computes for fewer and fewer sequences, while others queue.
The idea: decide anew before every step who is in it; a request enters when there is room and leaves with its last
token (Yu et al. 2022, "Orca"), and a long prompt is cut into slices so that it does not hold up everybody's next
token (Agrawal et al. 2023, "Sarathi"). The invariant: what a request is answered does not depend on who else is
served: not on the policy, the batch, the pool, the slices or the order of arrival.

Read `request` (what is asked, and one answer as it grows), `scheduler` (who runs, a pure decision), `engine` (the
step that carries it out), in this order. It serves one process and one model; there is no network in it.
"""

from minillm.continuous_batching.engine import Engine, OneToken
from minillm.continuous_batching.request import Request, Result, Sample
from minillm.continuous_batching.scheduler import Plan, Scheduler, StaticScheduler

__all__ = ["Engine", "OneToken", "Plan", "Request", "Result", "Sample", "Scheduler", "StaticScheduler"]
