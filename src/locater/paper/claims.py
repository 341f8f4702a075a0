"""The paper's claims in words and formulas, each held against a number computed here and now."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import torch

from locater.core.bounds import collapse_bounds
from locater.core.form import QKForm
from locater.core.gradient import one_layer_output, qk_gradient
from locater.core.penalty import LocAteRConfig, locater_penalty
from locater.core.process import TokenProcess
from locater.core.theory import (
    classify,
    logit_variance,
    participation,
    rho_limit,
    rho_limit_slope,
    score_moments,
)
from locater.paper.curves import CORRECTED, PRINTED
from locater.report.page import Section, rendered
from locater.report.tables import Columns, markdown_table

Outcome = Literal[
    "reproduced",
    "differs",
    "depends on the reading",
    "not supported",
    "paper is wrong",
    "undecided",
]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One claim of the paper and what the part of the program that looked into it found.

    `differs` is for what was measured and came out otherwise, `depends on the reading` for what
    the text's weights give and the captions' do not (or the reverse), `not supported` for a cause
    whose evidence is missing, `paper is wrong` for what a counterexample or a proof refutes,
    `undecided` for what the seeds cannot tell.
    """

    where: str
    """In the paper: "Fig. 2", "Lemma 2.3"."""
    claim: str
    """What the paper says there."""
    outcome: Outcome
    found: str
    """What was computed, with the number that decides."""
    section: str
    """Key of the section of the page that shows it."""


RULE = (
    "A claim about training is “reproduced” where the claimed direction is found (paired t-test "
    "over seeds at 5 %, corrected after Holm) under both readings of the paper, whose text and "
    "captions disagree on which weight is which. It “differs” where the opposite, or no "
    "difference beyond a margin, is found under both. Where the readings disagree it “depends on "
    "the reading”; else it is “undecided”. Every verdict on training holds for the regime in its "
    "line."
)
"""Stands above the table."""
_COUNTED = {
    "reproduced": "reproduced",
    "differs": "came out otherwise",
    "depends on the reading": "that depend on how the paper is read",
    "not supported": "without support",
    "paper is wrong": "on which the paper is wrong",
    "undecided": "undecided",
}


def summary_line(verdicts: Sequence[Verdict]) -> str:
    """How many claims came out how."""
    count = Counter(verdict.outcome for verdict in verdicts)
    parts = [f"{count[name]} {words}" for name, words in _COUNTED.items() if count[name]]  # type: ignore[index]
    return f"{len(verdicts)} claims: {', '.join(parts)}."


def verdict_markdown(verdicts: Sequence[Verdict]) -> str:
    """The table for a page of documentation."""
    columns: Columns = {"where": "where", "the paper says": "claim",
               "verdict": lambda one: f"**{one.outcome}**", "we find": "found"}  # fmt: skip
    return f"{summary_line(verdicts)}\n\n{RULE}\n\n{markdown_table(verdicts, columns)}\n"


def verdict_section(verdicts: Sequence[Verdict], keys: Collection[str]) -> Section:
    """The table for the page, each row with a link to its section where `keys` has that one."""
    table = rendered("verdicts.html", "table", verdicts, summary_line(verdicts), keys, RULE,
                     room="locater.paper")  # fmt: skip
    return Section(key="verdicts", title="Verdicts", before=table, group="The paper's claims")


Record = dict[str, Any]
_WRONG: Outcome = "paper is wrong"


def _judge(holds: bool, otherwise: Outcome = _WRONG) -> Outcome:
    return "reproduced" if holds else otherwise


def _curve(records: Sequence[Record], name: str, field: str, **where: float) -> list[float]:
    return [
        record[field]
        for record in records
        if record["curve"] == name and all(record[key] == value for key, value in where.items())
    ]


def fig1_verdicts(records: Sequence[Record]) -> list[Verdict]:
    """Whether the piecewise softmax meets the softmax where it is expanded, and stays near it."""
    gap = _curve(records, "softmax", "gap")
    smooth = _curve(records, "softmax", "value")
    straight = _curve(records, "piecewise linear", "value")
    distance = [abs(a - b) for a, b in zip(smooth, straight, strict=True)]
    middle = min(range(len(gap)), key=lambda place: abs(gap[place]))
    worst = max(range(len(gap)), key=lambda place: distance[place])
    return [
        Verdict(
            where="Sec. 2, Fig. 1",
            claim="A piecewise-linear softmax stands in for the softmax.",
            outcome=_judge(distance[middle] < 1e-9 and distance[worst] < 0.25),
            found=f"equal at the origin, {distance[worst]:.3f} apart at most (at ω₁ − ω₂ = "
            f"{abs(gap[worst]):.1f})",
            section="fig1",
        )
    ]


