"""Where does a transformer's attention look, is it collapsing, and how do I control it?"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from locater.audit import Audit as Audit
    from locater.audit import Comparison as Comparison
    from locater.audit import Timeline as Timeline
    from locater.audit import audit_checkpoint as audit_checkpoint
    from locater.audit import audit_model as audit_model
    from locater.audit import audit_timeline as audit_timeline
    from locater.audit import compare_checkpoints as compare_checkpoints
    from locater.control.locater import LocAteR as LocAteR
    from locater.control.trial import Trial as Trial
    from locater.control.trial import TrialConfig as TrialConfig
    from locater.control.trial import trial as trial
    from locater.core.bounds import Inequality as Inequality
    from locater.core.bounds import collapse_bounds as collapse_bounds
    from locater.core.bounds import entropy_lower_bound as entropy_lower_bound
    from locater.core.diagnosis import Diagnosis as Diagnosis
    from locater.core.diagnosis import diagnose as diagnose
    from locater.core.form import QKForm as QKForm
    from locater.core.form import Rotary as Rotary
    from locater.core.gradient import QKGradient as QKGradient
    from locater.core.gradient import qk_gradient as qk_gradient
    from locater.core.penalty import LocAteRConfig as LocAteRConfig
    from locater.core.process import TokenProcess as TokenProcess
    from locater.core.spectrum import Spectrum as Spectrum
    from locater.core.theory import PredictedAttention as PredictedAttention
    from locater.core.theory import Profile as Profile
    from locater.core.theory import Regime as Regime
    from locater.core.theory import attention_entropy as attention_entropy
    from locater.core.theory import classify as classify
    from locater.core.theory import logit_moments as logit_moments
    from locater.core.theory import logit_variance as logit_variance
    from locater.core.theory import piecewise_softmax as piecewise_softmax
    from locater.core.theory import predicted_attention as predicted_attention
    from locater.core.theory import propagation as propagation
    from locater.core.theory import rho_limit as rho_limit
    from locater.core.theory import score_moments as score_moments
    from locater.errors import ConfigError as ConfigError
    from locater.errors import InputError as InputError
    from locater.errors import LocaterError as LocaterError
    from locater.errors import MissingExtraError as MissingExtraError
    from locater.models.live import Pair as Pair
    from locater.models.live import find_attention as find_attention
    from locater.probe.alarms import Alarm as Alarm
    from locater.probe.alarms import AlarmRules as AlarmRules
    from locater.probe.probe import MeasuredHead as MeasuredHead
    from locater.probe.probe import Probe as Probe
    from locater.probe.rows import TokenRank as TokenRank
    from locater.reality.against_theory import Reality as Reality
    from locater.reality.against_theory import RealityConfig as RealityConfig
    from locater.reality.against_theory import against_theory as against_theory
    from locater.simulation import SimulateConfig as SimulateConfig
    from locater.simulation import Simulation as Simulation
    from locater.simulation import simulate as simulate

# torch takes a second to import and `locater --help` does not need it: names are found when used
_HOMES = {
    "locater.models.live": "Pair find_attention",
    "locater.probe.probe": "MeasuredHead Probe",
    "locater.probe.alarms": "Alarm AlarmRules",
    "locater.probe.rows": "TokenRank",
    "locater.control.locater": "LocAteR",
    "locater.control.trial": "Trial TrialConfig trial",
    "locater.audit": (
        "Audit Comparison Timeline audit_checkpoint audit_model audit_timeline compare_checkpoints"
    ),
    "locater.core.bounds": "Inequality collapse_bounds entropy_lower_bound",
    "locater.core.diagnosis": "Diagnosis diagnose",
    "locater.core.gradient": "QKGradient qk_gradient",
    "locater.core.penalty": "LocAteRConfig",
    "locater.core.process": "TokenProcess",
    "locater.core.form": "QKForm Rotary",
    "locater.core.spectrum": "Spectrum",
    "locater.core.theory": (
        "PredictedAttention Profile Regime attention_entropy classify logit_moments "
        "logit_variance piecewise_softmax predicted_attention propagation rho_limit score_moments"
    ),
    "locater.errors": "ConfigError InputError LocaterError MissingExtraError",
    "locater.reality.against_theory": "Reality RealityConfig against_theory",
    "locater.simulation": "SimulateConfig Simulation simulate",
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names.split()}
__version__ = "0.2.0"
__all__ = sorted(_HOME_OF)


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'locater' has no attribute {name!r}")
    return getattr(import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
