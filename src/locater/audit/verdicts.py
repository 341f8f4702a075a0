"""What a head's numbers amount to, in words: each verdict is one rule, and says its number.

All of them speak of attention at the audit's length under the audit's tokens.  With assumed tokens
(Σ = I) they compare heads; they are no measurement of the model on text.
"""

from __future__ import annotations

import math

from locater.audit.table import Verdict

COLLAPSED_TOKENS = 2.0
"""Attention that rests on fewer tokens than this, exp(mean entropy), counts as collapsed."""
UNIFORM_SHARE = 0.99
"""Entropy that cannot be less than this share of ln T counts as uniform."""
VANISHING_PEAK = 0.1
"""A largest ρ below this counts as vanished, as in `classify`."""

RULES: dict[Verdict, str] = {
    "entropy-collapse risk": (
        f"exp(mean entropy) < {COLLAPSED_TOKENS:g}: the attention rests on fewer than "
        f"{COLLAPSED_TOKENS:g} tokens"
    ),
    "vanishing signal": (
        f"largest ρ < {VANISHING_PEAK:g}: whatever the position, the token's gate is nearly always "
        "shut, and W_QK learns little from it (Lemma 2.4)"
    ),
    "rank-collapse risk": (
        f"least possible entropy (Eq. 9, corrected) >= {UNIFORM_SHARE:g} ln T: no arrangement of "
        "logits of this size leaves uniform attention, so the head averages its tokens"
    ),
    "not judged": (
        "queries and keys are normalized before their product: the size of W_QK does not set the "
        "size of the logits"
    ),
    "healthy": "none of the other rules fires",
}


def judge(
    *,
    entropy: float,
    entropy_bound: float,
    peak: float,
    tokens: int,
    qk_norm: bool = False,
) -> tuple[Verdict, str]:
    """The verdict on one head and the number behind it.

    >>> judge(entropy=0.2, entropy_bound=0.0, peak=0.9, tokens=64)[0]
    'entropy-collapse risk'
    >>> judge(entropy=4.158, entropy_bound=4.157, peak=1.0, tokens=64)[0]
    'rank-collapse risk'
    """
    most = math.log(tokens)
    rests_on = math.exp(entropy)
    if qk_norm:
        return "not judged", RULES["not judged"]
    if rests_on < COLLAPSED_TOKENS:
        return (
            "entropy-collapse risk",
            (
                f"attention rests on {rests_on:.3g} of {tokens} tokens (mean entropy {entropy:.3g} "
                f"nats), fewer than {COLLAPSED_TOKENS:g}"
            ),
        )
    if peak < VANISHING_PEAK:
        return "vanishing signal", f"largest ρ is {peak:.3g}, below {VANISHING_PEAK:g}"
    if entropy_bound >= UNIFORM_SHARE * most:
        return (
            "rank-collapse risk",
            (
                f"entropy is at least {entropy_bound:.4g} of {most:.4g} nats, "
                f"{entropy_bound / most:.1%}: the head averages all tokens"
            ),
        )
    return (
        "healthy",
        (
            f"no rule fires: attention rests on {rests_on:.3g} of {tokens} tokens, entropy is at "
            f"least {entropy_bound:.3g} nats, largest ρ is {peak:.3g}"
        ),
    )