def fig2_verdicts(records: Sequence[Record]) -> list[Verdict]:
    """Whether the curves of Fig. 2 are right, and whether their message is."""
    panels = list(dict.fromkeys((record["xi"], record["eta"]) for record in records))

    def gap(xi: float, eta: float) -> float:
        curves = (_curve(records, n, "rho", xi=xi, eta=eta) for n in (PRINTED, CORRECTED))
        return max(abs(a - b) for a, b in zip(*curves, strict=True))

    xi, eta = max(panels, key=lambda panel: gap(*panel))
    share = {
        (name, at): participation(
            torch.tensor(_curve(records, name, "rho", xi=at, eta=1), dtype=torch.float64)
        ).item()
        for name in (PRINTED, CORRECTED)
        for at in (0, max(xi for xi, _ in panels))
    }
    top = max(xi for xi, _ in panels)
    return [
        Verdict(
            where="Fig. 2",
            claim="ρ(θ) over the (ξ, η) grid, from Lemma 1.",
            outcome=_judge(gap(xi, eta) < 0.01),
            found=f"with the right variance ρ moves by up to {gap(xi, eta):.2f} (at ξ = {xi:g}, "
            f"η = {eta:g})",
            section="fig2",
        ),
        Verdict(
            where="Fig. 2, Sec. 4",
            claim="A spectrum that concentrates off zero localizes attention.",
            outcome=_judge(share[CORRECTED, top] < 0.5 * share[CORRECTED, 0]),
            found=f"ρ takes part on {share[CORRECTED, top]:.3f} of the positions at ξ = {top:g}, "
            f"η = 1 ({share[PRINTED, top]:.3f} as printed), on {share[CORRECTED, 0]:.3f} at ξ = 0",
            section="fig2",
        ),
    ]


def fig3_verdicts(records: Sequence[Record]) -> list[Verdict]:
    """Whether the last token goes dark beyond ξη = 2 and only there, as drawn in the paper."""
    last: dict[float, list[float]] = {}
    for record in records:
        if record["curve"] in (PRINTED, CORRECTED) and record["theta"] == 1:
            last.setdefault(record["xi"] * record["eta"], []).append(record["rho"])
    (low, lows), (high, highs) = sorted(last.items())
    below, above = min(lows), max(highs)
    return [
        Verdict(
            where="Fig. 3",
            claim="Beyond ξη = 2 the late tokens go dark.",
            outcome=_judge(low < 2 < high and below > 0.99 and above < 0.01),
            found=f"ρ of the last token is {below:.3f} at ξη = {low:.3g} and {above:.3f} at "
            f"{high:.3g} (η = 0.01; the text's 0.02 does not fit)",
            section="fig3",
        )
    ]


def fig4_verdicts(records: Sequence[Record], tokens: int = 64) -> list[Verdict]:
    """Whether the printed entropy bound is one, and whether a bound can have a peak."""
    norm, printed = (_curve(records, PRINTED, field) for field in ("norm", "entropy"))
    bound = _curve(records, "attained bound", "entropy")
    peak, limit = max(printed), math.log(tokens)
    falls = all(a > b for a, b in pairwise(bound))
    return [
        Verdict(
            where="Eq. 9, Fig. 4",
            claim="The entropy bound rises to a peak and then falls with the norm of W_QK.",
            outcome=_judge(peak <= limit and not falls),
            found=f"the printed bound reaches {peak:.2f} at ν = {norm[printed.index(peak)]:.1f}, "
            f"no entropy exceeds ln {tokens} = {limit:.2f}; the attained bound "
            + ("only falls" if falls else "rises somewhere"),
            section="fig4",
        )
    ]


def theory_verdicts() -> Iterator[Verdict]:
    """Lemmas 1 and 2, the bounds, the gradients and the regularizer's target, in a second or so."""
    yield from _lemma1()
    yield from _lemma2()
    yield from _bounds()
    yield from _gradients()
    yield _target()


def _claim(where: str, claim: str, outcome: Outcome, found: str) -> Verdict:
    return Verdict(where=where, claim=claim, outcome=outcome, found=found, section="errata")


