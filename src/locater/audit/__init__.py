"""The query-key eigenspectrum of every head of a checkpoint or a live model."""

from locater.audit.record import Audit as Audit
from locater.audit.record import HeadRecord as HeadRecord
from locater.audit.record import Verdict as Verdict
