"""A profile is ρ by position; and its summaries."""

from __future__ import annotations

import pytest
import torch

from locater import InputError, Profile

THETA = torch.tensor([0.25, 0.5, 0.75, 1.0], dtype=torch.float64)


def test_participation_is_one_when_uniform_and_one_over_the_tokens_when_single() -> None:
    rho = torch.tensor([[0.3, 0.3, 0.3, 0.3], [0.0, 0.9, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    profile = Profile(theta=THETA, rho=rho.double())
    torch.testing.assert_close(profile.participation, torch.tensor([1.0, 0.25, 0.0]).double())
    torch.testing.assert_close(profile.peak, rho.double().amax(-1))
    assert profile.source == "theory" and profile.standard_error is None


@pytest.mark.usefixtures("unchecked")
def test_rho_and_theta_have_the_same_positions() -> None:
    match = r"rho has 3 positions and theta has 4.\nhint: give one rho for every theta"
    with pytest.raises(InputError, match=match):
        Profile(theta=THETA, rho=torch.zeros(2, 3))
