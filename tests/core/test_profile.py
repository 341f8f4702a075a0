"""A profile is ρ by position; its summaries and its plain records."""

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


def test_records_hold_every_head_and_position_in_order() -> None:
    rho = torch.arange(8, dtype=torch.float64).view(2, 1, 4) / 8
    profile = Profile(
        theta=THETA, rho=rho, source="simulated", standard_error=rho / 10, label="walk"
    )
    records = profile.records()
    assert [record["head"] for record in records] == [0] * 4 + [1] * 4
    assert [record["theta"] for record in records] == THETA.tolist() * 2
    assert [record["rho"] for record in records] == rho.flatten().tolist()
    assert [record["standard_error"] for record in records] == (rho / 10).flatten().tolist()
    assert {(record["label"], record["source"]) for record in records} == {("walk", "simulated")}


def test_a_computed_profile_has_no_standard_errors_in_its_records() -> None:
    records = Profile(theta=THETA, rho=THETA / 2).records()
    assert len(records) == 4 and all(record["standard_error"] is None for record in records)


@pytest.mark.usefixtures("unchecked")
def test_rho_and_theta_have_the_same_positions() -> None:
    match = r"rho has 3 positions and theta has 4.\nhint: give one rho for every theta"
    with pytest.raises(InputError, match=match):
        Profile(theta=THETA, rho=torch.zeros(2, 3))
