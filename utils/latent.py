"""Names that data and models of latents share."""

from __future__ import annotations

WIRES = ("float16", "int8", "int4")  # ways to send latents
# truncated texts: as many tokens as a prefix has positions, as many bytes as the sent latents take
CUTS = ("first", "cut")
# what evaluations let a model answer from: latents in each way to send them, and baselines
ANSWER_INPUTS = (*WIRES, "text", *CUTS, "nothing", "other", "mean")
