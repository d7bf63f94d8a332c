"""Former location of `medusa`."""

from lightning_specdec.drafters.medusa import MultiTokenDrafter as MultiTokenDrafter
