"""What data and models of latents must agree on."""

from __future__ import annotations

# what evaluations let a model answer from: latents as they are sent, and baselines for them
ANSWER_INPUTS = ("float16", "int8", "int4", "text", "first", "nothing", "other", "mean")
