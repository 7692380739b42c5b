"""The paper's step times beside the predictions of a profile of its authors' engine. No torch, no numpy."""
