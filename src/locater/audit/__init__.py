"""The query-key eigenspectrum of every head of a checkpoint or a live model."""

from locater.audit.audit import AuditConfig as AuditConfig
from locater.audit.audit import audit_checkpoint as audit_checkpoint
from locater.audit.audit import audit_model as audit_model
from locater.audit.compare import Comparison as Comparison
from locater.audit.compare import HeadChange as HeadChange
from locater.audit.compare import Timeline as Timeline
from locater.audit.compare import audit_timeline as audit_timeline
from locater.audit.compare import compare_checkpoints as compare_checkpoints
from locater.audit.table import RULES as RULES
from locater.audit.table import Audit as Audit
from locater.audit.table import HeadRecord as HeadRecord
from locater.audit.table import Verdict as Verdict