def _lemma1() -> Iterator[Verdict]:
    tokens, xi, eta = 512, 5.0, 0.5
    form = QKForm.from_xi_eta(xi, eta, dim=64)
    mean, variance = score_moments(form, TokenProcess.random_walk(tokens))
    theta = torch.arange(1, tokens + 1, dtype=torch.float64) / tokens
    gap = (mean - (theta - 0.5) * xi * eta).abs().max().item()
    yield _claim(
        "Lemma 1",
        "The mean of the score tends to (θ − ½) tr W/λ.",
        _judge(gap <= (1 + xi * eta) / tokens),
        f"at T = {tokens} the exact mean is within {gap:.4f} of it; what is missing is of order "
        "1/T, which decides where W is small",
    )
    ratio = logit_variance(theta, lemma1="as_printed") * eta**2 / variance
    yield _claim(
        "Lemma 1",
        "The variance of the score is (2θ² + 7/12) tr W²/λ².",
        _judge((ratio - 1).abs().max().item() < 0.02),
        f"{ratio[tokens // 2 - 1].item():.1f} times too large at θ = ½, "
        f"{ratio[-1].item():.2f} times at θ = 1; it is 2θ² − 2θ + 7/12",
    )


def _lemma2() -> Iterator[Verdict]:
    theta = torch.linspace(0, 1, 401, dtype=torch.float64)
    for sign, name, side in ((1.0, "Lemma 2.1", "late"), (-1.0, "Lemma 2.2", "early")):
        worst = 0.0
        for r in (1.0, 5.0):
            position = 0.5 + sign * (theta - 0.5)  # mirrored for ξ → −∞
            inside = (position > 0.5) & (position < 0.5 + 1 / r)
            is_off_edge = ((position - 0.5).abs() > 0.01) & ((position - 0.5 - 1 / r).abs() > 0.01)
            rho = rho_limit(theta, xi=sign * 1e4, eta=r / 1e4)
            worst = max(worst, (rho - inside.double()).abs()[is_off_edge].max().item())
        yield _claim(
            name,
            f"As ξ → {'' if sign > 0 else '−'}∞ and η → 0 only the {side} or the middle tokens are "
            "on, by the size of ξη.",
            _judge(worst < 1e-3),
            f"0 and 1 to {max(worst, 1e-16):.0e} off the edges, at |ξ| = 10⁴; on them the limit is "
            "½ or depends on the rate",
        )
    slope = rho_limit_slope(theta, xi=1e-12, eta=1.0).abs().max().item()
    yield _claim(
        "Lemma 2.3",
        "As ξ → 0, ρ becomes uniform: ρ′ → 0.",
        _judge(slope < 1e-3),
        f"at ξ = 10⁻¹² and η = 1 the slope is still {slope:.3f}",
    )
    flat = rho_limit(theta, xi=0.0, eta=5.0)
    middle, edge = flat[200].item(), flat[0].item()
    yield _claim(
        "Sec. 4",
        "Attention is uniform when tr W → 0 at finite tr W².",
        _judge(middle / edge < 1.05),
        f"the middle is on {middle / edge:.1f} times as often as the edges at ξ = 0, η = 5: "
        f"{middle:.3f} and {edge:.3f}",
    )
    most = max(
        rho_limit(theta, xi=xi, eta=1e3).max().item() for xi in (-1e3, -10.0, 0.0, 10.0, 1e3)
    )
    yield _claim(
        "Lemma 2.4",
        "As η → ∞, ρ vanishes.",
        _judge(most < 0.01),
        f"at η = 1000 the largest ρ is {most:.5f}, for ξ from −1000 to 1000",
    )


def _bounds() -> Iterator[Verdict]:
    generator = torch.Generator().manual_seed(0)
    draws = torch.randn(1000, 6, 6, generator=generator, dtype=torch.float64)
    symmetric = (draws + draws.mT) / 2
    square = torch.einsum("nij,nji->n", symmetric, symmetric)
    trace = symmetric.diagonal(dim1=-2, dim2=-1).sum(-1)
    broken = int((trace.square() > 6 * square * (1 + 1e-12)).sum())
    yield _claim(
        "Eqs. 5, 8",
        "|tr W| ≤ √(d tr W²) for symmetric W_QK.",
        _judge(broken == 0),
        f"{broken} of 1000 random symmetric matrices break it",
    )
    identity = QKForm.from_eigenvalues(torch.ones(128, dtype=torch.float64), temperature=1.0)
    signed = QKForm.from_eigenvalues(torch.tensor([1.0, -1.0]).double(), temperature=1.0)
    cases = (
        ("Eq. 7", "7a", identity, "|tr W| / (√d ‖Σ‖₂) ≤ ‖W_QK‖₂.", "W_QK = Σ = I₁₂₈"),
        ("Eq. 10", "10b", signed, "‖W_QK‖₂ ≤ |tr W_QK|.", "W_QK = diag(1, −1)"),
    )
    for where, equation, form, claim, example in cases:
        printed = collapse_bounds(form, variant="as_printed")
        bound = next(bound for bound in printed if bound.equation == equation)
        lower, upper, holds = bound.lower.item(), bound.upper.item(), bool(bound.holds)
        sign = "≤" if holds else ">"
        yield _claim(where, claim, _judge(holds), f"{example}: {lower:.4g} {sign} {upper:.4g}")


