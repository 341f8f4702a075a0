"""The query-key eigenspectrum of every head of a checkpoint or a live model."""

from locater.audit.record import Audit as Audit
from locater.audit.record import HeadRecord as HeadRecord
from locater.audit.record import Verdict as Verdict
from locater.audit.stream import AuditSettings as AuditSettings
from locater.audit.stream import audit_checkpoint as audit_checkpoint
from locater.audit.stream import audit_model as audit_model
from locater.audit.stream import named_process as named_process
from locater.audit.verdicts import RULES as RULES
