"""One evaluation on several ranks: tensors and groups of ranks, no model."""