def _gradients() -> Iterator[Verdict]:
    generator = torch.Generator().manual_seed(0)
    options: dict[str, Any] = {"generator": generator, "dtype": torch.float64}
    tokens, target = 2 * torch.randn(1, 5, 3, **options), torch.randn(1, 3, **options)
    qk, value, feedforward = torch.randn(3, 3, 3, **options)
    weights = {"value": value, "feedforward": feedforward, "temperature": 0.7}
    leaf = qk.clone().requires_grad_()
    loss = (target - one_layer_output(tokens, qk=leaf, **weights)).square().sum() / 2
    (true,) = torch.autograd.grad(loss, leaf)
    total = qk_gradient(tokens, target, qk=qk, **weights).total
    error = ((total - true).norm() / true.norm()).item()
    yield _claim(
        "Eq. 3",
        "The QK-gradient of the one-layer model.",
        _judge(error < 1e-10),
        f"equals automatic differentiation to {max(error, 1e-15):.0e} of its norm",
    )
    sizes = []
    walks = torch.randn(200, 512, 4, **options).cumsum(1)
    step, identity = torch.randn(200, 4, **options), torch.eye(4, dtype=torch.float64)
    feedforward = torch.linspace(0.5, 2, 4, dtype=torch.float64).diag()
    for length in (64, 512):
        pace = 512 // length  # every pace-th token, shrunk by √pace, is a walk again
        some = walks[:, pace - 1 :: pace] / math.sqrt(pace)
        goal = some[:, -1] + step
        parts = [
            qk_gradient(x, y, qk=identity, value=identity, feedforward=feedforward,
                        temperature=2.0)
            for x, y in zip(some.split(10), goal.split(10), strict=True)
        ]  # fmt: skip
        norms = [[part.quadratic.norm(), part.saturated.norm()] for part in parts]
        sizes.append(torch.tensor(norms, dtype=torch.float64).mean(0))
    kept, dropped = ((sizes[1] / sizes[0]).log() / math.log(8)).tolist()
    yield _claim(
        "Eq. 4, App. B.2",
        "The part (19) of the gradient outgrows (20) as T grows, by T³.",
        _judge(kept - dropped > 1),
        f"from T = 64 to 512 they grow like T^{kept:.2f} and T^{dropped:.2f}",
    )
    query = torch.tensor([[[1.0, 2.0, 0.0], [0.0, 1.0, -1.0]]]).double().requires_grad_()
    key = torch.tensor([[[1.0, 1.0, 0.0], [0.0, 2.0, -1.0]]]).double()
    config = LocAteRConfig(scale_strength=0.0, mean_strength=1.0)
    (right,) = torch.autograd.grad(locater_penalty(query, key, config), query)
    trace = (query * key).sum().item()
    ratio = ((trace - 1) * trace * key).norm().item() / right.norm().item()
    yield _claim(
        "Sec. 6",
        "∇(tr W_QK − 1)² is (tr W_QK − 1) tr W_QK · W_K.",
        _judge(abs(ratio - 1) < 1e-9),
        f"{ratio:.3g} times the gradient at tr W_QK = {trace:g}; it is 2 (tr W_QK − 1) W_K",
    )


def _target() -> Verdict:
    tokens, dim = 64, 128
    flat = QKForm.from_eigenvalues(torch.full((dim,), 1 / dim).double(), temperature=math.sqrt(dim))
    regime = classify(flat, TokenProcess.random_walk(tokens), method="gaussian")
    r, count = regime.r.item(), int(regime.count.item())
    return _claim(
        "Sec. 6",
        "LocAteR's target tr W_QK = 1 localizes attention.",
        _judge(abs(r) > 2 and count < tokens // 2, "differs"),
        f"at the target r = tr W/λ = {r:.3f} for d = {dim}, and {count} of {tokens} tokens are on; "
        "Lemma 2 asks for |r| > 2",
    )
