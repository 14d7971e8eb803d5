"""Methods that mask patches of a ViT: MAE and CAE."""
