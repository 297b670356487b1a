"""The sample ledger: which samples the committed steps trained on, who computed them, the proof.

`python -m runtime.ledger` checks one: a job's checkpoint, or what the REST API says of it.
"""

from __future__ import annotations

from runtime.ledger.record import Range, SampleLedger, Summary, Summed, proof_of, runs

__all__ = ["Range", "SampleLedger", "Summary", "Summed", "proof_of", "runs"]
