"""Simulated harvests of known truth: traffic, pipeline, losses, and the datasets of them.

What the audits are calibrated against. Stands apart: nothing of the product imports it.
"""

from actds_testing.simulate.dataset import write_dataset, write_tables
from actds_testing.simulate.losses import Truth, load_of
from actds_testing.simulate.run import Simulated, simulate
from actds_testing.simulate.scenario import SCENARIOS, Scenario

__all__ = [
    "SCENARIOS",
    "Scenario",
    "Simulated",
    "Truth",
    "load_of",
    "simulate",
    "write_dataset",
    "write_tables",
]
