"""Names of the evaluations that run on the pretended GPU, for tests that must not register the device."""

ON_SEVERAL_RANKS = ("features", "linear step", "finetune step", "detection step")
"""Parts in which ranks communicate. The others would mix the answers of pretended ranks with the rows of this one."""
EVALUATIONS = (
    "color", "compiled color", "features", "knn", "linear cached", "linear step", "finetune step", "detection step",
    "detection test", "search", "neighbors", "explain",
)  # fmt: skip
